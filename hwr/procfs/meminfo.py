"""/proc/meminfo: what memory the machine has, and what of it is still to be had.

Owns the keys of this file that somebody in the suite reads. Promises bytes, and None for a key that this kernel or this
text lacks. Refuses to know of containers: these figures are the host's, also inside one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.procfs.text import keyed_lines, kilobytes


@dataclass(frozen=True, slots=True)
class MemInfo:
    """Sizes in bytes."""

    total: int
    free: int | None = None
    available: int | None = None  # the kernel's estimate of what can be had without swapping; since Linux 3.14
    cached: int | None = None  # page cache with tmpfs, reclaimable or not
    shmem: int | None = None  # the part of it that is tmpfs and shared memory
    unevictable: int | None = None  # mlocked or otherwise not reclaimable; a long-term pin alone does not show here
    mlocked: int | None = None  # each page once, however many processes lock it


def parse_meminfo(text: bytes) -> MemInfo | Unavailable:
    """Parse the file; without MemTotal it says nothing."""
    found = keyed_lines(text)
    total = kilobytes(found.get(b"MemTotal"))
    if total is None:
        return Unavailable("meminfo: no whole MemTotal line")
    return MemInfo(
        total=total,
        free=kilobytes(found.get(b"MemFree")),
        available=kilobytes(found.get(b"MemAvailable")),
        cached=kilobytes(found.get(b"Cached")),
        shmem=kilobytes(found.get(b"Shmem")),
        unevictable=kilobytes(found.get(b"Unevictable")),
        mlocked=kilobytes(found.get(b"Mlocked")),
    )


def read_meminfo(proc_root: Path = PROC_ROOT) -> MemInfo | Unavailable:
    """Read the machine's memory."""
    text = read_text(proc_root / "meminfo")
    return text if isinstance(text, Unavailable) else parse_meminfo(text)
