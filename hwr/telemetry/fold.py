"""From events to state: the one place where an event means something.

Owns `apply`. Promises that it is the same for a live worker, its journal and a copy of that journal (J5), that a record of any
shape never raises, and that memory stays flat. Refuses to count what it does not know except as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from hwr.outcomes import ChecksumPurpose, Outcome, Phase
from hwr.telemetry import events as E
from hwr.telemetry.event import Begin, End, Event, Progress
from hwr.telemetry.state import LONG_LADDER_SECONDS, Histogram, OpenOperation, WorkerState

# Begin events whose ends were lost would pile up; a worker has a handful open at once.
MAX_OPEN: Final = 256
MAX_ARTIFACTS: Final = 1000

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
    if name == E.JournalCheckpoint.NAME:
        _checkpoint(state, record)
        return
    seq = record["seq"]
    if seq != state.seq + 1 and state.seq:
        state.seq_gaps += max(1, seq - state.seq - 1)
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
    """Take the resource, and the state too if events before this line were not seen; its `seq` is that of the last one folded in."""
    res = record.get("res")
    told = record["attrs"].get("state")
    if state.seq != record["seq"] and isinstance(told, dict):
        try:
            fresh = WorkerState.from_json(told)
        except (KeyError, TypeError, ValueError):
            state.malformed += 1
        else:
            for name in WorkerState.__slots__:
                setattr(state, name, getattr(fresh, name))
    if isinstance(res, dict):
        state.res = res


# generic steps ---------------------------------------------------------------------------------------------------


def _begin(kind: type[Begin]) -> Handler:
    operation = kind.OPERATION.value if kind.OPERATION else None
    name = kind.NAME

    def step(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
        now = record["mono_ns"]
        deadline = _number(attrs.get("deadline_seconds"))
        if len(state.ops) >= MAX_OPEN:
            del state.ops[next(iter(state.ops))]
        state.ops[record["op"]] = OpenOperation(
            event=name,
            operation=operation,
            begun_ns=now,
            parent=record.get("parent"),
            deadline_ns=None if deadline is None else now + int(deadline * 1e9),
            planned_bytes=_number(attrs.get("planned_bytes")),
            attrs=attrs,
        )
        if operation is not None:
            state.progress_ns = now

    return step


def _progress(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    now = record["mono_ns"]
    operation = state.ops.get(record.get("op", ""))
    done = _number(attrs.get("done_bytes"))
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
            state.last_good_seconds[operation.operation] = attrs["seconds"]


def _number(value: Any) -> Any:
    return value if type(value) is int or type(value) is float else None


def _add(table: dict[str, Any], key: str, amount: float = 1) -> None:
    table[key] = table.get(key, 0) + amount


# one step an event -----------------------------------------------------------------------------------------------


def _dropped(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.dropped, str(attrs["cause"]), int(attrs["count"]))


def _endpoint(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.endpoint = f"{attrs['address']}:{attrs['port']}"


def _exited(state: WorkerState, _: Attrs, record: dict[str, Any]) -> None:
    state.exited = True
    if state.base_phase != Phase.FAILED:
        state.base_phase = Phase.EXITED
    state.phase_ns = record["mono_ns"]


def _phase(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    state.base_phase = attrs["phase"]
    state.phase_ns = record["mono_ns"]


def _rejected(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.source_rejected, attrs["reason"])


def _failure(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    _add(state.failures, attrs["error.code"])
    state.last_failure = {**attrs, "mono_ns": record["mono_ns"]}


def _lock_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.lock_waits, attrs["lock"])
    _add(state.lock_wait_seconds, attrs["lock"], attrs["seconds"])


def _lock_progress(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    operation = state.ops.get(record.get("op", ""))
    if operation is not None:
        operation.attrs = {**operation.attrs, **attrs}


def _miss(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    for section in attrs["sections"]:
        _add(state.lookup_misses, section)


def _lease_open(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.lease_acquisitions += 1
    if len(state.leases) < MAX_ARTIFACTS:
        state.leases[attrs["lease"]] = {name: attrs[name] for name in ("key", "bytes", "files", "tensors", "validation")}


def _lease_close(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.leases.pop(attrs["lease"], None)


def _validation_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    level = attrs["level"]
    if level not in state.validation_seconds:
        state.validation_seconds[level] = Histogram.empty(LONG_LADDER_SECONDS)
    state.validation_seconds[level].observe(attrs["seconds"])
    if "error.code" in attrs:
        _add(state.validation_failures, attrs["error.code"])


def _checksum_begin(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.checksum_planned_bytes, state.checksum_done_bytes = int(attrs["planned_bytes"]), 0


def _checksum_progress(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.checksum_done_bytes = int(attrs["done_bytes"])


def _checksum_end(purpose: ChecksumPurpose) -> Handler:
    def step(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
        done = int(attrs.get("bytes", 0))
        _add(state.checksum_seconds, purpose, attrs["seconds"])
        _add(state.checksum_bytes, purpose, done)
        if purpose is ChecksumPurpose.VERIFY and attrs["outcome"] == Outcome.OK:
            state.checksum_done_bytes = done

    return step


def _publication_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    if "result" in attrs:
        _add(state.publications, attrs["result"])
        state.publication_bytes += int(attrs.get("bytes", 0)) if attrs["result"] == "published" else 0


def _publication_stage_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.publication_seconds, attrs["stage"], attrs["seconds"])
    if attrs["stage"] == "hash":
        _add(state.checksum_seconds, ChecksumPurpose.PUBLISH, attrs["seconds"])
        _add(state.checksum_bytes, ChecksumPurpose.PUBLISH, int(attrs.get("bytes", 0)))


def _restore_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.tensors_materialized += int(attrs.get("tensors", 0))


def _resolution_end(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    _add(state.resolutions, f"{attrs['result']}|{attrs['mode']}")
    state.resolution_seconds.observe(attrs["seconds"])
    state.last_resolution = {**attrs, "mono_ns": record["mono_ns"]}


def _stage_end(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    _add(state.stages, attrs["stage"])
    _add(state.stage_seconds, attrs["stage"], attrs["seconds"])


def _lifecycle(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.lifecycle = str(attrs["state"])


def _sampled(state: WorkerState, attrs: Attrs, record: dict[str, Any]) -> None:
    source = str(attrs["source"])
    state.memory_sample_ns[source] = record["mono_ns"]
    _add(state.memory_sample_seconds, source, attrs["cost_seconds"])


def _memory(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    # A later sample without PSS (its source has none) leaves the earlier PSS with its own timestamp.
    state.memory = {**state.memory, **{key: value for key, value in attrs.items() if key.endswith("_bytes")}, "moment": attrs["moment"]}


def _artifact_memory(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    if attrs["key"] in state.artifacts or len(state.artifacts) < MAX_ARTIFACTS:
        state.artifacts[attrs["key"]] = dict(attrs)


def _allocator(state: WorkerState, attrs: Attrs, _: dict[str, Any]) -> None:
    state.allocator = attrs


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
    E.ResolutionEnded: (_resolution_end,),
    E.StageEnded: (_stage_end,),
    E.LifecycleAdvanced: (_lifecycle,),
    E.MemorySampled: (_sampled, _memory),
    E.ArtifactMemorySampled: (_sampled, _artifact_memory),
    E.AllocatorSampled: (_allocator,),
}


def _steps(kind: type[Event]) -> tuple[Handler, ...]:
    if issubclass(kind, Begin):
        return (_begin(kind), *_OWN.get(kind, ()))
    if issubclass(kind, End):
        return (_end, *_OWN.get(kind, ()))
    return (_progress, *_OWN.get(kind, ())) if issubclass(kind, Progress) else _OWN.get(kind, ())


_STEPS: Final[dict[str, tuple[Handler, ...]]] = {kind.NAME: _steps(kind) for kind in E.all_events()}
