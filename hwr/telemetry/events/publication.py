"""Publications, step by step.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import Operation, PublicationOutcome, PublicationStage, Severity
from hwr.telemetry.event import Begin, End, Progress, event


@event
class PublicationEnded(End):
    """How a publication ended; seconds of each stage, bytes, and how the data is aligned."""

    NAME: ClassVar[str] = "hwr.store.publication.end"
    result: PublicationOutcome | None = None
    bytes: int | None = None
    tensors: int | None = None
    zero_byte_tensors: int | None = None
    filler_tensors: int | None = None
    content_digest: str | None = None


@event
class PublicationBegun(Begin):
    """An artifact is about to be written, hashed, made durable and published."""

    NAME: ClassVar[str] = "hwr.store.publication.begin"
    OPERATION: ClassVar[Operation | None] = Operation.PUBLISH
    END: ClassVar[type[End]] = PublicationEnded
    key: str
    planned_bytes: int
    tensors: int


@event
class PublicationProgress(Progress):
    """So many bytes were written so far."""

    NAME: ClassVar[str] = "hwr.store.publication.progress"
    done_bytes: int
    planned_bytes: int


@event
class PublicationStageEnded(End):
    """One step of a publication is over. The hash stage runs beside the write stage: its seconds are those of its own thread."""

    NAME: ClassVar[str] = "hwr.store.publication_stage.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    stage: PublicationStage
    bytes: int | None = None


@event
class PublicationStageBegun(Begin):
    """One step of a publication is about to start."""

    NAME: ClassVar[str] = "hwr.store.publication_stage.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = PublicationStageEnded
    stage: PublicationStage
