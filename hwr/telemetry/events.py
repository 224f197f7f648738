"""The closed set of events: the one vocabulary that metrics, logs, reports and screens are projections of.

Owns every event class. Promises names and fields that only ever grow; the JSON Schemas in `docs/schema/` and `EVENTS.md`
are generated from here. Refuses a second way to tell: a view that needs a fact gets it as an event of this file.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from hwr.outcomes import (
    AttemptResult,
    Lifecycle,
    LoadStage,
    LockKind,
    MemoryMoment,
    MemorySource,
    Operation,
    Phase,
    PublicationOutcome,
    PublicationStage,
    QuarantineReason,
    ResolutionAction,
    ResolutionOutcome,
    ResolutionStage,
    RuntimeMode,
    Severity,
    SourceReason,
    StoreStatus,
    ValidationLevel,
)
from hwr.telemetry.event import Begin, End, Event, Progress

Kind = TypeVar("Kind", bound=Event)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def event(kind: type[Kind]) -> type[Kind]:
    """Make an event class: frozen, slotted, keywords only."""
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


# journal ---------------------------------------------------------------------------------------------------------


@event
class SegmentOpened(Event):
    """First line of every segment: the state folded from all earlier ones, so that reading may start here."""

    NAME: ClassVar[str] = "hwr.journal.segment.open"
    SEV: ClassVar[Severity] = Severity.DEBUG
    segment: int
    state: dict[str, Any] | None = None


@event
class EventsDropped(Event):
    """Events were lost before this one: the disk was full or failing, and a load is never held up for its telemetry."""

    NAME: ClassVar[str] = "hwr.journal.events.drop"
    SEV: ClassVar[Severity] = Severity.WARN
    count: int
    cause: str


@event
class EndpointOpened(Event):
    """`/metrics` is served at this address."""

    NAME: ClassVar[str] = "hwr.telemetry.endpoint.open"
    address: str
    port: int


@event
class EndpointFailed(Event):
    """`/metrics` is not served; the load goes on without it."""

    NAME: ClassVar[str] = "hwr.telemetry.endpoint.fail"
    SEV: ClassVar[Severity] = Severity.WARN
    address: str
    port: int
    problem: str


# worker ----------------------------------------------------------------------------------------------------------


@event
class WorkerStarted(Event):
    """A process began to write its journal; who it is stands in `res` of the segment's first line."""

    NAME: ClassVar[str] = "hwr.worker.process.start"


@event
class WorkerExited(Event):
    """The process ends in order. A journal without this event and without a living writer is that of a killed process."""

    NAME: ClassVar[str] = "hwr.worker.process.exit"


@event
class PhaseChanged(Event):
    """The worker's own word for what it does between operations; an open operation shows instead while it lasts."""

    NAME: ClassVar[str] = "hwr.worker.phase.change"
    phase: Phase


# checkpoint ------------------------------------------------------------------------------------------------------


@event
class SourceRejected(Event):
    """The canonical checkpoint was refused, with the reason and the sizes that show it."""

    NAME: ClassVar[str] = "hwr.checkpoint.source.reject"
    SEV: ClassVar[Severity] = Severity.ERROR
    reason: SourceReason
    file: str
    problem: str
    file_bytes: int | None = None
    expected_bytes: int | None = None
    declared_header_bytes: int | None = None
    missing_bytes: int | None = None
    extra_bytes: int | None = None


@event
class ShardsIgnored(Event):
    """Weight files that the index does not name lie beside it; they are not loaded."""

    NAME: ClassVar[str] = "hwr.checkpoint.shards.ignore"
    SEV: ClassVar[Severity] = Severity.WARN
    names: tuple[str, ...]


@event
class SourceDigestEnded(End):
    """The source files have their digests; `hashed` of them were read, the others came from the digest cache."""

    NAME: ClassVar[str] = "hwr.checkpoint.digest.end"
    files: int | None = None
    hashed: int | None = None
    bytes: int | None = None


@event
class SourceDigestBegun(Begin):
    """Digests of the source files are about to be looked up, or computed where the cache has none."""

    NAME: ClassVar[str] = "hwr.checkpoint.digest.begin"
    OPERATION: ClassVar[Operation | None] = Operation.CHECKSUM
    END: ClassVar[type[End]] = SourceDigestEnded
    files: int
    planned_bytes: int


