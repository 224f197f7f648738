"""Registration of mapped weights, and the transport that was chosen.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`. A chunk is named twice: range i of n and chunk k of m
of that range; `done_bytes` and `planned_bytes` are those of the whole registration.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import (
    BudgetSource,
    DrainResult,
    Operation,
    RegistrationOutcome,
    RollbackResult,
    Severity,
    Transport,
    TransportReason,
)
from hwr.telemetry.event import Begin, End, Event, Progress, event


@event
class MappingRegistered(End):
    """The registration is over: the mapping is registered, or everything was undone, or start-up ends."""

    NAME: ClassVar[str] = "hwr.registration.mapping.end"
    result: RegistrationOutcome = RegistrationOutcome.FAILED
    reason: TransportReason | None = None
    driver: str | None = None
    ranges: int | None = None
    chunks: int | None = None
    registered_bytes: int | None = None
    problem: str | None = None


@event
class MappingRegistering(Begin):
    """Mapped payload files are about to be registered. No `limit_bytes`: none was configured. The deadline is looked at between calls."""

    NAME: ClassVar[str] = "hwr.registration.mapping.begin"
    OPERATION: ClassVar[Operation | None] = Operation.REGISTER
    END: ClassVar[type[End]] = MappingRegistered
    driver: str
    device: str
    ranges: int
    chunks: int
    planned_bytes: int
    deadline_seconds: float
    limit_bytes: int | None = None


@event
class BudgetRecorded(Event):
    """What may be pinned, before any driver call: the winning ceiling and those that lost; a source that has none is absent."""

    NAME: ClassVar[str] = "hwr.registration.budget.record"
    SEV: ClassVar[Severity] = Severity.DEBUG
    fits: bool
    planned_bytes: int
    budget_bytes: int | None = None
    source: BudgetSource | None = None
    configured_bytes: int | None = None
    memlock_bytes: int | None = None
    cgroup_bytes: int | None = None
    meminfo_bytes: int | None = None


@event
class LimitRecorded(Event):
    """A limit that others have met and that this plan touches, before the first driver call; no verdict, this driver may be free of it."""

    NAME: ClassVar[str] = "hwr.registration.limit.record"
    SEV: ClassVar[Severity] = Severity.WARN
    problem: str


@event
class AdmissionEnded(End):
    """This process's turn has come, or its deadline passed first."""

    NAME: ClassVar[str] = "hwr.registration.admission.end"
    SEV: ClassVar[Severity] = Severity.DEBUG


@event
class AdmissionBegun(Begin):
    """The exclusive lock of each payload file is about to be waited for, in name order: one process at a time registers a file."""

    NAME: ClassVar[str] = "hwr.registration.admission.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    OPERATION: ClassVar[Operation | None] = Operation.ADMISSION
    END: ClassVar[type[End]] = AdmissionEnded
    files: tuple[str, ...]
    deadline_seconds: float


@event
class ChunkRegistered(End):
    """The driver's call returned; on failure `problem` is the driver's own text."""

    NAME: ClassVar[str] = "hwr.registration.chunk.end"
    range: int
    ranges: int
    chunk: int
    chunks: int
    bytes: int
    done_bytes: int | None = None
    problem: str | None = None


@event
class ChunkRegistering(Begin):
    """The driver is about to be called for one chunk. This is a boundary and no timeout: the call cannot be cancelled."""

    NAME: ClassVar[str] = "hwr.registration.chunk.begin"
    OPERATION: ClassVar[Operation | None] = Operation.REGISTER_CHUNK
    END: ClassVar[type[End]] = ChunkRegistered
    range: int
    ranges: int
    chunk: int
    chunks: int
    bytes: int
    file: str
    driver: str
    done_bytes: int
    planned_bytes: int
    limit_bytes: int | None = None


@event
class RollbackEnded(End):
    """What the rollback undid and what it could not, and what became of the pending error of the failed call."""

    NAME: ClassVar[str] = "hwr.registration.rollback.end"
    SEV: ClassVar[Severity] = Severity.WARN
    result: RollbackResult = RollbackResult.PARTIAL
    chunks: int | None = None
    bytes: int | None = None
    survivors: int | None = None
    survivor_bytes: int | None = None
    drain: DrainResult | None = None
    drain_detail: str | None = None
    problem: str | None = None


@event
class RollbackBegun(Begin):
    """Chunks that were registered are about to be unregistered, in reverse. No `cause`: an interrupt or an exit."""

    NAME: ClassVar[str] = "hwr.registration.rollback.begin"
    SEV: ClassVar[Severity] = Severity.WARN
    END: ClassVar[type[End]] = RollbackEnded
    cause: TransportReason | None = None
    chunks: int
    bytes: int


@event
class VoteEnded(End):
    """What the group decided, or who did not vote in time."""

    NAME: ClassVar[str] = "hwr.registration.vote.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    decision: RegistrationOutcome | None = None
    missing: tuple[int, ...] = ()
    against: tuple[str, ...] = ()


@event
class VoteBegun(Begin):
    """This rank votes and waits for the others: all end registered or all staged."""

    NAME: ClassVar[str] = "hwr.registration.vote.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    OPERATION: ClassVar[Operation | None] = Operation.VOTE
    END: ClassVar[type[End]] = VoteEnded
    rank: int
    world_size: int
    vote: RegistrationOutcome
    reason: TransportReason
    deadline_seconds: float


@event
class VoteStillWaiting(Progress):
    """The wait for the votes of others goes on: who has not voted yet."""

    NAME: ClassVar[str] = "hwr.registration.vote.progress"
    SEV: ClassVar[Severity] = Severity.WARN
    missing: tuple[int, ...]
    waited_seconds: float


@event
class ReleaseEnded(End):
    """What was unregistered; what was kept stays registered and mapped until the process ends."""

    NAME: ClassVar[str] = "hwr.registration.release.end"
    SEV: ClassVar[Severity] = Severity.DEBUG
    chunks: int | None = None
    bytes: int | None = None
    survivors: int | None = None
    survivor_bytes: int | None = None
    problem: str | None = None


@event
class ReleaseBegun(Begin):
    """A registration is about to be given back, in reverse, before its mapping goes; `cause` is who asks."""

    NAME: ClassVar[str] = "hwr.registration.release.begin"
    SEV: ClassVar[Severity] = Severity.DEBUG
    END: ClassVar[type[End]] = ReleaseEnded
    cause: str
    chunks: int
    bytes: int


@event
class TransportChosen(Event):
    """The way that block bytes will take to the device, and why."""

    NAME: ClassVar[str] = "hwr.transport.choice.record"
    transport: Transport
    reason: TransportReason
    detail: str | None = None
