"""Diagnosis: what `hwr-diag` measured.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import Operation, RetentionVerdict
from hwr.telemetry.event import Begin, End, Event, Progress, event


@event
class RetentionRunEnded(End):
    """A retention run is over; per call, the control's share is subtracted. Without a verdict it could not be measured."""

    NAME: ClassVar[str] = "hwr.retention.run.end"
    verdict: RetentionVerdict | None = None
    blocks_per_call: float | None = None
    bytes_per_call: float | None = None
    calls: int | None = None


@event
class RetentionRunBegun(Begin):
    """A fresh process is about to repeat one case of a library's calls and to measure what stays."""

    NAME: ClassVar[str] = "hwr.retention.run.begin"
    OPERATION: ClassVar[Operation | None] = Operation.PROBE
    END: ClassVar[type[End]] = RetentionRunEnded
    mode: str
    elements: int
    offset_bytes: int
    iterations: int
    deadline_seconds: float


@event
class RetentionRunProgress(Progress):
    """So many calls were made so far, each sample after a garbage collection in the measured process."""

    NAME: ClassVar[str] = "hwr.retention.run.progress"
    done_iterations: int
    planned_iterations: int


@event
class RetentionReported(Event):
    """What stayed of a run: resident bytes at the warmed baseline and after the last loop, and their growth by class.

    A class that the platform does not tell is absent. The classes are growths, so one may be negative.
    """

    NAME: ClassVar[str] = "hwr.retention.memory.report"
    mode: str
    before_bytes: int | None = None
    after_gc_bytes: int | None = None
    interpreter_bytes: int | None = None
    malloc_in_use_bytes: int | None = None
    allocator_free_bytes: int | None = None
    other_anonymous_bytes: int | None = None
    file_backed_bytes: int | None = None
    locked_bytes: int | None = None
