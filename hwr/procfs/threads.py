"""/proc/PID/task: the threads of a process, and where each waits.

Owns the listing and the files `wchan` and `syscall` of one thread. Promises that none of them blocks, whatever the process does.
Refuses to take a lone 0 for "nowhere": to a reader without the right, the kernel answers 0 for every thread.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, read_text, unreadable
from hwr.procfs.stat import Stat, parse_stat
from hwr.procfs.text import hexadecimal

_SYMBOL: Final = re.compile(rb"[A-Za-z_.][A-Za-z0-9_.$]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Syscall:
    """The system call that a thread is in. `number` None: it runs, or waits outside of a call (a page fault)."""

    running: bool
    number: int | None = None
    arguments: tuple[int, ...] = ()


def list_threads(pid: int, proc_root: Path = PROC_ROOT) -> tuple[int, ...] | Unavailable:
    """Return the ids of a process's threads; the main one has the process's."""
    path = proc_root / str(pid) / "task"
    try:
        return tuple(sorted(int(name) for name in os.listdir(path) if name.isascii() and name.isdecimal()))
    except OSError as error:
        return unreadable(path, error)


def read_thread_stat(pid: int, tid: int, proc_root: Path = PROC_ROOT) -> Stat | Unavailable:
    """Read one thread's stat: its own state, faults and processor time."""
    text = read_text(proc_root / str(pid) / "task" / str(tid) / "stat")
    return text if isinstance(text, Unavailable) else parse_stat(text)


def parse_wchan(text: bytes) -> str | Unavailable:
    """Parse the name of the kernel function that a thread sleeps in."""
    return text.decode("ascii") if _SYMBOL.match(text) else Unavailable("wchan: not told: it runs, or CAP_SYS_PTRACE is missing")


def read_wchan(pid: int, tid: int, proc_root: Path = PROC_ROOT) -> str | Unavailable:
    """Read where a thread sleeps."""
    text = read_text(proc_root / str(pid) / "task" / str(tid) / "wchan", capability=CAP_SYS_PTRACE)
    return text if isinstance(text, Unavailable) else parse_wchan(text)


def parse_syscall(text: bytes) -> Syscall | Unavailable:
    """Parse `running`, or a number, six arguments, stack pointer and program counter; -1 is a wait outside of a call."""
    words = text.split()
    if words == [b"running"]:
        return Syscall(running=True)
    if words and words[0] == b"-1":
        return Syscall(running=False)
    if len(words) != 9 or not words[0].isdigit() or len(words[0]) > 6:
        return Unavailable("syscall: not a whole line")
    arguments = [hexadecimal(word.removeprefix(b"0x")) for word in words[1:7]]
    if any(value is None for value in arguments):
        return Unavailable("syscall: an argument is no number")
    return Syscall(running=False, number=int(words[0]), arguments=tuple(value for value in arguments if value is not None))


def read_syscall(pid: int, tid: int, proc_root: Path = PROC_ROOT) -> Syscall | Unavailable:
    """Read the system call that a thread is in; `running` may also be a call that spins inside of a driver."""
    text = read_text(proc_root / str(pid) / "task" / str(tid) / "syscall", capability=CAP_SYS_PTRACE)
    return text if isinstance(text, Unavailable) else parse_syscall(text)
