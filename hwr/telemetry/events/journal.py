"""The journal and the endpoint: what telemetry says of itself, and a process of its life.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hwr.outcomes import Phase, Severity
from hwr.telemetry.event import Event, event


@event
class SegmentOpened(Event):
    """First line of every segment: the state folded from all earlier ones, so that reading may start here."""

    NAME: ClassVar[str] = "hwr.journal.segment.open"
    SEV: ClassVar[Severity] = Severity.DEBUG
    segment: int
    state: dict[str, Any] | None = None


@event
class EventsDropped(Event):
    """Events were lost before this one: the disk was full or failing, and a load is never held up for its telemetry."""

    NAME: ClassVar[str] = "hwr.journal.events.drop"
    SEV: ClassVar[Severity] = Severity.WARN
    count: int
    cause: str


@event
class EndpointOpened(Event):
    """`/metrics` is served at this address."""

    NAME: ClassVar[str] = "hwr.telemetry.endpoint.open"
    address: str
    port: int


@event
class EndpointFailed(Event):
    """`/metrics` is not served; the load goes on without it."""

    NAME: ClassVar[str] = "hwr.telemetry.endpoint.fail"
    SEV: ClassVar[Severity] = Severity.WARN
    address: str
    port: int
    problem: str


@event
class WorkerStarted(Event):
    """A process began to write its journal; who it is stands in `res` of the segment's first line."""

    NAME: ClassVar[str] = "hwr.worker.process.start"


@event
class WorkerExited(Event):
    """The process ends in order. A journal without this event and without a living writer is that of a killed process."""

    NAME: ClassVar[str] = "hwr.worker.process.exit"


@event
class PhaseChanged(Event):
    """The worker's own word for what it does between operations; an open operation shows instead while it lasts."""

    NAME: ClassVar[str] = "hwr.worker.phase.change"
    phase: Phase
