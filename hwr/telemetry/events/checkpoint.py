"""The canonical checkpoint: refused, hashed, ignored beside it.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import Operation, Severity, SourceReason
from hwr.telemetry.event import Begin, End, Event, Progress, event


@event
class SourceRejected(Event):
    """The canonical checkpoint was refused, with the reason and the sizes that show it."""

    NAME: ClassVar[str] = "hwr.checkpoint.source.reject"
    SEV: ClassVar[Severity] = Severity.ERROR
    reason: SourceReason
    file: str
    problem: str
    file_bytes: int | None = None
    expected_bytes: int | None = None
    declared_header_bytes: int | None = None
    missing_bytes: int | None = None
    extra_bytes: int | None = None


@event
class ShardsIgnored(Event):
    """Weight files that the index does not name lie beside it; they are not loaded."""

    NAME: ClassVar[str] = "hwr.checkpoint.shards.ignore"
    SEV: ClassVar[Severity] = Severity.WARN
    names: tuple[str, ...]


@event
class SourceDigestEnded(End):
    """The source files have their digests; `hashed` of them were read, the others came from the digest cache."""

    NAME: ClassVar[str] = "hwr.checkpoint.digest.end"
    files: int | None = None
    hashed: int | None = None
    bytes: int | None = None


@event
class SourceDigestBegun(Begin):
    """Digests of the source files are about to be looked up, or computed where the cache has none."""

    NAME: ClassVar[str] = "hwr.checkpoint.digest.begin"
    OPERATION: ClassVar[Operation | None] = Operation.CHECKSUM
    END: ClassVar[type[End]] = SourceDigestEnded
    files: int
    planned_bytes: int


@event
class SourceDigestProgress(Progress):
    """So many source bytes were hashed so far."""

    NAME: ClassVar[str] = "hwr.checkpoint.digest.progress"
    done_bytes: int
    planned_bytes: int
