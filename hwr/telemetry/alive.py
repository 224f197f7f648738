"""The alive file: who still lives, as told by the kernel, and whether its interpreter still runs.

Owns `alive`: a flock held for life, and two little-endian u64, CLOCK_BOOTTIME of the last beat and the number of beats.
Promises that a dead writer never looks alive (the kernel drops its lock) and that a beat is one pwrite. Beats that stop in a
live process mean that nobody got the GIL. Refuses to signal a process in order to look at it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable, errno_text
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.rundir import ALIVE

BEAT_SECONDS: Final = 1.0
_LAYOUT: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of a worker; `mono_ns` is CLOCK_BOOTTIME."""

    mono_ns: int
    count: int


class AliveFile:
    """The writer's end. Not thread-safe: one thread beats."""

    def __init__(self, directory: Path) -> None:
        """Create and lock the file.

        Raises:
            OSError: it cannot be made or locked.
        """
        self._fd = os.open(directory / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        self._count = 0
        self.beat()

    def beat(self) -> None:
        """Record that the interpreter runs now."""
        self._count += 1
        os.pwrite(self._fd, _LAYOUT.pack(boot_ns(), self._count), 0)

    def close(self) -> None:
        """Close the descriptor; in a forked child this leaves the parent's lock alone."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def read_beat(directory: Path) -> Beat | Unavailable:
    """Read the last beat of a worker directory."""
    try:
        fd = os.open(directory / ALIVE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            raw = os.pread(fd, _LAYOUT.size, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return Unavailable(errno_text(error))
    return Beat(*_LAYOUT.unpack(raw)) if len(raw) == _LAYOUT.size else Unavailable("no beat was written yet")
