"""/proc/PID/io: what a process read and wrote.

Owns the file's keys. Promises counters since the process started. Refuses to count what was read through a mapping: faults bring
pages in without moving `rchar`, and `read_bytes` only where the disk was asked on the process's own account.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, read_text
from hwr.procfs.text import keyed_lines, number


@dataclass(frozen=True, slots=True)
class Io:
    """Bytes: through system calls (`rchar`, `wchar`), and from and to the disk (`read_bytes`, `write_bytes`)."""

    rchar: int | None
    wchar: int | None
    read_bytes: int | None
    write_bytes: int | None


def parse_io(text: bytes) -> Io | Unavailable:
    """Parse the file."""
    found = keyed_lines(text)
    values = [number(found.get(key)) for key in (b"rchar", b"wchar", b"read_bytes", b"write_bytes")]
    return Unavailable("io: no whole line") if all(value is None for value in values) else Io(*values)


def read_io(pid: Pid, proc_root: Path = PROC_ROOT) -> Io | Unavailable:
    """Read a process's counters; never blocks."""
    text = read_text(proc_root / str(pid) / "io", capability=CAP_SYS_PTRACE)
    return text if isinstance(text, Unavailable) else parse_io(text)
