"""The metric catalogue: every metric, declared once.

Owns names, types, units, help texts, labels and the function from state to values; `METRICS.md` is generated from here.
Promises the naming rules of `catalogue.py` and that `rate()` over a restart is right: a new process starts its counters at 0.
Refuses pid, path, tensor, model and message as labels.
"""

from __future__ import annotations

import re
from typing import Any, Final

from hwr.outcomes import (
    NEVER_EMITTED,
    BudgetSource,
    ChecksumPurpose,
    Collective,
    FailureCode,
    IdentitySection,
    LoadStage,
    LockKind,
    MemorySource,
    Operation,
    Phase,
    PublicationOutcome,
    PublicationStage,
    RegistrationOutcome,
    ResolutionOutcome,
    RetentionClass,
    RollbackResult,
    RuntimeMode,
    SourceReason,
    Stall,
    Transport,
    TransportReason,
    ValidationLevel,
)
from hwr.telemetry.catalogue import Kind, Label, Metric, Observed, Scope, Values
from hwr.telemetry.events import SegmentOpened, all_events
from hwr.telemetry.state import LONG_LADDER_SECONDS
from hwr.units import printable, short_key

DROP_CAUSES: Final = ("disk_full", "io_error", "closed")
ARTIFACT: Final = Label("artifact", None)
# Of a label value that a journal brought; a version or an engine's name is shorter.
LABEL_CHARACTERS: Final = 64

_CODES: Final = tuple(code.value for code in FailureCode if code not in NEVER_EMITTED)
_VALIDATION_CODES: Final = (
    FailureCode.MANIFEST_CORRUPT.value,
    FailureCode.MANIFEST_INCOMPATIBLE.value,
    FailureCode.CHECKSUM_MISMATCH.value,
    FailureCode.STORE_IO.value,
)
_OPERATIONS: Final = Label("operation", tuple(Operation))
_COLLECTIVES: Final = Label("op", tuple(Collective))
_REASONS: Final = frozenset(reason.value for reason in TransportReason)
_OUTCOMES: Final = tuple(outcome.value for outcome in ResolutionOutcome if outcome is not ResolutionOutcome.REMOTE_IMPORT)


def _one(value: float | None) -> Values:
    return {} if value is None else {"": value}


def _known(pairs: dict[str, Any]) -> Values:
    return {key: value for key, value in pairs.items() if value is not None}


def _started(worker: Observed) -> Values:
    state = worker.state
    begun: dict[str, float] = {}
    for operation in state.ops.values():
        if operation.operation is not None:  # the oldest open one: "since when" is what an operator asks
            begun[operation.operation] = min(begun.get(operation.operation, float("inf")), state.wall_seconds(operation.begun_ns))
    return begun


def _deadlines(worker: Observed) -> Values:
    state = worker.state
    due: dict[str, float] = {}
    for operation in state.ops.values():
        if operation.operation is not None and operation.deadline_ns is not None:
            due[operation.operation] = min(due.get(operation.operation, float("inf")), state.wall_seconds(operation.deadline_ns))
    return due


def _in_collective(worker: Observed) -> Values:
    entries = worker.state.collectives.items()
    return {op: worker.state.wall_seconds(entry["begun_ns"]) for op, entry in entries if entry["begun_ns"] is not None}


def _waiters(worker: Observed) -> Values:
    waiting: dict[str, float] = {kind.value: 0.0 for kind in LockKind}
    for operation in worker.state.ops.values():
        if operation.operation == Operation.LOCK and operation.attrs.get("lock") in waiting:
            waiting[operation.attrs["lock"]] += 1
    return waiting


def _leases(worker: Observed) -> Values:
    return _one(float(len(worker.state.leases)) if worker.state.lease_acquisitions else None)


# What is no digest is no label: it comes from somebody else's file.
_KEY: Final = re.compile(r"[0-9a-f]{12,128}")


