"""What a load did: the values that it is told with.

Owns the report of a resolution and the timing of stages. Promises that a report is complete whatever happened. Refuses I/O.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hwr.errors import HwrError
from hwr.outcomes import (
    AttemptResult,
    Lifecycle,
    LoadStage,
    PublicationOutcome,
    ResolutionAction,
    ResolutionOutcome,
    ResolutionStage,
    RuntimeMode,
    Transport,
    TransportReason,
    ValidationLevel,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A typed failure as a record."""

    stage: ResolutionStage
    code: str
    reason: str
    retryable: bool
    message: str

    @classmethod
    def of(cls, error: HwrError) -> Failure:
        """Take what a report needs of an exception."""
        return cls(error.stage, error.code.value, error.reason, error.retryable, str(error))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One stage that was tried; a failure exactly with timeout and error."""

    stage: ResolutionStage
    result: AttemptResult
    action: ResolutionAction
    seconds: float
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if (self.failure is not None) != (self.result in (AttemptResult.TIMEOUT, AttemptResult.ERROR)):
            raise ValueError(f"{self.result} {'without' if self.failure is None else 'with'} a failure")


@dataclass(slots=True)
class Report:
    """The report of one load. `stage_seconds` are measured on one monotonic clock; `bytes` are the artifact's payload."""

    mode: RuntimeMode
    validation: ValidationLevel
    outcome: ResolutionOutcome = ResolutionOutcome.FAILED
    key: str | None = None
    seconds: float = 0.0
    bytes: int = 0
    tensors: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    stage_seconds: dict[LoadStage, float] = field(default_factory=dict)
    miss: str | None = None
    publication: PublicationOutcome | None = None
    publication_failure: Failure | None = None
    transport: Transport = Transport.NONE
    transport_reason: TransportReason | None = None
    transport_detail: str | None = None
    registered_bytes: int = 0
    lifecycle: Lifecycle = Lifecycle.UNRESOLVED

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)
