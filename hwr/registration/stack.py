"""stack.txt: where the interpreter stood when a driver call did not return.

Owns the file in this process's journal directory and the timer across each call. Promises a dump of every thread after 5 s of one
call, and again every 5 s: a C thread of the interpreter writes it, so that a held GIL does not matter; and nothing at all without a
journal directory. Refuses to touch signals, and to cancel anything: a dump says where a call is, the call goes on.

The timer (`faulthandler.dump_traceback_later`) exists once in a process. Whether a server of which we are a part has armed it for
itself cannot be known: arming replaces its timer, and cancelling after the call leaves none. Nothing else of faulthandler is used.
The file is begun anew by the next call once it is above 1 MiB; within one call that never returns it grows by a dump every 5 s.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hwr.telemetry.clock import boot_ns

STACK: Final = "stack.txt"
DUMP_SECONDS: Final = 5.0
MAX_BYTES: Final = 1 << 20
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StackFile:
    """The stack file of this process, opened once; without a directory, or where it cannot be made, it does nothing."""

    def __init__(self, directory: Path | None, *, seconds: float = DUMP_SECONDS) -> None:
        """Open it; a failure is no reason to stop a registration."""
        self._seconds = seconds
        self._pid = os.getpid()
        self._fd = -1
        if directory is not None:
            with contextlib.suppress(OSError):
                self._fd = os.open(directory / STACK, _FLAGS, 0o640)

    @contextlib.contextmanager
    def armed(self, what: str) -> Iterator[None]:
        """Dump the stacks of all threads while the block takes long; `what` stands above the dumps."""
        if self._fd < 0:
            yield
            return
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_size > MAX_BYTES:
                os.ftruncate(self._fd, 0)
            os.write(self._fd, f"-- {what}; begun at {boot_ns()} ns (CLOCK_BOOTTIME)\n".encode("ascii", "replace"))
        faulthandler.dump_traceback_later(self._seconds, repeat=True, file=self._fd)
        try:
            yield
        finally:
            if os.getpid() == self._pid:  # the timer is a thread, and no thread survives a fork
                faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Close the file; the timer is not armed any more."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
