"""/proc/PID/statm: the sizes of a process, cheapest of all.

Owns the seven columns, of which two are always 0 and left out. Promises bytes. Refuses precision, as `status` does.
A kernel thread reads as zeros that are true: it has no memory of its own.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, Pid, read_text
from hwr.procfs.text import complete_lines, numbers

_COLUMNS: Final = 7


@dataclass(frozen=True, slots=True)
class Statm:
    """Sizes in bytes: mapped, resident, resident of files and shared memory, code mapped, data and stack mapped."""

    size: int
    resident: int
    shared: int
    text: int
    data: int


def parse_statm(text: bytes, *, page_size: int = mmap.PAGESIZE) -> Statm | Unavailable:
    """Parse the line; `page_size` is that of the machine that wrote it."""
    lines = complete_lines(text)
    pages = numbers(lines[0]) if len(lines) == 1 else None
    if pages is None or len(pages) < _COLUMNS:
        return Unavailable("statm: not one whole line of seven numbers")
    size, resident, shared, code, _lib, data = (count * page_size for count in pages[:6])
    return Statm(size=size, resident=resident, shared=shared, text=code, data=data)


def read_statm(pid: Pid, proc_root: Path = PROC_ROOT) -> Statm | Unavailable:
    """Read a process's statm; never blocks, whatever the process does."""
    text = read_text(proc_root / str(pid) / "statm")
    return text if isinstance(text, Unavailable) else parse_statm(text)
