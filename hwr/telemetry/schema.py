"""The JSON Schema of every event, made from its class, and the check of a record against it.

Owns the schemas in `docs/schema/events/` and `problems`. Promises draft 2020-12, types and closed sets as the classes declare them,
and a check that needs no library and never raises, whatever it is given. Refuses to judge what it does not know: unknown fields pass,
since fields only ever grow; an unknown event is said to be one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from enum import Enum
from typing import Any, Final

from hwr.outcomes import Severity
from hwr.telemetry.encode import SCHEMA_VERSION
from hwr.telemetry.event import Begin, End, Event, Progress, json_key
from hwr.telemetry.events import SegmentOpened, all_events
from hwr.units import printable

Schema = dict[str, Any]
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
TIME_PATTERN: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$"

_SCALARS: Final[dict[type, str]] = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
# Required by whoever joins a journal with a process.
_RES: Final[Schema] = {
    "type": "object",
    "properties": {
        "service.name": {"type": "string"},
        "host.name": {"type": "string"},
        "process.pid": {"type": "integer", "minimum": 1},
        "process.uid": {"type": "integer", "minimum": 0},
        "process.start_ns": {"type": "integer", "minimum": 0},
        "boot_id": {"type": "string"},
        "pid_ns": {"type": "integer", "minimum": 0},
        "clock.realtime_offset_ns": {"type": "integer"},
        "hwr.run_id": {"type": "string"},
        "hwr.engine": {"type": "string"},
        "hwr.rank": {"type": "integer", "minimum": 0},
        "hwr.role": {"type": "string"},
        "versions": {"type": "object"},
    },
    "required": [
        "service.name",
        "host.name",
        "process.pid",
        "clock.realtime_offset_ns",
        "hwr.run_id",
        "hwr.engine",
        "hwr.rank",
        "hwr.role",
    ],
}


def event_schema(kind: type[Event]) -> Schema:
    """Return the schema of the records of one event class."""
    paired = issubclass(kind, Begin | End | Progress)
    first = kind is SegmentOpened
    properties: Schema = {
        "v": {"const": SCHEMA_VERSION},
        "ts": {"type": "string", "pattern": TIME_PATTERN},
        "mono_ns": {"type": "integer", "minimum": 0},
        "seq": {"type": "integer", "minimum": 0 if first else 1},
        "event": {"const": kind.NAME},
        "sev": {"enum": sorted(_severities(kind))},
        "op": {"type": "string", "minLength": 1},
        "parent": {"type": "string", "minLength": 1},
        "attrs": _attrs_schema(kind),
    }
    required = ["v", "ts", "mono_ns", "seq", "event", "sev", "attrs"]
    if first:
        properties["res"] = _RES
        required.append("res")
    if paired:
        required.append("op")
    return {
        "$schema": DIALECT,
        "title": kind.NAME,
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": properties,
        "required": required,
    }


def index_schema() -> Schema:
    """Return the schema of any record: a choice of the files of all events, by name."""
    return {
        "$schema": DIALECT,
        "title": "One line of an hwr journal",
        "description": "A record is valid if it is valid for the schema of its own `event`; later versions add events and fields.",
        "type": "object",
        "required": ["event"],
        "properties": {"event": {"enum": [kind.NAME for kind in all_events()]}},
        "oneOf": [{"$ref": f"events/{kind.NAME}.json"} for kind in all_events()],
    }


def problems(record: object) -> list[str]:
    """Return what is wrong with one decoded line, a line each; nothing if it is a valid record."""
    if not isinstance(record, dict):
        return ["not an object"]
    schema = _schemas().get(name) if isinstance(name := record.get("event"), str) else None
    if schema is None:
        return [f"event: {_shown(name)} is not an event of schema version {SCHEMA_VERSION}"]
    return list(_check(schema, record, ""))


@functools.cache
def _schemas() -> dict[str, Schema]:
    return {kind.NAME: event_schema(kind) for kind in all_events()}


def _severities(kind: type[Event]) -> set[str]:
    if issubclass(kind, End) and kind.SEV is not Severity.ERROR:
        return {kind.SEV.value, Severity.WARN.value}  # a pair that failed is at least a warning
    return {kind.SEV.value}


def _attrs_schema(kind: type[Event]) -> Schema:
    hints = typing.get_type_hints(kind)
    properties: Schema = {}
    required: list[str] = []
    for field in dataclasses.fields(kind):
        key = json_key(field.name)
        properties[key] = _value_schema(hints[field.name])
        # Defaults are written too, except for None.
        if not _may_be_none(hints[field.name]):
            required.append(key)
    properties["cut"] = {
        "type": "object",
        "description": "Fields that did not fit into 64 KiB, with their length; those that are missing went altogether.",
        "additionalProperties": {"type": "integer"},
    }
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["anyOf"] = [{"required": required}, {"required": ["cut"]}]
    return schema


def _value_schema(hint: Any) -> Schema:
    if _may_be_none(hint):
        inner = _value_schema(next(part for part in typing.get_args(hint) if part is not type(None)))
        if "enum" in inner:
            return {"enum": [*inner["enum"], None]}
        return {**inner, "type": [inner["type"], "null"]} if isinstance(inner["type"], str) else inner
    origin = typing.get_origin(hint) or hint
    if origin is tuple:
        return {"type": "array", "items": _value_schema(typing.get_args(hint)[0])}
    if isinstance(origin, type) and issubclass(origin, Enum):
        return {"enum": [member.value for member in origin]}
    if origin is float:
        return {"type": ["number", "null"]}  # null: it was not a number
    return {"type": _SCALARS[origin]}


def _may_be_none(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


# the check: the keywords that the schemas above use, no more ------------------------------------------------------


def _check(schema: Schema, value: Any, path: str) -> typing.Iterator[str]:
    where = path or "record"
    if "const" in schema and not _equal(value, schema["const"]):
        yield f"{where}: {_shown(value)} is not {schema['const']!r}"
    if "enum" in schema and not any(_equal(value, allowed) for allowed in schema["enum"]):
        yield f"{where}: {_shown(value)} is none of {', '.join(map(str, schema['enum']))}"
    if "type" in schema:
        wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_is(value, word) for word in wanted):
            yield f"{where}: {_shown(value)} is not of type {' or '.join(wanted)}"
            return
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{where}: is empty"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where}: {_shown(value)} is not written as it should be"
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        yield f"{where}: {_shown(value)} is below {schema['minimum']}"
    if isinstance(value, list) and "items" in schema:
        for at, item in enumerate(value):
            yield from _check(schema["items"], item, f"{path}[{at}]")
    if isinstance(value, dict):
        yield from _check_object(schema, value, path)


def _check_object(schema: Schema, value: dict[Any, Any], path: str) -> typing.Iterator[str]:
    below = f"{path}." if path else ""
    yield from (f"{below}{name}: is missing" for name in schema.get("required", ()) if name not in value)
    choices = [choice["required"] for choice in schema.get("anyOf", ())]
    if choices and not any(all(name in value for name in names) for names in choices):
        yield from (f"{below}{name}: is missing" for name in choices[0] if name not in value)
    known = schema.get("properties", {})
    for name, item in value.items():
        inner = known.get(name, schema.get("additionalProperties"))
        if inner is not None:
            yield from _check(inner, item, f"{below}{name}")


def _equal(value: Any, allowed: Any) -> bool:
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _is(value: Any, word: str) -> bool:
    match word:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":  # JSON Schema counts 3.0 too
            return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return printable(repr(value), 80)
