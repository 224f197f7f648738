"""From an agent's events to state: the part of the fold that merges what was seen of a node.

Owns the merging of samples and verdicts into `WorkerState.node` and `.verdicts`. Promises flat memory whatever a journal holds: parts,
entries, fields and the size of each are bounded. Refuses to know what the parts mean: the node side does.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from hwr.telemetry.events import NodeSampled
from hwr.telemetry.state import MAX_KEYS, WorkerState

PARTS: Final = tuple(field.name for field in fields(NodeSampled))
MAX_VERDICTS: Final = 256
MAX_NAME: Final = 1024
# Values of one entry, and the characters of their text: a process with a few threads in wait is the largest of ours.
MAX_VALUES: Final = 1024
MAX_TEXT: Final = 32 << 10


def sampled(state: WorkerState, attrs: dict[str, Any], _: dict[str, Any]) -> None:
    """Merge what changed: fields into entries, entries into parts; null takes an entry away."""
    for part in PARTS:
        told = attrs.get(part)
        if told is None:
            continue
        held = state.node.setdefault(part, {})
        for name, entry in told.items():
            _merge(held, name, entry)


def _merge(held: dict[str, dict[str, Any]], name: str, entry: Any) -> None:
    if entry is None:
        held.pop(name, None)
        return
    if type(entry) is not dict or len(name) > MAX_NAME or (name not in held and len(held) >= MAX_KEYS):
        raise ValueError("not an entry")
    merged = {**held.get(name, {}), **entry}
    if not _is_small(merged):
        raise ValueError("too large an entry")
    held[name] = merged


def judged(state: WorkerState, attrs: dict[str, Any], record: dict[str, Any]) -> None:
    """Keep the last verdict on a worker; the one judged longest ago goes where there are too many."""
    worker = attrs["worker"]
    if type(worker) is not str or len(worker) > MAX_NAME or not _is_small(attrs):
        raise ValueError("not a verdict")
    state.verdicts.pop(worker, None)
    state.verdicts[worker] = {**attrs, "mono_ns": record["mono_ns"]}
    if len(state.verdicts) > MAX_VERDICTS:
        del state.verdicts[next(iter(state.verdicts))]


def _is_small(value: Any) -> bool:
    values = characters = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        values += 1
        if type(item) is dict:
            waiting += item.values()
            characters += sum(map(len, item))
        elif type(item) is list:
            waiting += item
        elif type(item) is str:
            characters += len(item)
        if values + len(waiting) > MAX_VALUES or characters > MAX_TEXT:
            return False
    return True
