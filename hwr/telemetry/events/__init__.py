"""The closed set of events: the one vocabulary that metrics, logs, reports and screens are projections of.

Owns every event class, a module a room. Promises names and fields that only ever grow; the JSON Schemas in `docs/schema/` and
`EVENTS.md` are generated from here. Refuses a second way to tell: a view that needs a fact gets it as an event of this package.
"""

from __future__ import annotations

from hwr.telemetry.event import Event
from hwr.telemetry.events.checkpoint import ShardsIgnored, SourceDigestBegun, SourceDigestEnded, SourceDigestProgress, SourceRejected
from hwr.telemetry.events.diagnosis import RetentionReported, RetentionRunBegun, RetentionRunEnded, RetentionRunProgress
from hwr.telemetry.events.journal import (
    EndpointFailed,
    EndpointOpened,
    EventsDropped,
    PhaseChanged,
    SegmentOpened,
    WorkerExited,
    WorkerStarted,
)
from hwr.telemetry.events.loader import BuffersIgnored, ProductionBegun, ProductionEnded, RestoreBegun, RestoreEnded
from hwr.telemetry.events.memory import AllocatorSampled, ArtifactMemorySampled, MemorySampled
from hwr.telemetry.events.publication import (
    PublicationBegun,
    PublicationEnded,
    PublicationProgress,
    PublicationStageBegun,
    PublicationStageEnded,
)
from hwr.telemetry.events.runtime import (
    AdaptationSkipped,
    AttemptRecorded,
    FailureRecorded,
    LifecycleAdvanced,
    ResolutionBegun,
    ResolutionEnded,
    StageBegun,
    StageEnded,
    StepsBegun,
    StepsEnded,
)
from hwr.telemetry.events.store import (
    ArtifactDenied,
    DomainOpened,
    DomainOpening,
    LeaseClosed,
    LeaseCloseRefused,
    LeaseInherited,
    LeaseLost,
    LeaseOpened,
    LeftoversRemoved,
    LockEnded,
    LockReplaced,
    LockStillWaiting,
    LockWaiting,
    LookupBegun,
    LookupEnded,
    MissExplained,
    QuarantineMoved,
    QuarantineMoving,
    TreeMeasured,
    TreeMeasuring,
)
from hwr.telemetry.events.validation import ChecksumBegun, ChecksumEnded, ChecksumProgress, ValidationBegun, ValidationEnded

__all__ = [
    "AdaptationSkipped",
    "AllocatorSampled",
    "ArtifactDenied",
    "ArtifactMemorySampled",
    "AttemptRecorded",
    "BuffersIgnored",
    "ChecksumBegun",
    "ChecksumEnded",
    "ChecksumProgress",
    "DomainOpened",
    "DomainOpening",
    "EndpointFailed",
    "EndpointOpened",
    "EventsDropped",
    "FailureRecorded",
    "LeaseCloseRefused",
    "LeaseClosed",
    "LeaseInherited",
    "LeaseLost",
    "LeaseOpened",
    "LeftoversRemoved",
    "LifecycleAdvanced",
    "LockEnded",
    "LockReplaced",
    "LockStillWaiting",
    "LockWaiting",
    "LookupBegun",
    "LookupEnded",
    "MemorySampled",
    "MissExplained",
    "PhaseChanged",
    "ProductionBegun",
    "ProductionEnded",
    "PublicationBegun",
    "PublicationEnded",
    "PublicationProgress",
    "PublicationStageBegun",
    "PublicationStageEnded",
    "QuarantineMoved",
    "QuarantineMoving",
    "ResolutionBegun",
    "ResolutionEnded",
    "RestoreBegun",
    "RestoreEnded",
    "RetentionReported",
    "RetentionRunBegun",
    "RetentionRunEnded",
    "RetentionRunProgress",
    "SegmentOpened",
    "ShardsIgnored",
    "SourceDigestBegun",
    "SourceDigestEnded",
    "SourceDigestProgress",
    "SourceRejected",
    "StageBegun",
    "StageEnded",
    "StepsBegun",
    "StepsEnded",
    "TreeMeasured",
    "TreeMeasuring",
    "ValidationBegun",
    "ValidationEnded",
    "WorkerExited",
    "WorkerStarted",
    "all_events",
]


def all_events() -> tuple[type[Event], ...]:
    """Return every concrete event class, by name."""
    found = {kind.NAME: kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Event) and kind.NAME}
    return tuple(found[name] for name in sorted(found))