def _artifact(name: str) -> Any:
    def values(worker: Observed) -> Values:
        return _known({short_key(key): facts.get(name) for key, facts in worker.state.artifacts.items() if _KEY.fullmatch(key)})

    return values


def _build_info(worker: Observed) -> Values:
    state = worker.state
    versions = state.res.get("versions", {})
    return {
        "": {
            "version": printable(str(state.res.get("service.version", "unknown")), LABEL_CHARACTERS),
            "python": printable(str(state.res.get("python", "unknown")), LABEL_CHARACTERS),
            "torch": printable(str(versions.get("torch", "none")), LABEL_CHARACTERS),
            "safetensors": printable(str(versions.get("safetensors", "none")), LABEL_CHARACTERS),
        }
    }


METRICS: Final[tuple[Metric, ...]] = (
    # build and resolution
    Metric("hwr_build_info", Kind.INFO, "Versions of the worker's runtime, interpreter, torch and safetensors.", _build_info),
    Metric(
        "hwr_resolutions_total",
        Kind.COUNTER,
        "Resolutions by where the weights came from and by mode; only local_hit is a cache hit.",
        lambda w: w.state.resolutions,
        (Label("outcome", _OUTCOMES), Label("mode", tuple(RuntimeMode))),
    ),
    Metric(
        "hwr_resolution_seconds",
        Kind.HISTOGRAM,
        "Seconds of a resolution, from its begin to its report.",
        lambda w: {"": w.state.resolution_seconds},
        unit="seconds",
        bounds=LONG_LADDER_SECONDS,
    ),
    Metric(
        "hwr_stages_total",
        Kind.COUNTER,
        "Stages of a start that ended.",
        lambda w: w.state.stages,
        (Label("stage", tuple(LoadStage)),),
    ),
    Metric(
        "hwr_stage_seconds_total",
        Kind.COUNTER,
        "Seconds spent in the stages of a start.",
        lambda w: w.state.stage_seconds,
        (Label("stage", tuple(LoadStage)),),
        unit="seconds",
    ),
    Metric(
        "hwr_failures_total",
        Kind.COUNTER,
        "Typed failures, those included that the ordinary load made good.",
        lambda w: w.state.failures,
        (Label("code", _CODES),),
    ),
    Metric(
        "hwr_lookup_misses_total",
        Kind.COUNTER,
        "Misses, by each identity section in which the nearest stored artifact differs.",
        lambda w: w.state.lookup_misses,
        (Label("section", (*IdentitySection, "none")),),
    ),
    Metric(
        "hwr_source_rejected_total",
        Kind.COUNTER,
        "Canonical checkpoints refused.",
        lambda w: w.state.source_rejected,
        (Label("reason", tuple(SourceReason)),),
    ),
    Metric(
        "hwr_lease_acquisitions_total",
        Kind.COUNTER,
        "Leases of artifacts that this worker opened.",
        lambda w: {"": w.state.lease_acquisitions},
    ),
    Metric("hwr_leases", Kind.GAUGE, "Leases that are open now.", _leases),
    Metric(
        "hwr_tensors_materialized_total",
        Kind.COUNTER,
        "Tensors bound to models from artifacts; views, not copies.",
        lambda w: {"": w.state.tensors_materialized},
    ),
    # what a worker does
    Metric(
        "hwr_worker_up",
        Kind.GAUGE,
        "1 while the process that writes the journal lives, 0 once it is dead, absent if that cannot be known.",
        lambda w: _one(None if w.up is None else float(w.up)),
    ),
    Metric(
        "hwr_heartbeat_timestamp_seconds",
        Kind.GAUGE,
        "When the worker's interpreter last ran its beating thread; stands still while the GIL is held.",
        lambda w: _one(None if w.heartbeat_ns is None else w.state.wall_seconds(w.heartbeat_ns)),
        unit="seconds",
    ),
    Metric(
        "hwr_worker_phase",
        Kind.STATESET,
        "What the worker is doing.",
        lambda w: {"": w.state.phase().value},
        (Label("hwr_worker_phase", tuple(Phase)),),
    ),
    Metric(
        "hwr_worker_stall",
        Kind.STATESET,
        "What holds the worker up, as judged from outside; a worker's own endpoint does not judge.",
        lambda w: {} if w.stall is None else {"": w.stall},
        (Label("hwr_worker_stall", tuple(Stall)),),
    ),
    Metric(
        "hwr_operation_started_timestamp_seconds",
        Kind.GAUGE,
        "When the oldest open operation of this kind began, seconds since the epoch; absent when none is open.",
        _started,
        (_OPERATIONS,),
        unit="seconds",
    ),
    Metric(
        "hwr_operation_deadline_timestamp_seconds",
        Kind.GAUGE,
        "When the open operation of this kind will be given up; absent when it has no deadline.",
        _deadlines,
        (_OPERATIONS,),
        unit="seconds",
    ),
    Metric(
        "hwr_progress_timestamp_seconds",
        Kind.GAUGE,
        "When an operation last began, moved or ended.",
        lambda w: _one(None if w.state.progress_ns is None else w.state.wall_seconds(w.state.progress_ns)),
        unit="seconds",
    ),
    # validation
    Metric(
        "hwr_validation_seconds",
        Kind.HISTOGRAM,
        "Seconds of judging an artifact before it is served.",
        lambda w: w.state.validation_seconds,
        (Label("level", tuple(ValidationLevel)),),
        unit="seconds",
        bounds=LONG_LADDER_SECONDS,
    ),
    Metric(
        "hwr_validation_failures_total",
        Kind.COUNTER,
        "Artifacts that were judged invalid.",
        lambda w: w.state.validation_failures,
        (Label("code", _VALIDATION_CODES),),
    ),
    Metric(
        "hwr_checksum_seconds_total",
        Kind.COUNTER,
        "Seconds spent hashing weights.",
        lambda w: w.state.checksum_seconds,
        (Label("purpose", tuple(ChecksumPurpose)),),
        unit="seconds",
    ),
    Metric(
        "hwr_checksum_bytes_total",
        Kind.COUNTER,
        "Bytes of weights that were hashed.",
        lambda w: w.state.checksum_bytes,
        (Label("purpose", tuple(ChecksumPurpose)),),
    ),
    Metric(
        "hwr_checksum_planned_bytes",
        Kind.GAUGE,
        "Payload bytes that the last full checksum has to hash.",
        lambda w: _one(w.state.checksum_planned_bytes),
        unit="bytes",
    ),
    Metric(
        "hwr_checksum_done_bytes",
        Kind.GAUGE,
        "Payload bytes that the last full checksum has hashed.",
        lambda w: _one(w.state.checksum_done_bytes),
        unit="bytes",
    ),
    # publication
    Metric(
        "hwr_publications_total",
        Kind.COUNTER,
        "Publications by how they ended.",
        lambda w: w.state.publications,
        (Label("outcome", tuple(PublicationOutcome)),),
    ),
    Metric(
        "hwr_publication_seconds_total",
        Kind.COUNTER,
        "Seconds of the steps of publications; hash runs beside write.",
        lambda w: w.state.publication_seconds,
        (Label("stage", tuple(PublicationStage)),),
        unit="seconds",
    ),
    Metric("hwr_publication_bytes_total", Kind.COUNTER, "Bytes of artifacts published.", lambda w: {"": w.state.publication_bytes}),
    # registration and transport
    Metric(
        "hwr_registration_planned_bytes",
        Kind.GAUGE,
        "Bytes, in whole pages, that the last registration has to register.",
        lambda w: _one(w.state.registration_planned_bytes),
        unit="bytes",
    ),
    Metric(
        "hwr_registered_bytes",
        Kind.GAUGE,
        "Bytes that are registered now; grows with each chunk, and falls with a rollback or a release.",
        lambda w: _one(w.state.registered_bytes),
        unit="bytes",
    ),
    Metric(
        "hwr_registration_chunks", Kind.GAUGE, "Driver calls that the last registration needs.", lambda w: _one(w.state.registration_chunks)
    ),
    Metric(
        "hwr_registration_chunks_done",
        Kind.GAUGE,
        "Driver calls of the last registration that returned successfully; what a rollback undoes stays counted.",
        lambda w: _one(w.state.registration_chunks_done),
    ),
    Metric(
        "hwr_registration_chunk_seconds",
        Kind.HISTOGRAM,
        "Seconds of the driver calls that registered a chunk.",
        lambda w: {"": w.state.registration_chunk_seconds},
        unit="seconds",
        bounds=LONG_LADDER_SECONDS,
    ),
    Metric(
        "hwr_registrations_total",
        Kind.COUNTER,
        "Registrations by how they ended; failed ends the start.",
        lambda w: w.state.registrations,
        (Label("outcome", tuple(RegistrationOutcome)),),
    ),
    Metric(
        "hwr_registration_rollbacks_total",
        Kind.COUNTER,
        "Rollbacks of registrations; after a partial one memory stays registered and mapped until the process ends.",
        lambda w: w.state.registration_rollbacks,
        (Label("result", tuple(RollbackResult)),),
    ),
    Metric(
        "hwr_pin_budget_bytes",
        Kind.GAUGE,
        "What each ceiling left for pinning before the last registration; the smallest counted, one that does not exist is absent.",
        lambda w: w.state.pin_budget,
        (Label("source", tuple(BudgetSource)),),
        unit="bytes",
    ),
    Metric(
        "hwr_transport",
        Kind.STATESET,
        "The way that block bytes take to the device.",
        lambda w: {"": w.state.transport},
        (Label("hwr_transport", tuple(Transport)),),
    ),
    Metric(
        "hwr_transport_reason_info",
        Kind.INFO,
        "Why this transport was chosen.",
        lambda w: {"": {"reason": w.state.transport_reason}} if w.state.transport_reason in _REASONS else {},
        (Label("reason", tuple(TransportReason)),),
    ),
    # sequence parallelism
    Metric(
        "hwr_collective_started_timestamp_seconds",
        Kind.GAUGE,
        "When the rank entered the collective that it is in; absent when it is in none.",
        _in_collective,
        (_COLLECTIVES,),
        unit="seconds",
    ),
    Metric(
        "hwr_collective_sequence",
        Kind.GAUGE,
        "Number of the last collective that the rank entered; the peer that is missing is the one whose number is behind.",
        lambda w: {op: entry["sequence"] for op, entry in w.state.collectives.items()},
        (_COLLECTIVES,),
    ),
    # locks
    Metric(
        "hwr_lock_waits_total",
        Kind.COUNTER,
        "Waits for a store lock that ended, a wait of no time included.",
        lambda w: w.state.lock_waits,
        (Label("lock", tuple(LockKind)),),
    ),
    Metric(
        "hwr_lock_wait_seconds_total",
        Kind.COUNTER,
        "Seconds spent waiting for store locks.",
        lambda w: w.state.lock_wait_seconds,
        (Label("lock", tuple(LockKind)),),
        unit="seconds",
    ),
    Metric(
        "hwr_lock_waiters",
        Kind.GAUGE,
        "Waits for a store lock that are going on now.",
        _waiters,
        (Label("lock", tuple(LockKind)),),
    ),
    # memory
    Metric(
        "hwr_process_rss_bytes",
        Kind.GAUGE,
        "Resident memory by kind, disjoint, as of the last sample (status).",
        lambda w: _known({kind: w.state.memory.get(f"rss_{kind}_bytes") for kind in ("anon", "file", "shmem")}),
        (Label("kind", ("anon", "file", "shmem")),),
        unit="bytes",
    ),
    Metric(
        "hwr_process_pss_bytes",
        Kind.GAUGE,
        "Proportional set size as of the last sample (smaps_rollup): shared pages divided by their mappers.",
        lambda w: _one(w.state.memory.get("pss_bytes")),
        unit="bytes",
    ),
    Metric(
        "hwr_process_private_bytes",
        Kind.GAUGE,
        "Private_Clean + Private_Dirty as of the last sample (smaps_rollup); changes when another process maps the same file.",
        lambda w: _one(w.state.memory.get("private_bytes")),
        unit="bytes",
    ),
    Metric(
        "hwr_process_locked_bytes",
        Kind.GAUGE,
        "VmLck as of the last sample (status).",
        lambda w: _one(w.state.memory.get("locked_bytes")),
        unit="bytes",
    ),
    Metric(
        "hwr_process_hugetlb_bytes",
        Kind.GAUGE,
        "HugetlbPages as of the last sample (status).",
        lambda w: _one(w.state.memory.get("hugetlb_bytes")),
        unit="bytes",
    ),
    Metric(
        "hwr_artifact_mapped_bytes",
        Kind.GAUGE,
        "Bytes of an artifact that this worker maps.",
        _artifact("mapped_bytes"),
        (ARTIFACT,),
        unit="bytes",
    ),
    Metric(
        "hwr_artifact_anonymous_bytes",
        Kind.GAUGE,
        "Pages of an artifact's mappings that diverged from the file; healthy: 0.",
        _artifact("anonymous_bytes"),
        (ARTIFACT,),
        unit="bytes",
    ),
    Metric(
        "hwr_memory_sample_timestamp_seconds",
        Kind.GAUGE,
        "When memory was last read from this file of /proc.",
        lambda w: {source: w.state.wall_seconds(at) for source, at in w.state.memory_sample_ns.items()},
        (Label("source", tuple(MemorySource)),),
        unit="seconds",
    ),
    Metric(
        "hwr_memory_sample_seconds_total",
        Kind.COUNTER,
        "What reading memory cost.",
        lambda w: w.state.memory_sample_seconds,
        (Label("source", tuple(MemorySource)),),
        unit="seconds",
    ),
    Metric(
        "hwr_allocator_bytes",
        Kind.GAUGE,
        "What the C allocator holds (mallinfo2): in use, free but kept, mapped one by one.",
        lambda w: _known({kind: w.state.allocator.get(f"{kind}_bytes") for kind in ("in_use", "free", "mapped")}),
        (Label("state", ("in_use", "free", "mapped")),),
        unit="bytes",
    ),
    Metric(
        "hwr_python_allocated_blocks",
        Kind.GAUGE,
        "Memory blocks that the interpreter has allocated.",
        lambda w: _one(w.state.allocator.get("python_blocks")),
    ),
    Metric(
        "hwr_gc_collections_total",
        Kind.COUNTER,
        "Collections of the interpreter's garbage collector.",
        lambda w: {str(generation): count for generation, count in enumerate(w.state.allocator.get("gc_collections", ()))},
        (Label("generation", ("0", "1", "2")),),
    ),
    Metric(
        "hwr_retention_bytes",
        Kind.GAUGE,
        "Growth from the baseline to the last loop of this process's last retention run, by who holds it; locked is among the others too.",
        lambda w: w.state.retention,
        (Label("class", tuple(RetentionClass)),),
        unit="bytes",
    ),
    # telemetry itself
    Metric(
        "hwr_events_total",
        Kind.COUNTER,
        "Events, by name.",
        lambda w: w.state.events,
        (Label("event", tuple(kind.NAME for kind in all_events() if kind is not SegmentOpened)),),
        scope=Scope.PROCESS,
    ),
    Metric(
        "hwr_events_dropped_total",
        Kind.COUNTER,
        "Events that were lost because the journal could not be written.",
        lambda w: w.state.dropped,
        (Label("reason", DROP_CAUSES),),
        scope=Scope.PROCESS,
    ),
    Metric(
        "hwr_events_malformed_total",
        Kind.COUNTER,
        "Lines and events that could not be understood.",
        lambda w: {"": w.state.malformed + w.state.unknown_events},
        scope=Scope.PROCESS,
    ),
)
