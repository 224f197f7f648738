"""The store: opened, locked, looked up, denied, leased.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import LockKind, Operation, QuarantineReason, Severity, StoreStatus, ValidationLevel
from hwr.telemetry.event import Begin, End, Event, Progress, event


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
