"""One look at the mappings of a process: the whole of `smaps`, or some windows of its artifact mappings.

Owns what such a look reads and how its text becomes figures. Promises values only (`Looked`), attribution by device and inode, and the cost
to the target apart from the cost to us. Refuses to decide when: see `memory`. Each look may wait for the target's mmap lock, so that it is
made by a thread that nobody waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from diag.node.artifact_files import ArtifactFiles
from diag.node.snapshot import ArtifactUse, MemoryFigure
from hwr.errors import Unavailable
from hwr.outcomes import MemorySource
from hwr.procfs import smaps
from hwr.procfs.file_id import FileId
from hwr.procfs.maps import read_maps
from hwr.procfs.pagemap_scan import WINDOW_BYTES, open_pagemap, scan
from hwr.procfs.smaps_rollup import Amounts

# So that the target's own calls come through: after a window, or after several that cost nearly nothing together.
PAUSE_SECONDS: Final = 0.010
PAUSE_AFTER_SECONDS: Final = 0.001
# The first guess of what a window costs; a millisecond was measured where all of its pages are mapped one by one.
FIRST_WINDOW_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a look brought. `spent_seconds` is our own processor time; `walked_seconds` is the kernel's part of a whole smaps.

    That is what the target may have to wait. On a busy machine the time on the clock says more of the others than of the target's size.
    """

    spent_seconds: float
    problem: Unavailable | None = None
    walked_seconds: float | None = None
    figures: Mapping[str, MemoryFigure] = field(default_factory=dict)
    artifacts: tuple[ArtifactUse, ...] = ()
    scan: Scan | None = None


def look_at_all(pid: int, files: Sequence[ArtifactFiles], proc_root: Path, clock: Callable[[], int]) -> Looked:
    """Read the whole of smaps: PSS, private memory, and the mappings of these files."""
    begun, cpu = time.perf_counter(), time.thread_time()
    text = smaps.read_text_of(pid, proc_root)
    cost, walked, now = time.perf_counter() - begun, time.thread_time() - cpu, clock()
    if isinstance(text, Unavailable):
        return Looked(spent_seconds=time.thread_time() - cpu, problem=text)
    clean, dirty = smaps.total(text, "Private_Clean"), smaps.total(text, "Private_Dirty")
    told = {"pss": smaps.total(text, "Pss"), "private": None if clean is None or dirty is None else clean + dirty}
    owner = {file: found.key for found in files for file in found.ids}
    vmas: dict[str, list[smaps.Vma]] = {found.key: [] for found in files}
    for vma in smaps.parse_smaps(smaps.sections(text, owner.keys())):
        if vma.file is not None:
            vmas[owner[vma.file]].append(vma)
    return Looked(
        figures={
            name: MemoryFigure(bytes=size, source=MemorySource.SMAPS, sampled_ns=now, cost_seconds=cost)
            for name, size in told.items()
            if size is not None
        },
        artifacts=tuple(_use(key, own, cost, now) for key, own in vmas.items()),
        walked_seconds=walked,
        spent_seconds=time.thread_time() - cpu,
    )


def _use(key: str, vmas: Sequence[smaps.Vma], cost: float, now: int) -> ArtifactUse:
    amounts = Amounts.total(vma.amounts for vma in vmas)  # of no mapping: 0, which is true
    return ArtifactUse(
        key=key,
        source=MemorySource.SMAPS,
        sampled_ns=now,
        cost_seconds=cost,
        mapped_bytes=sum(vma.size for vma in vmas),
        rss_bytes=amounts.rss,
        pss_bytes=amounts.pss,
        anonymous_bytes=amounts.anonymous,
    )


@dataclass(frozen=True, slots=True)
class _Window:
    key: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Scan:
    """A pass over the artifact mappings of one process, and how far it has come. Begun with `begin_scan`, which knows no counts yet."""

    files: tuple[ArtifactFiles, ...]
    windows: tuple[_Window, ...]
    mapped: Mapping[str, int]
    at: int = 0
    anonymous: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def artifacts(self) -> int:
        """How many artifacts are looked at."""
        return len(self.mapped)

    @property
    def done(self) -> bool:
        """Whether every window was looked at."""
        return self.at >= len(self.windows) and bool(self.anonymous)

    @property
    def window_seconds(self) -> float:
        """What a window costs, by those so far."""
        return max(self.seconds / self.at, 2e-5) if self.at else FIRST_WINDOW_SECONDS

    def again(self) -> Scan:
        """Begin anew, with the same addresses."""
        return replace(self, at=0, anonymous={}, seconds=0.0)

    def go_on(self, pid: int, count: int, proc_root: Path, clock: Callable[[], int]) -> Looked:
        """Look at the next windows, with a pause after each; after the last one the artifacts are told."""
        begun = time.thread_time()
        descriptor = open_pagemap(pid, proc_root)
        if isinstance(descriptor, Unavailable):
            return Looked(spent_seconds=time.thread_time() - begun, problem=descriptor)
        anonymous = {**dict.fromkeys(self.mapped, 0), **self.anonymous}
        seconds = paused = self.seconds
        chosen = self.windows[self.at : self.at + count]
        try:
            for window in chosen:
                before = time.perf_counter()
                counted = next(scan(descriptor, window.start, window.end))
                seconds += time.perf_counter() - before
                if isinstance(counted, Unavailable):
                    return Looked(spent_seconds=time.thread_time() - begun, problem=counted)
                anonymous[window.key] += counted.anonymous
                if seconds - paused >= PAUSE_AFTER_SECONDS and window is not chosen[-1]:
                    paused = seconds
                    time.sleep(PAUSE_SECONDS)
        finally:
            os.close(descriptor)
        if self.at + len(chosen) >= len(self.windows) and any(anonymous.values()):
            # What was unmapped meanwhile left its addresses to others, whose anonymous pages are nobody's fault.
            now = begin_scan(pid, self.files, proc_root)
            if now.scan is None or now.scan.windows != self.windows:
                return Looked(spent_seconds=time.thread_time() - begun, problem=now.problem, scan=now.scan)
        so_far = replace(self, at=self.at + len(chosen), anonymous=anonymous, seconds=seconds)
        told = tuple(
            ArtifactUse(
                key=key,
                source=MemorySource.PAGEMAP_SCAN,
                sampled_ns=clock(),
                cost_seconds=seconds,
                mapped_bytes=size,
                anonymous_bytes=anonymous[key],
            )
            for key, size in self.mapped.items()
        )
        return Looked(spent_seconds=time.thread_time() - begun, artifacts=told if so_far.done else (), scan=so_far)


def begin_scan(pid: int, files: Sequence[ArtifactFiles], proc_root: Path) -> Looked:
    """Read the addresses of these files' mappings."""
    begun = time.thread_time()
    owner: dict[FileId, str] = {file: found.key for found in files for file in found.ids}
    mappings = read_maps(pid, proc_root, owner.keys())
    if isinstance(mappings, Unavailable):
        return Looked(spent_seconds=time.thread_time() - begun, problem=mappings)
    mapped = {found.key: 0 for found in files}
    windows: list[_Window] = []
    for mapping in mappings:
        key = owner[mapping.file]
        mapped[key] += mapping.size
        windows += [_Window(key, at, min(at + WINDOW_BYTES, mapping.end)) for at in range(mapping.start, mapping.end, WINDOW_BYTES)]
    return Looked(spent_seconds=time.thread_time() - begun, scan=Scan(tuple(files), tuple(windows), mapped))
