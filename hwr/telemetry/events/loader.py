"""Production and restoration.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import Operation
from hwr.telemetry.event import Begin, End, Event, event


@event
class ProductionEnded(End):
    """The final layout of every tensor is known and its bytes can be streamed."""

    NAME: ClassVar[str] = "hwr.loader.production.end"
    tensors: int | None = None
    bytes: int | None = None


@event
class ProductionBegun(Begin):
    """A producer is about to make the final layout."""

    NAME: ClassVar[str] = "hwr.loader.production.begin"
    OPERATION: ClassVar[Operation | None] = Operation.PRODUCE
    END: ClassVar[type[End]] = ProductionEnded
    key: str
    producer: str


@event
class RestoreEnded(End):
    """The skeleton holds views of the artifact, or was left untouched."""

    NAME: ClassVar[str] = "hwr.loader.restore.end"
    tensors: int | None = None
    bytes: int | None = None
    copied_bytes: int | None = None


@event
class RestoreBegun(Begin):
    """Views of an artifact are about to be bound to a model skeleton."""

    NAME: ClassVar[str] = "hwr.loader.restore.begin"
    OPERATION: ClassVar[Operation | None] = Operation.RESTORE
    END: ClassVar[type[End]] = RestoreEnded
    key: str


@event
class BuffersIgnored(Event):
    """The checkpoint has tensors that are non-persistent buffers of the model; the model builds those itself."""

    NAME: ClassVar[str] = "hwr.loader.buffers.ignore"
    names: tuple[str, ...]
