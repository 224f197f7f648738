"""The child processes of a command: they end when it does.

Owns the way of a signal from a command to the processes that it started, and the parent-death signal. Promises that a signal reaches
every child, and that no child outlives a command that was killed. Refuses signals of a process that is not ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

from hwr import telemetry
from hwr.ending import Stop, handling
from hwr.outcomes import Phase
from hwr.telemetry.events import PhaseChanged

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
# A second Ctrl-C of a nervous hand comes sooner; whoever still waits then means it.
PATIENCE_SECONDS: Final = 2.0


@contextlib.contextmanager
def forwarding(children: Sequence[subprocess.Popen[Any]]) -> Iterator[Stop]:
    """Send SIGTERM and SIGINT on to the children while the block starts them and waits for them.

    A rank that is stuck in a driver call answers neither: asked again after a while, it is killed.
    """
    stop = Stop()
    asked: list[float] = []

    def handler(number: int, _: FrameType | None) -> None:
        stop.signal = number
        asked.append(time.monotonic())
        again = asked[-1] - asked[0] >= PATIENCE_SECONDS
        for child in children:
            if child.returncode is None:
                child.send_signal(signal.SIGKILL if again else number)

    with handling(handler, ()):
        yield stop


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
