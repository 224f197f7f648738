"""The node, as its agent sees it: what changed, what it concludes, and what it could not read.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hwr.outcomes import CollectorName, Confidence, Severity, Stall
from hwr.telemetry.event import Begin, End, Event, event


@event
class NodeSampled(Event):
    """What changed since the last sample, a part of the node's snapshot a field: an object of entries by name.

    An entry brings the fields that changed; null for an entry takes it away. Small movements are left out.
    """

    NAME: ClassVar[str] = "hwr.node.state.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    node: dict[str, Any] | None = None
    workers: dict[str, Any] | None = None
    processes: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    uses: dict[str, Any] | None = None
    artifacts: dict[str, Any] | None = None
    stores: dict[str, Any] | None = None
    locks: dict[str, Any] | None = None
    cgroups: dict[str, Any] | None = None
    collectors: dict[str, Any] | None = None
    directories: dict[str, Any] | None = None


@event
class StallJudged(Event):
    """The verdict on a worker changed: what holds it up, why we think so, whom it waits for, and where to read on."""

    NAME: ClassVar[str] = "hwr.stall.verdict.change"
    worker: str
    run_id: str
    engine: str
    rank: int
    stall: Stall
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    blames: tuple[str, ...] = ()
    runbook: str | None = None
    since_ns: int | None = None
    pid: int | None = None


@event
class CollectorFailed(Event):
    """A collector raised, hangs beyond its deadline, or could read only a part; what it brought last stays, with its age."""

    NAME: ClassVar[str] = "hwr.node.collector.fail"
    SEV: ClassVar[Severity] = Severity.WARN
    collector: CollectorName
    target: str
    problem: str


@event
class CollectorRecovered(Event):
    """A collector that failed works again."""

    NAME: ClassVar[str] = "hwr.node.collector.recover"
    collector: CollectorName
    target: str


@event
class InventoryEnded(End):
    """The scan of a store is over: what it counted, and what it could not read."""

    NAME: ClassVar[str] = "hwr.node.inventory.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    root: str
    entries: int | None = None
    bytes: int | None = None
    problem: str | None = None


@event
class InventoryBegun(Begin):
    """A store is about to be scanned; its filesystem may be slow, or never answer."""

    NAME: ClassVar[str] = "hwr.node.inventory.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = InventoryEnded
    root: str