@event
class SourceDigestProgress(Progress):
    """So many source bytes were hashed so far."""

    NAME: ClassVar[str] = "hwr.checkpoint.digest.progress"
    done_bytes: int
    planned_bytes: int


# store -----------------------------------------------------------------------------------------------------------


@event
class DomainOpened(End):
    """The store root was opened and probed, or why it was not."""

    NAME: ClassVar[str] = "hwr.store.domain.end"
    fstype: str | None = None
    storage_class: str | None = None
    created: bool | None = None
    writable: bool | None = None
    nofile_limit: int | None = None
    max_map_count: int | None = None


@event
class DomainOpening(Begin):
    """The store root is about to be opened: filesystem, permissions, flock, mmap and limits are probed."""

    NAME: ClassVar[str] = "hwr.store.domain.begin"
    END: ClassVar[type[End]] = DomainOpened
    root: str


@event
class LockEnded(End):
    """The wait for a store lock is over."""

    NAME: ClassVar[str] = "hwr.store.lock.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    lock: LockKind


@event
class LockWaiting(Begin):
    """A store lock is about to be waited for; a holder is named if `/proc/locks` shows one."""

    NAME: ClassVar[str] = "hwr.store.lock.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    OPERATION: ClassVar[Operation | None] = Operation.LOCK
    END: ClassVar[type[End]] = LockEnded
    lock: LockKind
    file: str
    exclusive: bool
    deadline_seconds: float
    holder_pid: int | None = None
    holder_state: str | None = None


@event
class LockStillWaiting(Progress):
    """The wait goes on: how long by now, and who holds the lock in which state."""

    NAME: ClassVar[str] = "hwr.store.lock.progress"
    SEV: ClassVar[Severity] = Severity.WARN
    lock: LockKind
    waited_seconds: float
    holder_pid: int | None = None
    holder_state: str | None = None


@event
class LockReplaced(Event):
    """The lock file was deleted or replaced while it was being locked; it was locked again. Lock files must never be swept."""

    NAME: ClassVar[str] = "hwr.store.lock.replace"
    SEV: ClassVar[Severity] = Severity.WARN
    lock: LockKind
    file: str


@event
class LookupEnded(End):
    """What the store answered; `unchecked` says what this validation level does not see."""

    NAME: ClassVar[str] = "hwr.store.lookup.end"
    status: StoreStatus | None = None
    bytes: int | None = None
    tensors: int | None = None
    unchecked: str | None = None


@event
class LookupBegun(Begin):
    """An artifact is about to be looked up, validated and leased."""

    NAME: ClassVar[str] = "hwr.store.lookup.begin"
    OPERATION: ClassVar[Operation | None] = Operation.LOOKUP
    END: ClassVar[type[End]] = LookupEnded
    key: str
    validation: ValidationLevel


@event
class MissExplained(Event):
    """No artifact has this key: the identity sections in which the nearest stored manifest differs."""

    NAME: ClassVar[str] = "hwr.store.miss.explain"
    key: str
    sections: tuple[str, ...]
    candidates: int
    nearest: str | None = None
    detail: str | None = None


@event
class ArtifactDenied(Event):
    """A deny marker was written: this artifact is never served again until it is republished."""

    NAME: ClassVar[str] = "hwr.store.deny.write"
    SEV: ClassVar[Severity] = Severity.ERROR
    key: str
    error_code: str
    problem: str
    containment: str = "marker"


@event
class QuarantineMoved(End):
    """A tree was moved out of `artifacts/`, or stays there denied."""

    NAME: ClassVar[str] = "hwr.store.quarantine.end"
    SEV: ClassVar[Severity] = Severity.WARN
    name: str | None = None


@event
class QuarantineMoving(Begin):
    """A tree is about to be moved to quarantine."""

    NAME: ClassVar[str] = "hwr.store.quarantine.begin"
    SEV: ClassVar[Severity] = Severity.WARN
    END: ClassVar[type[End]] = QuarantineMoved
    key: str
    cause: QuarantineReason


@event
class LeftoversRemoved(Event):
    """What a dead builder of this key left in `tmp/` was removed."""

    NAME: ClassVar[str] = "hwr.store.leftovers.remove"
    key: str
    entries: int
    bytes: int


@event
class TreeMeasured(End):
    """The size of the store's tree, for a store limit."""

    NAME: ClassVar[str] = "hwr.store.tree.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    bytes: int | None = None
    entries: int | None = None


