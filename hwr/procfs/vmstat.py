"""/proc/vmstat: the kernel's counters for the whole machine.

Owns the names of those that the suite judges by. Promises every counter as the kernel counts it, and None for one
that it lacks. Refuses rates: two samples are the caller's.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.procfs.text import complete_lines, number


@dataclass(frozen=True, slots=True)
class VmStat:
    """All counters by the kernel's name; `nr_*` count pages of `page_size`, the others events."""

    counters: Mapping[str, int]
    page_size: int = mmap.PAGESIZE

    @property
    def nr_foll_pin_acquired(self) -> int | None:
        """Pages pinned since boot (Linux >= 5.7)."""
        return self.counters.get("nr_foll_pin_acquired")

    @property
    def nr_foll_pin_released(self) -> int | None:
        """Pages unpinned since boot (Linux >= 5.7)."""
        return self.counters.get("nr_foll_pin_released")

    @property
    def nr_mlock(self) -> int | None:
        """Pages locked in memory now; moves while mlock is at work, unlike VmLck."""
        return self.counters.get("nr_mlock")

    @property
    def pgfault(self) -> int | None:
        """Page faults since boot."""
        return self.counters.get("pgfault")

    @property
    def pgmajfault(self) -> int | None:
        """Page faults since boot that waited for I/O."""
        return self.counters.get("pgmajfault")

    @property
    def pinned(self) -> int | None:
        """Bytes pinned now: exact and live for long-term pins, whoever's they are."""
        acquired, released = self.nr_foll_pin_acquired, self.nr_foll_pin_released
        if acquired is None or released is None:
            return None
        # Two counters that are summed over the CPUs one after the other: a pin between them must not read as negative.
        return max(0, acquired - released) * self.page_size

    @property
    def mlocked(self) -> int | None:
        """Bytes locked in memory now."""
        return None if self.nr_mlock is None else self.nr_mlock * self.page_size


def parse_vmstat(text: bytes, *, page_size: int = mmap.PAGESIZE) -> VmStat | Unavailable:
    """Parse `name number` lines; others are skipped."""
    counters: dict[str, int] = {}
    for line in complete_lines(text):
        name, _, word = line.partition(b" ")
        value = number(word)
        if name and name.isascii() and value is not None:
            counters[name.decode("ascii")] = value
    return VmStat(counters, page_size) if counters else Unavailable("vmstat: no whole line")


def read_vmstat(proc_root: Path = PROC_ROOT) -> VmStat | Unavailable:
    """Read the counters."""
    text = read_text(proc_root / "vmstat")
    return text if isinstance(text, Unavailable) else parse_vmstat(text)
