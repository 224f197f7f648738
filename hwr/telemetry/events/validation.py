"""Validation: judged, hashed.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import Operation, Severity, ValidationLevel
from hwr.telemetry.event import Begin, End, Progress, event


@event
class ValidationEnded(End):
    """An artifact was judged at this level."""

    NAME: ClassVar[str] = "hwr.validation.artifact.end"
    level: ValidationLevel
    file: str | None = None
    tensor: str | None = None
    chunk: int | None = None
    expected: str | None = None
    actual: str | None = None


@event
class ValidationBegun(Begin):
    """An artifact is about to be judged."""

    NAME: ClassVar[str] = "hwr.validation.artifact.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = ValidationEnded
    key: str
    level: ValidationLevel


@event
class ChecksumEnded(End):
    """So many payload bytes were read and hashed."""

    NAME: ClassVar[str] = "hwr.validation.checksum.end"
    bytes: int | None = None


@event
class ChecksumBegun(Begin):
    """Every payload byte is about to be read and hashed, before anything is restored."""

    NAME: ClassVar[str] = "hwr.validation.checksum.begin"
    OPERATION: ClassVar[Operation | None] = Operation.CHECKSUM
    END: ClassVar[type[End]] = ChecksumEnded
    key: str
    planned_bytes: int
    files: int


@event
class ChecksumProgress(Progress):
    """So many payload bytes were hashed so far."""

    NAME: ClassVar[str] = "hwr.validation.checksum.progress"
    done_bytes: int
    planned_bytes: int
