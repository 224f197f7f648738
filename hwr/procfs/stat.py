"""/proc/PID/stat: state, faults, processor time and start of a process.

Owns the positions of the fields. Promises that a name with parentheses, blanks and newlines moves none of them, and a
start time on CLOCK_BOOTTIME that tells two owners of one PID apart. Refuses the fields that the kernel hides or zeroes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, Pid, read_text
from hwr.procfs.text import name_text, number
from hwr.units import NS_PER_S

# proc_pid_stat(5) counts from 1 and the name is field 2; these count from 0 at the state, field 3.
_STATE: Final = 0
_PPID: Final = 1
_MINFLT: Final = 7
_MAJFLT: Final = 9
_UTIME: Final = 11
_STIME: Final = 12
_THREADS: Final = 17
_STARTTIME: Final = 19


@dataclass(frozen=True, slots=True)
class Stat:
    """A process or a thread; `comm` may hold any character but NUL and is at most 15 bytes (63 for a kernel worker)."""

    pid: int
    comm: str
    state: str
    ppid: int
    minflt: int
    majflt: int
    utime_s: float
    stime_s: float
    threads: int
    start_ns: int

    @property
    def stopped(self) -> bool:
        """Whether a signal or a tracer holds it."""
        return self.state in ("T", "t")


def parse_stat(text: bytes, *, ticks_per_s: int | None = None) -> Stat | Unavailable:
    """Parse the line; `ticks_per_s` is the tick of the machine that wrote it, this one's by default."""
    ticks = ticks_per_s or os.sysconf("SC_CLK_TCK")
    # Only numbers follow the name, so that the last parenthesis closes it, whatever it holds.
    begin, end = text.find(b" ("), text.rfind(b") ")
    fields = text[end + 2 :].split()
    pid = number(text[:begin]) if 0 <= begin < end else None
    if pid is None or len(fields) <= _STARTTIME or not text.endswith(b"\n"):
        return Unavailable("stat: not one whole line of fields")
    state = fields[_STATE]
    wanted = [number(fields[at]) for at in (_PPID, _MINFLT, _MAJFLT, _UTIME, _STIME, _THREADS, _STARTTIME)]
    values = [value for value in wanted if value is not None]
    if len(values) != len(wanted) or len(state) != 1 or not state.isalpha():
        return Unavailable("stat: a field is not what belongs there")
    ppid, minflt, majflt, utime, stime, threads, start = values
    return Stat(
        pid=pid,
        comm=name_text(text[begin + 2 : end]),
        state=state.decode("ascii"),
        ppid=ppid,
        minflt=minflt,
        majflt=majflt,
        utime_s=utime / ticks,
        stime_s=stime / ticks,
        threads=threads,
        start_ns=start * NS_PER_S // ticks,
    )


def read_stat(pid: Pid, proc_root: Path = PROC_ROOT) -> Stat | Unavailable:
    """Read a process's stat; never blocks, whatever the process does."""
    text = read_text(proc_root / str(pid) / "stat")
    return text if isinstance(text, Unavailable) else parse_stat(text)
