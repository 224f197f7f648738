"""/proc/PID/smaps_rollup: what a process's mappings cost, all together.

Owns `Amounts`, the counters that the kernel keeps over one mapping or over all.
Promises bytes, and None for a counter that this kernel lacks. Refuses to be cheap: the kernel walks every page under the
target's mmap lock, some 5 to 30 ms a GiB, and the target's own mmap and page faults wait meanwhile; while the target holds that lock,
the reader waits. Read it on demand, within a budget, from where being blocked hurts nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, read_text
from hwr.procfs.text import complete_lines, keyed_lines, kilobytes


@dataclass(frozen=True, slots=True)
class Amounts:
    """Bytes by kind; None is unknown, never 0.

    `anonymous` is the measure of private memory: Private_* falls when another process maps the same pages, and a
    read-only mapping of tmpfs counts as dirty.
    """

    rss: int | None = None
    pss: int | None = None
    pss_dirty: int | None = None
    shared_clean: int | None = None
    shared_dirty: int | None = None
    private_clean: int | None = None
    private_dirty: int | None = None
    referenced: int | None = None
    anonymous: int | None = None
    anon_huge: int | None = None
    shmem_huge: int | None = None
    file_huge: int | None = None
    shared_hugetlb: int | None = None
    private_hugetlb: int | None = None
    swap: int | None = None
    swap_pss: int | None = None
    locked: int | None = None  # this process's share of it, as Pss is of Rss

    @property
    def private(self) -> int | None:
        """What would be freed if this process ended now: Private_Clean and Private_Dirty."""
        if self.private_clean is None or self.private_dirty is None:
            return None
        return self.private_clean + self.private_dirty

    @classmethod
    def total(cls, parts: Iterable[Amounts]) -> Amounts:
        """Add up; a sum with an unknown part is unknown, the sum of nothing is 0."""
        sums: list[int | None] = [0] * len(AMOUNT_NAMES)
        for part in parts:
            for at, name in enumerate(AMOUNT_NAMES):
                value, so_far = getattr(part, name), sums[at]
                sums[at] = None if value is None or so_far is None else so_far + value
        return cls(*sums)


AMOUNT_NAMES: Final = tuple(field.name for field in fields(Amounts))
# The kernel's word for each field of Amounts, in its order (fs/proc/task_mmu.c).
AMOUNT_KEYS: Final = (
    b"Rss", b"Pss", b"Pss_Dirty", b"Shared_Clean", b"Shared_Dirty", b"Private_Clean", b"Private_Dirty", b"Referenced", b"Anonymous",
    b"AnonHugePages", b"ShmemPmdMapped", b"FilePmdMapped", b"Shared_Hugetlb", b"Private_Hugetlb", b"Swap", b"SwapPss", b"Locked",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SmapsRollup:
    """All mappings of a process; the shares of `pss` by kind exist since Linux 5.4."""

    amounts: Amounts
    pss_anon: int | None = None
    pss_file: int | None = None
    pss_shmem: int | None = None


def parse_smaps_rollup(text: bytes) -> SmapsRollup | Unavailable:
    """Parse the file; without Rss and Pss there is no rollup."""
    lines = complete_lines(text)
    if not lines or not lines[0].endswith(b"[rollup]"):
        return Unavailable("smaps_rollup: does not begin with a [rollup] line")
    found = keyed_lines(text)
    amounts = Amounts(*(kilobytes(found.get(key)) for key in AMOUNT_KEYS))
    if amounts.rss is None or amounts.pss is None:
        return Unavailable("smaps_rollup: no whole Rss and Pss lines")
    by_kind = (kilobytes(found.get(key)) for key in (b"Pss_Anon", b"Pss_File", b"Pss_Shmem"))
    return SmapsRollup(amounts, *by_kind)


def read_smaps_rollup(pid: Pid, proc_root: Path = PROC_ROOT) -> SmapsRollup | Unavailable:
    """Read the rollup; may block for as long as the target's mmap lock is held."""
    text = read_text(proc_root / str(pid) / "smaps_rollup", capability=CAP_SYS_PTRACE)
    return text if isinstance(text, Unavailable) else parse_smaps_rollup(text)
