"""How much memory this process may pin.

Owns the four ceilings and which of them wins. Promises that a refusal comes before any driver call, names the winner and says
what would move it, and that what is not known is no ceiling: it is `Unavailable`, never 0. Refuses to wait or to free memory.

What is counted: each process counts every page of its own plan once, in whole pages, as the driver books them (not the bytes of
the tensors), against each ceiling alone. Ranks that pin one shared file book its pages once physically, but each counts them
all: the kernel's memory-lock limit is meant per process and does count them so, and nothing tells a process which of a file's
pages others hold already. The error is on the side of staging: a rank that looks after another has pinned may refuse what would
have cost nothing. It is on the other side between ranks with different files, which look at the same moment at the same free
memory: the configured ceiling is what divides a machine among them.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hwr.errors import HostRegistrationBudgetError, Unavailable
from hwr.outcomes import BudgetSource
from hwr.procfs.capabilities import CAP_IPC_LOCK, read_capable
from hwr.procfs.cgroup import CGROUP_ROOT, MemoryGroup, read_memory_groups
from hwr.procfs.limits import read_limits
from hwr.procfs.meminfo import read_meminfo
from hwr.procfs.reading import PROC_ROOT
from hwr.procfs.status import read_status
from hwr.units import GIB

# Left to everybody else: pinned pages never come back under pressure, and a start goes on allocating beside them (a process
# with torch and a CUDA context takes about 1 GiB of its own). A twentieth where that is less: a small machine runs small models.
RESERVE_BYTES: Final = GIB
_RESERVE_PART: Final = 20

_REMEDIES: Final[Mapping[BudgetSource, str]] = {
    BudgetSource.CONFIGURED: "Raise the registration limit (0 is none), or leave it and be staged.",
    BudgetSource.MEMLOCK: "Raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=-1) or grant CAP_IPC_LOCK.",
    BudgetSource.CGROUP: "Raise the memory limit of the container or the unit, or stop what else runs in it.",
    BudgetSource.MEMINFO: "Free memory on this machine: MemAvailable less the reserve is what can be pinned.",
}


def reserve_of(total_bytes: int) -> int:
    """Say how much of so much memory is not to be pinned."""
    return min(RESERVE_BYTES, total_bytes // _RESERVE_PART)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the kernel says now, in bytes; None is no limit.

    `memlock_bytes` is what may still be locked. `cgroup_headroom_bytes` is that of the tightest level, its own reserve taken off.
    `reserve_bytes` is still to be taken off `available_bytes`.
    """

    memlock_bytes: int | Unavailable | None
    cgroup_headroom_bytes: int | Unavailable | None
    available_bytes: int | Unavailable
    reserve_bytes: int

    def __post_init__(self) -> None:
        figures = (self.memlock_bytes, self.cgroup_headroom_bytes, self.available_bytes, self.reserve_bytes)
        if any(isinstance(figure, int) and figure < 0 for figure in figures):
            raise ValueError(f"no amount of memory is negative: {figures}")


