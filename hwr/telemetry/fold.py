"""From events to state: the one place where an event means something.

Owns `apply`. Promises that it is the same for a live worker, its journal and a copy of that journal (J5), that a record of any
shape never raises, and that memory stays flat. Refuses to count what it does not know except as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Final

from hwr.outcomes import BudgetSource, ChecksumPurpose, Outcome, Phase, RetentionClass
from hwr.telemetry import events as E
from hwr.telemetry import fold_node as node
from hwr.telemetry.event import Begin, End, Event, Progress, clean
from hwr.telemetry.state import LONG_LADDER_SECONDS, MAX_KEYS, Histogram, OpenOperation, WorkerState

# Begin events whose ends were lost would pile up; a worker has a handful open at once.
MAX_OPEN: Final = 256
MAX_ARTIFACTS: Final = 1000
# A worker opens one store, rarely two.
MAX_ROOTS: Final = 16
MAX_PATH: Final = 4096
# Kinds of collectives of a later version included.
MAX_COLLECTIVES: Final = 32
# What is kept of one value that an event brought: longer text and longer lists are those of somebody else's file.
MAX_WORD: Final = 128
MAX_ITEMS: Final = 256
# Adding to a counter stops here: beyond 64 bits a state has no JSON form.
MAX_COUNT: Final = 1 << 62

Attrs = dict[str, Any]
Handler = Callable[[WorkerState, Attrs, dict[str, Any]], None]


def fold(records: Iterable[dict[str, Any]], state: WorkerState | None = None) -> WorkerState:
    """Apply records in order and return the state."""
    state = state or WorkerState()
    for record in records:
        apply(state, record)
    return state


def apply(state: WorkerState, record: dict[str, Any]) -> None:
    """Apply one record, as decoded from a line or as written by this process. Records may come from an untrusted file."""
    name = record["event"]
    steps = _STEPS.get(name)
    if name == E.SegmentOpened.NAME:
        _checkpoint(state, record)
        return
    seq = record["seq"]
    if state.seq and seq != state.seq + 1:
        state.seq_gaps = min(MAX_COUNT, state.seq_gaps + max(1, seq - state.seq - 1))
    state.seq = seq
    state.last_event = name
    state.last_ns = record["mono_ns"]
    if steps is None:
        state.unknown_events += 1
        return
    state.events[name] = state.events.get(name, 0) + 1
    attrs = record["attrs"]
    try:
        for step in steps:
            step(state, attrs, record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        state.malformed += 1


def _checkpoint(state: WorkerState, record: dict[str, Any]) -> None:
    """Take the resource, and the state too if events before this line were not seen; its `seq` is that of the last one folded in.

    Not seen are also events between others that this reader missed: the disk was full, or the line is torn. What this reader has
    counted (gaps, malformed, unknown) stays counted. A checkpoint without a state begins anew: the process configured again.
    """
    res = record.get("res")
    told = record["attrs"].get("state")
    if state.seq != record["seq"] or state.seq_gaps:
        try:
            fresh = WorkerState() if told is None else WorkerState.from_json(clean(told))
        except (ValueError, TypeError):
            state.malformed += 1
        else:
            for name in WorkerState.__slots__:
                kept = max(getattr(state, name), getattr(fresh, name)) if name in _OF_THE_READER else getattr(fresh, name)
                setattr(state, name, kept)
    if isinstance(res, dict):
        state.res = clean(res)


_OF_THE_READER: Final = frozenset({"seq_gaps", "malformed", "unknown_events"})


# generic steps ---------------------------------------------------------------------------------------------------


def _begin(kind: type[Begin]) -> Handler:
    operation = kind.OPERATION.value if kind.OPERATION else None
    name = kind.NAME

    def step(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
        now = record["mono_ns"]
        op, parent = _word(record["op"]), record.get("parent")
        deadline = _number(attrs.get("deadline_seconds"))
        opened = OpenOperation(
            event=name,
            operation=operation,
            begun_ns=now,
            parent=None if parent is None else _word(parent),
            deadline_ns=None if deadline is None else _time(now + int(deadline * 1e9)),
            planned_bytes=_bytes(attrs.get("planned_bytes")),
            attrs=_plain(attrs),
        )
        if len(state.ops) >= MAX_OPEN:
            del state.ops[next(iter(state.ops))]
        state.ops[op] = opened
        if operation is not None:
            state.progress_ns = now

    return step


def _progress(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    now = record["mono_ns"]
    operation = state.ops.get(record.get("op", ""))
    done = _bytes(attrs.get("done_bytes"))
    if done is None:
        return
    state.progress_ns = now
    if operation is not None:
        operation.done_bytes, operation.progress_ns = done, now


def _end(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    operation = state.ops.pop(record.get("op", ""), None)
    if operation is not None and operation.operation is not None:
        state.progress_ns = record["mono_ns"]
        if attrs["outcome"] == Outcome.OK:
            state.last_good_seconds[operation.operation] = _amount(attrs["seconds"])


def _number(value: Any) -> Any:
    return value if type(value) is int or type(value) is float else None


def _bytes(value: Any) -> int | None:
    return value if type(value) is int else None


def _time(value: int) -> int:
    if not -MAX_COUNT < value < MAX_COUNT:
        raise ValueError("not a time")
    return value


def _word(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_WORD:
        raise TypeError("not a word")
    return value


def _amount(value: Any) -> Any:
    """Take what a counter grows by: counters never fall, whatever a journal says."""
    if (type(value) is not int and type(value) is not float) or not 0 <= value < MAX_COUNT:
        raise TypeError("not an amount")
    return value


def _plain(attrs: Attrs) -> Attrs:
    """Keep what a view can show: words and numbers, and short lists of them."""
    return {key: value for key, value in attrs.items() if type(value) in _SCALARS or (type(value) is list and _short(value))}


def _short(items: list[Any]) -> bool:
    return len(items) <= MAX_ITEMS and all(type(item) in _SCALARS for item in items)


_SCALARS: Final = frozenset({str, int, float, bool, type(None)})


def _add(table: dict[str, Any], key: str, amount: float = 1) -> None:
    held = table.get(key)
    if held is None:
        if len(table) >= MAX_KEYS:
            raise ValueError("too many label values")
        table[_word(key)] = _amount(amount)
    else:
        table[key] = min(MAX_COUNT, held + _amount(amount))


# one step an event -----------------------------------------------------------------------------------------------


def _dropped(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.dropped, str(attrs["cause"]), int(attrs["count"]))


def _endpoint(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    address = _word(attrs["address"])
    state.endpoint = f"[{address}]:{int(attrs['port'])}" if ":" in address else f"{address}:{int(attrs['port'])}"


def _exited(state: WorkerState, _: Attrs, record: dict[str, Any]) -> None:
    state.exited = True
    if state.base_phase != Phase.FAILED:
        state.base_phase = Phase.EXITED
    state.phase_ns = record["mono_ns"]


def _phase(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    state.base_phase = _word(attrs["phase"])
    state.phase_ns = record["mono_ns"]


def _rejected(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.source_rejected, attrs["reason"])


def _failure(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    _add(state.failures, attrs["error.code"])
    state.last_failure = {**_plain(attrs), "mono_ns": record["mono_ns"]}


def _lock_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.lock_waits, attrs["lock"])
    _add(state.lock_wait_seconds, attrs["lock"], attrs["seconds"])


def _lock_progress(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    operation = state.ops.get(record.get("op", ""))
    if operation is not None:
        operation.attrs = {**operation.attrs, **_plain(attrs)} if len(operation.attrs) < MAX_ITEMS else operation.attrs


def _miss(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    for section in attrs["sections"]:
        _add(state.lookup_misses, section)


def _lease_open(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.lease_acquisitions += 1
    if len(state.leases) < MAX_ARTIFACTS:
        held = {name: attrs[name] for name in ("key", "bytes", "files", "tensors", "validation")}
        state.leases[_word(attrs["lease"])] = _plain(held)


def _lease_close(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.leases.pop(attrs["lease"], None)


def _validation_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    level, seconds = _word(attrs["level"]), _amount(attrs["seconds"])
    if level not in state.validation_seconds:
        if len(state.validation_seconds) >= MAX_KEYS:
            raise ValueError("too many label values")
        state.validation_seconds[level] = Histogram.empty(LONG_LADDER_SECONDS)
    state.validation_seconds[level].observe(seconds)
    if "error.code" in attrs:
        _add(state.validation_failures, attrs["error.code"])


def _checksum_begin(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.checksum_planned_bytes, state.checksum_done_bytes = int(_amount(attrs["planned_bytes"])), 0


def _checksum_progress(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.checksum_done_bytes = int(_amount(attrs["done_bytes"]))


def _checksum_end(purpose: ChecksumPurpose) -> Handler:
    def step(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
        done = int(_amount(attrs.get("bytes", 0)))
        _add(state.checksum_seconds, purpose.value, attrs["seconds"])
        _add(state.checksum_bytes, purpose.value, done)
        if purpose is ChecksumPurpose.VERIFY and attrs["outcome"] == Outcome.OK:
            state.checksum_done_bytes = done

    return step


def _publication_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    if "result" in attrs:
        _add(state.publications, attrs["result"])
        state.publication_bytes += int(_amount(attrs.get("bytes", 0))) if attrs["result"] == "published" else 0


def _publication_stage_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.publication_seconds, attrs["stage"], attrs["seconds"])
    if attrs["stage"] == "hash":
        _add(state.checksum_seconds, ChecksumPurpose.PUBLISH.value, attrs["seconds"])
        _add(state.checksum_bytes, ChecksumPurpose.PUBLISH.value, int(_amount(attrs.get("bytes", 0))))


def _restore_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.tensors_materialized += int(_amount(attrs.get("tensors", 0)))


def _registration_begin(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.registration_planned_bytes = int(_amount(attrs["planned_bytes"]))
    state.registration_chunks, state.registration_chunks_done = int(_amount(attrs["chunks"])), 0
    state.registered_bytes = state.registered_bytes or 0  # of an earlier registration, which is still held


def _registration_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    if attrs["outcome"] != Outcome.CANCELLED:
        _add(state.registrations, attrs["result"])


def _budget(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    told = {source.value: attrs.get(f"{source.value}_bytes") for source in BudgetSource}
    state.pin_budget = {source: size for source, size in told.items() if type(size) is int}


def _chunk_begin(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    state.ops[record["op"]].done_bytes = _bytes(attrs["done_bytes"])


def _chunk_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    if attrs["outcome"] == Outcome.OK:
        state.registered_bytes = min(MAX_COUNT, (state.registered_bytes or 0) + int(_amount(attrs["bytes"])))
        state.registration_chunks_done = min(MAX_COUNT, (state.registration_chunks_done or 0) + 1)
        state.registration_chunk_seconds.observe(_amount(attrs["seconds"]))


def _undone(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    # A rollback or a release: what could not be undone is still registered.
    state.registered_bytes = max(0, (state.registered_bytes or 0) - int(_amount(attrs.get("bytes", 0))))


def _rollback_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.registration_rollbacks, attrs["result"])


def _transport(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.transport, state.transport_reason = _word(attrs["transport"]), _word(attrs["reason"])


def _resolution_end(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    if attrs["outcome"] == Outcome.CANCELLED:  # somebody ended it: no outcome of a resolution
        return
    _add(state.resolutions, f"{attrs['result']}|{attrs['mode']}")
    state.resolution_seconds.observe(_amount(attrs["seconds"]))
    state.last_resolution = {**_plain(attrs), "mono_ns": record["mono_ns"]}


def _stage_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.stages, attrs["stage"])
    _add(state.stage_seconds, attrs["stage"], attrs["seconds"])


def _lifecycle(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.lifecycle = _word(attrs["state"])


def _sampled(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    source = _word(attrs["source"])
    _add(state.memory_sample_seconds, source, attrs["cost_seconds"])
    state.memory_sample_ns[source] = record["mono_ns"]


_MEMORY: Final = tuple(field.name for field in fields(E.MemorySampled) if field.name.endswith("_bytes"))


def _memory(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    # A later sample without PSS (its source has none) leaves the earlier PSS with its own timestamp.
    told = {key: attrs[key] for key in _MEMORY if type(attrs.get(key)) is int}
    state.memory = {**state.memory, **told, "moment": _word(attrs["moment"])}


def _artifact_memory(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    if attrs["key"] in state.artifacts or len(state.artifacts) < MAX_ARTIFACTS:
        state.artifacts[_word(attrs["key"])] = _plain(attrs)


def _allocator(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.allocator = _plain(attrs)


def _retention_progress(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    # Calls, not bytes: there is nothing to put beside planned bytes, but it moves.
    operation = state.ops.get(record.get("op", ""))
    if operation is not None and type(attrs["done_iterations"]) is int:
        state.progress_ns = operation.progress_ns = record["mono_ns"]


_RETENTION: Final = {kind.value: "file_backed_bytes" if kind is RetentionClass.FILE else f"{kind.value}_bytes" for kind in RetentionClass}


def _retention(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.retention = {kind: attrs[key] for kind, key in _RETENTION.items() if type(attrs.get(key)) is int}


def _policy(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.stall_after_seconds = _amount(attrs["stall_after_seconds"])


def _root(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    root = attrs["root"]
    if type(root) is not str or len(root) > MAX_PATH:
        raise TypeError("not a path")
    state.roots.pop(root, None)
    state.roots[root] = record["mono_ns"]
    if len(state.roots) > MAX_ROOTS:
        del state.roots[next(iter(state.roots))]


def _collective_begin(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    name = _word(attrs["op"])
    if name not in state.collectives and len(state.collectives) >= MAX_COLLECTIVES:
        raise ValueError("too many label values")
    told = {"sequence": int(_amount(attrs["sequence"])), "world_size": int(_amount(attrs["world_size"]))}
    state.collectives[name] = {**told, "begun_ns": record["mono_ns"], "operation": _word(record["op"])}


def _collective_end(state: WorkerState, _: Attrs, record: dict[str, Any]) -> None:
    for entry in state.collectives.values():
        if entry.get("operation") == record.get("op"):
            entry["begun_ns"] = None


_OWN: dict[type[Event], tuple[Handler, ...]] = {
    E.EventsDropped: (_dropped,),
    E.EndpointOpened: (_endpoint,),
    E.WorkerExited: (_exited,),
    E.PhaseChanged: (_phase,),
    E.SourceRejected: (_rejected,),
    E.FailureRecorded: (_failure,),
    E.LockEnded: (_lock_end,),
    E.LockStillWaiting: (_lock_progress,),
    E.MissExplained: (_miss,),
    E.LeaseOpened: (_lease_open,),
    E.LeaseClosed: (_lease_close,),
    E.ValidationEnded: (_validation_end,),
    E.ChecksumBegun: (_checksum_begin,),
    E.ChecksumProgress: (_checksum_progress,),
    E.ChecksumEnded: (_checksum_end(ChecksumPurpose.VERIFY),),
    E.SourceDigestEnded: (_checksum_end(ChecksumPurpose.SOURCE),),
    E.PublicationEnded: (_publication_end,),
    E.PublicationStageEnded: (_publication_stage_end,),
    E.RestoreEnded: (_restore_end,),
    E.MappingRegistering: (_registration_begin,),
    E.MappingRegistered: (_registration_end,),
    E.BudgetRecorded: (_budget,),
    E.ChunkRegistering: (_chunk_begin,),
    E.ChunkRegistered: (_chunk_end,),
    E.RollbackEnded: (_undone, _rollback_end),
    E.ReleaseEnded: (_undone,),
    E.TransportChosen: (_transport,),
    E.ResolutionEnded: (_resolution_end,),
    E.StageEnded: (_stage_end,),
    E.LifecycleAdvanced: (_lifecycle,),
    E.MemorySampled: (_sampled, _memory),
    E.ArtifactMemorySampled: (_sampled, _artifact_memory),
    E.AllocatorSampled: (_allocator,),
    E.RetentionRunProgress: (_retention_progress,),
    E.RetentionReported: (_retention,),
    E.PolicyRecorded: (_policy,),
    E.DomainOpening: (_root,),
    E.CollectiveBegun: (_collective_begin,),
    E.CollectiveEnded: (_collective_end,),
    E.NodeSampled: (node.sampled,),
    E.StallJudged: (node.judged,),
}


def _steps(kind: type[Event]) -> tuple[Handler, ...]:
    if issubclass(kind, Begin):
        return (_begin(kind), *_OWN.get(kind, ()))
    if issubclass(kind, End):
        return (_end, *_OWN.get(kind, ()))
    return (_progress, *_OWN.get(kind, ())) if issubclass(kind, Progress) else _OWN.get(kind, ())


_STEPS: Final[dict[str, tuple[Handler, ...]]] = {kind.NAME: _steps(kind) for kind in E.all_events()}
