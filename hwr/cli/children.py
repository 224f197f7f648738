"""The child processes of a command: they end when it does.

Owns the orderly end that a signal asks for, in a worker and in the command that started it, and the parent-death signal.
Promises that a signal reaches every child, that a second one does not tear the clean-up of the first, and that no child outlives a
command that was killed. Refuses signals of a process that is not ours: only commands install handlers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from hwr import telemetry
from hwr.outcomes import Phase
from hwr.telemetry.events import PhaseChanged

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class Terminated(BaseException):
    """A signal asked for the end; unwinding closes what is open."""


@dataclass(slots=True)
class Stop:
    """The signal that asked for the end, 0 while none did."""

    signal: int = 0

    @property
    def exit_code(self) -> int:
        """The exit status that a shell expects."""
        return 128 + self.signal if self.signal else 0


@contextlib.contextmanager
def terminated(told: Callable[[], None] | None = None, *, ignore: Sequence[signal.Signals] = ()) -> Iterator[Stop]:
    """Turn SIGTERM and SIGINT (except those to `ignore`) into an orderly end of the block; `told` is called as the first arrives."""
    stop = Stop()

    def handler(number: int, _: FrameType | None) -> None:
        if stop.signal:  # it is ending already: a second exception would tear what the first one closes
            return
        stop.signal = number
        if told is not None:
            told()
        raise Terminated

    with _handling(handler, ignore), contextlib.suppress(Terminated):
        yield stop


@contextlib.contextmanager
def forwarding(children: Sequence[subprocess.Popen[Any]]) -> Iterator[Stop]:
    """Send SIGTERM and SIGINT on to the children while the block starts them and waits for them."""
    stop = Stop()

    def handler(number: int, _: FrameType | None) -> None:
        stop.signal = number
        for child in children:
            if child.returncode is None:
                child.send_signal(number)

    with _handling(handler, ()):
        yield stop


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], ignore: Sequence[signal.Signals]) -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN if number in ignore else handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def terminating() -> None:
    """Tell that the end was asked for."""
    telemetry.emit(PhaseChanged(phase=Phase.TERMINATING))


def end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the process that started us is gone: an orphan would keep its memory and its lease."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *(ctypes.c_ulong,) * 4]
    libc.prctl.restype = ctypes.c_int
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it went before we asked
        sys.exit(128 + signal.SIGTERM)
