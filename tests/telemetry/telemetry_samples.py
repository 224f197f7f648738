"""Events of every class with values at random, and the records that a hub makes of a random sequence of them."""

from __future__ import annotations

import dataclasses
import logging
import random
import typing
from enum import Enum
from typing import Any

from hwr.outcomes import Outcome
from hwr.telemetry.event import Begin, End, Event, Progress
from hwr.telemetry.events import EventsDropped, SegmentOpened, all_events
from hwr.telemetry.hub import Hub

RES: dict[str, Any] = {
    "service.name": "hwr",
    "service.version": "0.1.0",
    "host.name": "node",
    "process.pid": 4711,
    "process.start_ns": 10_000_000_000,
    "clock.realtime_offset_ns": 1_700_000_000_000_000_000,
    "hwr.run_id": "run",
    "hwr.engine": "default",
    "hwr.rank": 0,
    "hwr.role": "worker",
    "versions": {"torch": "2.9.0"},
}
KEY = "0123456789ab" * 5 + "abcd"

# Those that a hub writes by itself.
EMITTED = tuple(kind for kind in all_events() if kind not in (SegmentOpened, EventsDropped))


def sample(kind: type[Event], chance: random.Random) -> Event:
    """Make an event of a class; what may be absent is absent half of the time."""
    values = {
        name: _value(name, hint, chance)
        for name, hint in typing.get_type_hints(kind).items()
        if name in {field.name for field in dataclasses.fields(kind)}
    }
    return kind(**values)


def play(hub: Hub, steps: int, chance: random.Random) -> None:
    """Emit events at random; begin events get an operation, and most of them their end."""
    logging.disable()  # a failed test would show thousands of lines
    try:
        _play(hub, steps, chance)
    finally:
        logging.disable(logging.NOTSET)


def _play(hub: Hub, steps: int, chance: random.Random) -> None:
    open_operations: list[tuple[str, type[Begin]]] = []
    for _ in range(steps):
        if open_operations and chance.random() < 0.4:
            op, begun = open_operations.pop(chance.randrange(len(open_operations)))
            if chance.random() < 0.9:
                hub.emit(sample(begun.END, chance), op=op)
            continue
        kind = chance.choice(EMITTED)
        if issubclass(kind, Begin):
            op = hub.new_operation()
            hub.emit(sample(kind, chance), op=op, parent=open_operations[-1][0] if open_operations else None)
            open_operations.append((op, kind))
        elif issubclass(kind, End | Progress):
            hub.emit(sample(kind, chance), op=open_operations[-1][0] if open_operations else "nobody's")
        else:
            hub.emit(sample(kind, chance))


def _value(name: str, hint: Any, chance: random.Random) -> Any:
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if type(None) in typing.get_args(hint):
        return None if chance.random() < 0.5 else _value(name, parts[0], chance)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(name, parts[0], chance) for _ in range(chance.randrange(4)))
    if typing.get_origin(hint) is dict:
        return {f"entry{at}": chance.choice([None, {"bytes": at, "text": "a\x1b[31mred"}, 3]) for at in range(chance.randrange(4))}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Outcome.OK if hint is Outcome and chance.random() < 0.5 else chance.choice(list(hint))
    if hint is float:
        return chance.choice([0.0, 0.25, 1.5, 700.0, float("nan"), float("inf")])
    if hint is int:
        return chance.choice([0, 1, 4096, 2**40])
    if hint is bool:
        return chance.random() < 0.5
    if name == "key":
        return f"{chance.randrange(5):064x}"
    return chance.choice(["checksum_mismatch", "disk_full", "a\x1b[31mred", "\ud800", "", "x" * 300])
