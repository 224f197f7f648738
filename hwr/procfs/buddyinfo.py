"""/proc/buddyinfo: how fragmented free memory is.

Owns the table. Promises the free blocks of each order in each zone, as the kernel counts them. Refuses a verdict: a long-term
pin needs free pages where they may stay, and how many of them must lie together is the driver's secret. A record of this
table from before a pin is what is left to look at when the machine froze in it.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.procfs.text import complete_lines, number, numbers

_ROW: Final = re.compile(rb"Node (\d+), zone +(\w+)((?: +\d+)+) *", re.ASCII)


@dataclass(frozen=True, slots=True)
class Zone:
    """A memory zone of a NUMA node; `blocks[k]` counts its free blocks of 2^k pages of `page_size`."""

    node: int
    name: str
    blocks: tuple[int, ...]
    page_size: int = mmap.PAGESIZE

    def free_bytes(self, order: int = 0) -> int:
        """Free memory in blocks of at least 2^`order` pages."""
        return sum(count << at for at, count in enumerate(self.blocks) if at >= order) * self.page_size


def parse_buddyinfo(text: bytes, *, page_size: int = mmap.PAGESIZE) -> tuple[Zone, ...]:
    """Parse the table in its own order; lines that are not whole are skipped."""
    zones: list[Zone] = []
    for line in complete_lines(text):
        row = _ROW.fullmatch(line)
        node, blocks = (number(row[1]), numbers(row[3])) if row else (None, None)
        if row is not None and node is not None and blocks is not None:
            zones.append(Zone(node, row[2].decode("ascii"), blocks, page_size))
    return tuple(zones)


def read_buddyinfo(proc_root: Path = PROC_ROOT) -> tuple[Zone, ...] | Unavailable:
    """Read the table; an empty or unreadable one is Unavailable."""
    path = proc_root / "buddyinfo"
    text = read_text(path)
    if isinstance(text, Unavailable):
        return text
    return parse_buddyinfo(text) or Unavailable(f"{path}: holds no whole line")
