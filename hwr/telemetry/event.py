"""What an event is, and how one becomes a JSON object.

Owns the base classes of the closed set in `events.py` and the conversion to `attrs`, escaping included.
Promises that no control character, lone surrogate, NaN or infinity leaves this module (invariant J4).
Refuses anything that is not declared: an event class lists its fields, and nothing else is written.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform

from hwr.outcomes import Operation, Outcome, Severity
from hwr.units import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. Subclasses set NAME, `hwr.<room>.<noun>.<verb>`; it never has a dynamic part."""

    NAME: ClassVar[str] = ""
    SEV: ClassVar[Severity] = Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Event):
    """Written before something slow, fallible or blocking.

    OPERATION is what the operator calls it, None for a mere bracket; END is the class of the event that closes it.
    A field `deadline_seconds` (counted from this event) is known to the fold.
    """

    OPERATION: ClassVar[Operation | None] = None
    END: ClassVar[type[End]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Written meanwhile, at most a few times a second; carries the `op` of its begin event."""

    SEV: ClassVar[Severity] = Severity.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Event):
    """Written after it. `seconds` is measured on CLOCK_BOOTTIME; every other field may be absent, since a failure comes early."""

    outcome: Outcome = Outcome.OK
    seconds: float = 0.0
    error_code: str | None = None
    error_reason: str | None = None


Kind = TypeVar("Kind", bound=Event)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def event(kind: type[Kind]) -> type[Kind]:
    """Make an event class: frozen, slotted, keywords only."""
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


# Dots are OpenTelemetry's habit for these two; a dataclass field cannot have one.
_DOTTED = {"error_code": "error.code", "error_reason": "error.reason"}


# Integers beyond 64 bits have no place in JSON; nothing of ours is that large, a foreign header or LFS pointer may be.
_INT_LIMIT: Final = 1 << 63
# Nothing of ours nests deeper than a list in a table; what does comes from outside, or contains itself.
_DEPTH: Final = 8


def json_key(field: str) -> str:
    """Return the key under which a field is written."""
    return _DOTTED.get(field, field)


def field_keys(kind: type[Event]) -> tuple[tuple[str, str], ...]:
    """Return (field, JSON key) of an event class, in order of declaration."""
    if kind.NAME not in _field_keys:
        _field_keys[kind.NAME] = tuple((field.name, json_key(field.name)) for field in dataclasses.fields(kind))
    return _field_keys[kind.NAME]


_field_keys: dict[str, tuple[tuple[str, str], ...]] = {}


def attributes(event: Event) -> dict[str, Any]:
    """Convert an event to its `attrs`; what is None is absent."""
    attrs: dict[str, Any] = {}
    for field, key in field_keys(type(event)):
        value = getattr(event, field)
        if value is None:
            continue
        kind = type(value)
        plain = kind is bool or (kind is int and -_INT_LIMIT <= value < _INT_LIMIT) or (kind is float and isfinite(value))
        attrs[key] = value if plain else clean(value)
    return attrs


def clean(value: Any, depth: int = 0) -> Any:
    """Make a value safe for JSON, whatever it is: text printable, containers plain, a float that is no number null.

    Never raises: this is where objects of other libraries (a NumPy scalar, a path) enter telemetry.
    """
    if isinstance(value, str):
        return printable(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, int):
        number = int(value)
        return number if -_INT_LIMIT <= number < _INT_LIMIT else float(number) if abs(number) < 1 << 1023 else None
    if isinstance(value, dict | list | tuple | set | frozenset):
        if depth >= _DEPTH:
            return f"<{type(value).__name__} of {len(value)}>"
        if isinstance(value, dict):
            return {_foreign(key): clean(item, depth + 1) for key, item in value.items()}
        return [clean(item, depth + 1) for item in value]
    return _foreign(value)


def _foreign(value: Any) -> str:
    try:
        return printable(str(value))
    except Exception:  # noqa: BLE001 - somebody else's __str__ may raise anything, and an event never does
        return f"<{type(value).__name__}>"
