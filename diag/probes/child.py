"""A child process that is measured: started, waited for, ended.

Owns its process group, its two output streams and the signals that ask hwr-diag itself to end. Promises that whatever is written is
kept without a pipe that could fill, that nothing of its group outlives it, whether a deadline, a signal or itself ended it, and that
nobody waits for ever for a process that the kernel does not let go. Refuses to interpret what it says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Final

from diag.probes.interpreter import bound

# Long enough for an interpreter to unwind, short enough for a person at the terminal.
GRACE_S: Final = 3.0
# A process in an uninterruptible sleep survives SIGKILL until its system call returns.
_UNKILLABLE_S: Final = 10.0
# What an end goes unnoticed at most; as often as subprocess looks.
_LOOK_S: Final = 0.05
_ASKING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class Stop:
    """The first signal that asked hwr-diag to end, 0 while none did, and how many came."""

    signal: int = 0
    count: int = 0

    @property
    def exit_code(self) -> int:
        """The exit status that a shell expects; 0 while no signal came."""
        return 128 + self.signal if self.signal else 0

    @property
    def name(self) -> str:
        """The signal's name."""
        return signal_name(self.signal)


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Note SIGTERM, SIGINT and SIGHUP instead of dying of them; what runs in the block looks at the `Stop` and ends in order.

    A signal that was ignored before (nohup, a shell's background job) stays ignored. Only the main thread may do this.
    """
    stop = Stop()

    def note(number: int, _: FrameType | None) -> None:
        stop.signal = stop.signal or number
        stop.count += 1

    before = {number: signal.getsignal(number) for number in _ASKING}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in ours:
            signal.signal(number, note)
        yield stop
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)


class Child:
    """A process in a session of its own: a Ctrl-C at the terminal reaches hwr-diag, which ends it in order."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cpus: Iterable[int] | None = None) -> None:
        """Start it.

        Raises:
            OptionError: it may not run on one of `cpus`.
            OSError: it cannot be started.
        """
        self._stdout, self._stderr = os.memfd_create("stdout"), os.memfd_create("stderr")
        self.begun = time.monotonic()
        try:
            with bound(cpus):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self._close()
            raise
        self.pid = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end(Stop(count=2))
        self._close()

    @property
    def seconds(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self.begun

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs, or if the kernel does not let it go."""
        return self._process.returncode

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; say whether it has ended, and with it whatever was left of its group."""
        deadline, pause = time.monotonic() + seconds, 0.0005
        while not self._reaped():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            pause = min(2 * pause, left, _LOOK_S)
            time.sleep(pause)
        return True

    def end(self, stop: Stop, *, grace_s: float = GRACE_S) -> None:
        """End the group: SIGTERM, and SIGKILL to what is left after a while, or at once when a second signal asks for it.

        What its leader leaves behind is killed as the leader ends.
        """
        if self._reaped():
            return
        if stop.count < 2:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and stop.count < 2:
                if self.wait(0.05):
                    return
        self._signal(signal.SIGKILL)
        self.wait(_UNKILLABLE_S)

    def output(self) -> bytes:
        """Return everything that it wrote to stdout so far."""
        return _whole(self._stdout)

    def errors(self, most: int) -> bytes:
        """Return the last bytes that it wrote to stderr."""
        size = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, most, max(0, size - most))

    def _reaped(self) -> bool:
        """Reap it if it has ended, after the rest of its group: while it is a zombie, nobody else can have the group's number."""
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel reaped it, and the number may be anybody's
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                    return False
                self._signal(signal.SIGKILL)
            self._process.wait()
        return True

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # not reaped yet, so the number is still its own
            os.killpg(self.pid, number)

    def _close(self) -> None:
        os.close(self._stdout)
        os.close(self._stderr)


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _whole(file: int) -> bytes:
    parts, at = [], 0
    while part := os.pread(file, 1 << 24, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