@event
class TreeMeasuring(Begin):
    """The store's tree is about to be measured, because a store limit is set."""

    NAME: ClassVar[str] = "hwr.store.tree.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = TreeMeasured


@event
class PublicationEnded(End):
    """How a publication ended; seconds of each stage, bytes, and how the data is aligned."""

    NAME: ClassVar[str] = "hwr.store.publication.end"
    result: PublicationOutcome | None = None
    bytes: int | None = None
    tensors: int | None = None
    zero_byte_tensors: int | None = None
    filler_tensors: int | None = None
    content_digest: str | None = None


@event
class PublicationBegun(Begin):
    """An artifact is about to be written, hashed, made durable and published."""

    NAME: ClassVar[str] = "hwr.store.publication.begin"
    OPERATION: ClassVar[Operation | None] = Operation.PUBLISH
    END: ClassVar[type[End]] = PublicationEnded
    key: str
    planned_bytes: int
    tensors: int


@event
class PublicationProgress(Progress):
    """So many bytes were written so far."""

    NAME: ClassVar[str] = "hwr.store.publication.progress"
    done_bytes: int
    planned_bytes: int


@event
class PublicationStageEnded(End):
    """One step of a publication is over. The hash stage runs beside the write stage: its seconds are those of its own thread."""

    NAME: ClassVar[str] = "hwr.store.publication_stage.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    stage: PublicationStage
    bytes: int | None = None


@event
class PublicationStageBegun(Begin):
    """One step of a publication is about to start."""

    NAME: ClassVar[str] = "hwr.store.publication_stage.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = PublicationStageEnded
    stage: PublicationStage


@event
class LeaseOpened(Event):
    """An artifact is mapped and held by this process."""

    NAME: ClassVar[str] = "hwr.store.lease.open"
    key: str
    lease: str
    bytes: int
    files: int
    tensors: int
    validation: ValidationLevel


@event
class LeaseClosed(Event):
    """The mapping is gone and the lock released."""

    NAME: ClassVar[str] = "hwr.store.lease.close"
    key: str
    lease: str
    held_seconds: float


@event
class LeaseCloseRefused(Event):
    """A lease was to be closed while tensors still use its memory: refused, since unmapping would be a segmentation fault."""

    NAME: ClassVar[str] = "hwr.store.lease.refuse"
    SEV: ClassVar[Severity] = Severity.WARN
    key: str
    lease: str
    live_tensors: int


@event
class LeaseInherited(Event):
    """A forked child tried to use its parent's lease."""

    NAME: ClassVar[str] = "hwr.store.lease.inherit"
    SEV: ClassVar[Severity] = Severity.WARN
    key: str
    creator_pid: int


@event
class LeaseLost(Event):
    """A leased file changed under its mapping."""

    NAME: ClassVar[str] = "hwr.store.lease.lose"
    SEV: ClassVar[Severity] = Severity.ERROR
    key: str
    file: str
    cause: str


# validation ------------------------------------------------------------------------------------------------------


@event
class ValidationEnded(End):
    """An artifact was judged at this level."""

    NAME: ClassVar[str] = "hwr.validation.artifact.end"
    level: ValidationLevel
    file: str | None = None
    tensor: str | None = None
    chunk: int | None = None
    expected: str | None = None
    actual: str | None = None


@event
class ValidationBegun(Begin):
    """An artifact is about to be judged."""

    NAME: ClassVar[str] = "hwr.validation.artifact.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = ValidationEnded
    key: str
    level: ValidationLevel


@event
class ChecksumEnded(End):
    """So many payload bytes were read and hashed."""

    NAME: ClassVar[str] = "hwr.validation.checksum.end"
    bytes: int | None = None


@event
class ChecksumBegun(Begin):
    """Every payload byte is about to be read and hashed, before anything is restored."""

    NAME: ClassVar[str] = "hwr.validation.checksum.begin"
    OPERATION: ClassVar[Operation | None] = Operation.CHECKSUM
    END: ClassVar[type[End]] = ChecksumEnded
    key: str
    planned_bytes: int
    files: int


@event
class ChecksumProgress(Progress):
    """So many payload bytes were hashed so far."""

    NAME: ClassVar[str] = "hwr.validation.checksum.progress"
    done_bytes: int
    planned_bytes: int


# loader ----------------------------------------------------------------------------------------------------------


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


# runtime ---------------------------------------------------------------------------------------------------------


