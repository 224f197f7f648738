"""A record as one line of a journal, and back.

Owns the line format and its limits. Promises at most 64 KiB a line (checkpoints are exempt) with cuts said in `attrs.cut`,
and a reader that turns anything else into None instead of a raise. Refuses to guess at a partial line.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from hwr.telemetry.event import clean

SCHEMA_VERSION: Final = 1
MAX_LINE_BYTES: Final = 64 << 10
# Of the one event whose line may be longer; its name stands within the first bytes of the line.
CHECKPOINT: Final = "hwr.journal.segment.open"
_KEPT_ITEMS: Final = 20
_KEPT_CHARACTERS: Final = 1000


def encode(record: dict[str, Any]) -> bytes:
    """Return the line of a record, newline included.

    What does not fit is cut in the record itself, so that every projection sees what the journal has (J5).
    """
    line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    if len(line) <= MAX_LINE_BYTES:
        return line
    record["attrs"] = _shortened(record["attrs"])
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None for one that is not a record of ours."""
    if len(line) > MAX_LINE_BYTES and CHECKPOINT.encode() not in line[:400]:
        return None
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if type(record) is not dict or type(record.get("event")) is not str or type(record.get("attrs")) is not dict:
        return None
    if len(line) > MAX_LINE_BYTES and record["event"] != CHECKPOINT:
        return None
    if not _is_placed(record):
        return None
    # A line of ours has neither, save in text that was escaped already: whatever else wrote this, no terminal meets it raw (J4).
    if b"\\" not in line and line.isascii():
        return record
    cleaned: dict[str, Any] = clean(record)
    return cleaned if _is_placed(cleaned) else None  # beyond 64 bits it became a number that is no integer


def _is_placed(record: dict[str, Any]) -> bool:
    return type(record.get("mono_ns")) is int and type(record.get("seq")) is int


def encode_checkpoint(record: dict[str, Any]) -> bytes:
    """Return the line of a checkpoint: the only one without a cap."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a sum that outgrew 64 bits
        return orjson.dumps(clean(record), option=orjson.OPT_APPEND_NEWLINE)


def _shortened(attrs: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    cut: dict[str, int] = {}
    for key, value in attrs.items():
        if isinstance(value, list) and len(value) > _KEPT_ITEMS:
            kept[key], cut[key] = value[:_KEPT_ITEMS], len(value)
        elif isinstance(value, dict) and len(value) > _KEPT_ITEMS:
            kept[key], cut[key] = dict(list(value.items())[:_KEPT_ITEMS]), len(value)
        elif isinstance(value, str) and len(value) > _KEPT_CHARACTERS:
            kept[key], cut[key] = value[:_KEPT_CHARACTERS] + "…", len(value)
        else:
            kept[key] = value
    kept["cut"] = cut
    if len(orjson.dumps(kept)) < MAX_LINE_BYTES - 4096:
        return kept
    # Nested lists can still be too long: keep what is short, and say that everything else went.
    small = {key: value for key, value in kept.items() if len(orjson.dumps(value)) <= 2048}
    small["cut"] = {key: len(orjson.dumps(value)) for key, value in attrs.items() if key not in small} | cut
    return small if len(orjson.dumps(small)) < MAX_LINE_BYTES - 4096 else {"cut": {"attrs": len(attrs)}}
