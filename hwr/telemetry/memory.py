"""Memory at the boundaries of a worker's life.

Owns the samples that a worker takes of itself: status always, smaps_rollup and smaps where their cost is bounded.
Promises a source and a cost with every figure, and that an unreadable figure is absent, never 0.
Refuses to collect garbage, trim an allocator or drop a cache: looking must not change what is seen (R26).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hwr.errors import Unavailable
from hwr.outcomes import MemoryMoment, MemorySource
from hwr.procfs import smaps, smaps_rollup, status
from hwr.procfs.file_id import FileId
from hwr.telemetry import events as E
from hwr.telemetry.process import current_hub, emit

# smaps costs 24-33 ms per GiB of 4 KiB pages and takes our own mmap lock: at start-up, before anything is served, 8 GiB are affordable.
PSS_LIMIT_BYTES: Final = 8 << 30


@dataclass(frozen=True, slots=True)
class Mapped:
    """The files of one artifact as this process maps them."""

    key: str
    bytes: int
    files: tuple[tuple[int, int], ...]  # (st_dev, st_ino)


def sample(moment: MemoryMoment, artifacts: Sequence[Mapped] = ()) -> None:
    """Emit what this process's memory is now. Does nothing when telemetry is off."""
    if current_hub() is None:
        return
    rss = _status(moment)
    if rss is not None and rss <= PSS_LIMIT_BYTES:
        _rollup(moment)
        _artifacts(moment, artifacts)


def _status(moment: MemoryMoment) -> int | None:
    begun = time.perf_counter()
    told = status.read_status(os.getpid())
    cost = time.perf_counter() - begun
    if isinstance(told, Unavailable):
        emit(E.MemorySampled(moment=moment, source=MemorySource.STATUS, cost_seconds=cost, problem=told.reason))
        return None
    emit(
        E.MemorySampled(
            moment=moment,
            source=MemorySource.STATUS,
            cost_seconds=cost,
            rss_anon_bytes=told.rss_anon,
            rss_file_bytes=told.rss_file,
            rss_shmem_bytes=told.rss_shmem,
            locked_bytes=told.locked,
            hugetlb_bytes=told.hugetlb,
        )
    )
    return told.rss


def _rollup(moment: MemoryMoment) -> None:
    begun = time.perf_counter()
    told = smaps_rollup.read_smaps_rollup(os.getpid())
    cost = time.perf_counter() - begun
    if isinstance(told, Unavailable):
        emit(E.MemorySampled(moment=moment, source=MemorySource.SMAPS_ROLLUP, cost_seconds=cost, problem=told.reason))
        return
    emit(
        E.MemorySampled(
            moment=moment,
            source=MemorySource.SMAPS_ROLLUP,
            cost_seconds=cost,
            pss_bytes=told.amounts.pss,
            private_bytes=_total((told.amounts.private_clean, told.amounts.private_dirty)),
        )
    )


def _artifacts(moment: MemoryMoment, artifacts: Sequence[Mapped]) -> None:
    if not artifacts:
        return
    begun = time.perf_counter()
    files = {FileId(os.major(dev), os.minor(dev), inode) for artifact in artifacts for dev, inode in artifact.files}
    vmas = smaps.read_smaps(os.getpid(), wanted=files)
    if isinstance(vmas, Unavailable):
        return
    cost = time.perf_counter() - begun
    for artifact in artifacts:
        # By device and inode, never by name: a name may be a link, deleted, or odd.
        uses = [smaps.file_use(vmas, FileId(os.major(dev), os.minor(dev), inode)) for dev, inode in artifact.files]
        emit(
            E.ArtifactMemorySampled(
                moment=moment,
                source=MemorySource.SMAPS,
                cost_seconds=cost,
                key=artifact.key,
                mapped_bytes=artifact.bytes,
                rss_bytes=_total(use.amounts.rss for use in uses),
                pss_bytes=_total(use.amounts.pss for use in uses),
                anonymous_bytes=_total(use.amounts.anonymous for use in uses),
            )
        )


def _total(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
