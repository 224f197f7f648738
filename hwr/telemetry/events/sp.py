"""Sequence parallelism: the collectives that ranks wait for each other in.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import Collective, Operation, Severity
from hwr.telemetry.event import Begin, End, event


@event
class CollectiveEnded(End):
    """The collective is over; it belongs to its begin event by the operation that both carry."""

    NAME: ClassVar[str] = "hwr.sp.collective.end"
    SEV: ClassVar[Severity] = Severity.DEBUG


@event
class CollectiveBegun(Begin):
    """This rank enters a collective and may wait for others: its `sequence` counts those of this `op`, and who is behind is missing."""

    NAME: ClassVar[str] = "hwr.sp.collective.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    OPERATION: ClassVar[Operation | None] = Operation.COLLECTIVE
    END: ClassVar[type[End]] = CollectiveEnded
    op: Collective
    sequence: int
    world_size: int
    deadline_seconds: float | None = None
    bytes: int | None = None