@dataclass(frozen=True, slots=True)
class Budget:
    """The smallest ceiling and whose it is (None and None: there is none), all ceilings, and what could not be known."""

    bytes: int | None
    source: BudgetSource | None
    candidates: Mapping[BudgetSource, int]
    unknown: Mapping[BudgetSource, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bytes != min(self.candidates.values(), default=None):
            raise ValueError(f"{self.bytes} is not the smallest of {dict(self.candidates)}")
        if (self.source is None) != (self.bytes is None) or (self.source is not None and self.candidates.get(self.source) != self.bytes):
            raise ValueError(f"{self.bytes} is not the ceiling of {self.source}")
        if any(source in self.candidates for source in self.unknown):
            raise ValueError("a ceiling is known or not")

    def check(self, needed_bytes: int) -> None:
        """Refuse a plan of this size that is not within it.

        Raises:
            HostRegistrationBudgetError: which ceiling, and what would raise it.
        """
        if self.bytes is not None and self.source is not None and needed_bytes > self.bytes:
            raise HostRegistrationBudgetError(
                reason=self.source, planned=needed_bytes, budget=self.bytes, source=self.source.value, remedy=_REMEDIES[self.source]
            )


def budget(facts: Facts, limit_bytes: int | None, *, memlock_applies: bool) -> Budget:
    """Choose the smallest ceiling; of equal ones the first in `BudgetSource`, which is the easiest to change.

    `memlock_applies` is the driver's: mlock is subject to RLIMIT_MEMLOCK, NVIDIA's driver books nothing there.

    Raises:
        ValueError: a configured ceiling below 1 byte; no ceiling is None.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"a ceiling of {limit_bytes} bytes would forbid everything: None is no ceiling")
    available = facts.available_bytes
    figures: dict[BudgetSource, int | Unavailable | None] = {
        BudgetSource.CONFIGURED: limit_bytes,
        BudgetSource.MEMLOCK: facts.memlock_bytes if memlock_applies else None,
        BudgetSource.CGROUP: facts.cgroup_headroom_bytes,
        BudgetSource.MEMINFO: available if isinstance(available, Unavailable) else max(0, available - facts.reserve_bytes),
    }
    candidates = {source: figure for source, figure in figures.items() if isinstance(figure, int)}
    unknown = {source: figure.reason for source, figure in figures.items() if isinstance(figure, Unavailable)}
    source = min(candidates, key=lambda source: candidates[source], default=None)
    return Budget(None if source is None else candidates[source], source, candidates, unknown)


def read_facts(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT, *, page_bytes: int = mmap.PAGESIZE) -> Facts:
    """Read what holds for this process now: about a millisecond, and no lock of any process."""
    memory = read_meminfo(proc_root)
    if isinstance(memory, Unavailable):
        available: int | Unavailable = memory
        reserve = RESERVE_BYTES
    else:
        available = Unavailable("meminfo: no whole MemAvailable line") if memory.available is None else memory.available
        reserve = reserve_of(memory.total)
    return Facts(_memlock(proc_root, page_bytes), _cgroup_headroom(proc_root, cgroup_root), available, reserve)


def _memlock(proc_root: Path, page_bytes: int) -> int | Unavailable | None:
    limits = read_limits("self", proc_root)
    limit = limits if isinstance(limits, Unavailable) else limits.locked_memory
    if limit is None:
        return Unavailable('limits: no whole "Max locked memory" row')
    if isinstance(limit, Unavailable):
        return limit
    if limit.soft is None:
        return None
    lifted = read_capable(CAP_IPC_LOCK, "self", proc_root)
    if isinstance(lifted, Unavailable) or lifted:
        return lifted if isinstance(lifted, Unavailable) else None
    status = read_status("self", proc_root)
    if isinstance(status, Unavailable):
        return status
    if status.locked is None:
        return Unavailable("status: no whole VmLck line")
    # The kernel compares pages, and rounds the limit down to them (mm/mlock.c).
    return max(0, limit.soft // page_bytes * page_bytes - status.locked)


def _cgroup_headroom(proc_root: Path, cgroup_root: Path) -> int | Unavailable | None:
    groups = read_memory_groups("self", proc_root, cgroup_root)
    if isinstance(groups, Unavailable):
        return groups
    known = [_pinnable(group) for group in groups if isinstance(group, MemoryGroup)]
    limited = [headroom for headroom in known if headroom is not None]
    if limited:
        return min(limited)  # a ceiling, whatever a level that could not be read would say
    return next((group for group in groups if isinstance(group, Unavailable)), None)


def _pinnable(group: MemoryGroup) -> int | None:
    # A group pinned full to its limit has its next allocation end in an OOM kill: the reserve holds here as on the machine.
    return None if group.headroom is None or group.limit is None else max(0, group.headroom - reserve_of(group.limit))
