"""A public aid for tests: what was emitted.

Owns `record`. Promises events in order, as objects and as written; works with telemetry off and never touches a disk.
Refuses to change what is emitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hwr.telemetry import process
from hwr.telemetry.event import Event

Kind = TypeVar("Kind", bound=Event)


class Recording:
    """The events of a block; also as the records that a journal would hold."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.records: list[dict[str, Any]] = []

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def names(self) -> list[str]:
        """Return the names of all events, in order."""
        return [event.NAME for event in self.events]


@contextmanager
def record() -> Iterator[Recording]:
    """Record every event of this process while the block runs, whichever thread emits it."""
    recording = Recording()

    def listen(event: Event, written: dict[str, Any]) -> None:
        recording.events.append(event)
        recording.records.append(written)

    with process.recording_hub() as hub:
        stop = hub.listen(listen)
        try:
            yield recording
        finally:
            stop()
