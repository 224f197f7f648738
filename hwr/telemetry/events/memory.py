"""Memory, as sampled by the worker itself.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import MemoryMoment, MemorySource, Severity
from hwr.telemetry.event import Event, event


@event
class MemorySampled(Event):
    """The process's memory at a lifecycle boundary; each figure's file and what reading it cost. anon, file and shmem are disjoint."""

    NAME: ClassVar[str] = "hwr.memory.process.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    moment: MemoryMoment
    source: MemorySource
    cost_seconds: float
    rss_anon_bytes: int | None = None
    rss_file_bytes: int | None = None
    rss_shmem_bytes: int | None = None
    pss_bytes: int | None = None
    private_bytes: int | None = None
    locked_bytes: int | None = None
    hugetlb_bytes: int | None = None
    problem: str | None = None


@event
class ArtifactMemorySampled(Event):
    """The memory of one artifact's mappings in this process; anonymous bytes are pages that diverged from the file (healthy: 0)."""

    NAME: ClassVar[str] = "hwr.memory.artifact.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    moment: MemoryMoment
    source: MemorySource
    cost_seconds: float
    key: str
    mapped_bytes: int
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    anonymous_bytes: int | None = None
    page_cache_bytes: int | None = None


@event
class AllocatorSampled(Event):
    """What the C allocator and the interpreter hold, once a minute; nothing is ever trimmed or collected to look better."""

    NAME: ClassVar[str] = "hwr.memory.allocator.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    python_blocks: int
    gc_collections: tuple[int, ...]
    in_use_bytes: int | None = None
    free_bytes: int | None = None
    mapped_bytes: int | None = None