@event
class ResolutionEnded(End):
    """The one report of a resolution: where the weights came from, whatever happened."""

    NAME: ClassVar[str] = "hwr.runtime.resolution.end"
    result: ResolutionOutcome
    mode: RuntimeMode
    attempts: tuple[str, ...] = ()


@event
class ResolutionBegun(Begin):
    """Weights are about to be resolved: from the store, or by ordinary loading."""

    NAME: ClassVar[str] = "hwr.runtime.resolution.begin"
    END: ClassVar[type[End]] = ResolutionEnded
    mode: RuntimeMode
    validation: ValidationLevel


@event
class AttemptRecorded(Event):
    """One stage of a resolution: its result, what was done next, and the failure if there was one."""

    NAME: ClassVar[str] = "hwr.runtime.attempt.record"
    stage: ResolutionStage
    result: AttemptResult
    action: ResolutionAction
    seconds: float
    error_code: str | None = None
    error_reason: str | None = None


@event
class StageEnded(End):
    """A stage of the start is over."""

    NAME: ClassVar[str] = "hwr.runtime.stage.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    stage: LoadStage


@event
class StageBegun(Begin):
    """A stage of the start begins."""

    NAME: ClassVar[str] = "hwr.runtime.stage.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = StageEnded
    stage: LoadStage


@event
class FailureRecorded(Event):
    """A typed failure, once: `fatal` says whether it ended the start or the ordinary load took over."""

    NAME: ClassVar[str] = "hwr.runtime.failure.record"
    SEV: ClassVar[Severity] = Severity.WARN
    error_code: str
    error_reason: str | None = None
    stage: ResolutionStage
    problem: str
    retryable: bool
    fatal: bool


@event
class LifecycleAdvanced(Event):
    """The model climbed a rung of the lifecycle ladder."""

    NAME: ClassVar[str] = "hwr.runtime.lifecycle.advance"
    SEV: ClassVar[Severity] = Severity.DEBUG
    state: Lifecycle


@event
class AdaptationSkipped(Event):
    """The artifact already holds the adapted weights; merging was skipped."""

    NAME: ClassVar[str] = "hwr.runtime.adaptation.skip"
    kind: str


@event
class StepsEnded(End):
    """The forward passes are over."""

    NAME: ClassVar[str] = "hwr.runtime.steps.end"
    steps: int | None = None


@event
class StepsBegun(Begin):
    """Forward passes on synthetic input are about to run."""

    NAME: ClassVar[str] = "hwr.runtime.steps.begin"
    END: ClassVar[type[End]] = StepsEnded
    steps: int


# memory ----------------------------------------------------------------------------------------------------------


@event
class MemorySampled(Event):
    """The process's memory at a lifecycle boundary; each figure's file and what reading it cost. anon, file and shmem are disjoint."""

    NAME: ClassVar[str] = "hwr.memory.process.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    moment: MemoryMoment
    source: MemorySource
    cost_seconds: float
    rss_anon_bytes: int | None = None
    rss_file_bytes: int | None = None
    rss_shmem_bytes: int | None = None
    pss_bytes: int | None = None
    private_bytes: int | None = None
    locked_bytes: int | None = None
    hugetlb_bytes: int | None = None
    problem: str | None = None


@event
class ArtifactMemorySampled(Event):
    """The memory of one artifact's mappings in this process; anonymous bytes are pages that diverged from the file (healthy: 0)."""

    NAME: ClassVar[str] = "hwr.memory.artifact.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    moment: MemoryMoment
    source: MemorySource
    cost_seconds: float
    key: str
    mapped_bytes: int
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    anonymous_bytes: int | None = None
    page_cache_bytes: int | None = None


@event
class AllocatorSampled(Event):
    """What the C allocator and the interpreter hold, once a minute; nothing is ever trimmed or collected to look better."""

    NAME: ClassVar[str] = "hwr.memory.allocator.sample"
    SEV: ClassVar[Severity] = Severity.DEBUG
    python_blocks: int
    gc_collections: tuple[int, ...]
    in_use_bytes: int | None = None
    free_bytes: int | None = None
    mapped_bytes: int | None = None


# internal --------------------------------------------------------------------------------------------------------


def all_events() -> tuple[type[Event], ...]:
    """Return every concrete event class, by name."""
    found = {kind.NAME: kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Event) and kind.NAME}
    return tuple(found[name] for name in sorted(found))
