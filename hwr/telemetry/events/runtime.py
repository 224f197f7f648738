"""Resolution, its stages and its failures.

Sizes are bytes, times seconds. A class's docstring is its entry in `EVENTS.md`.
"""

from __future__ import annotations

from typing import ClassVar

from hwr.outcomes import (
    AttemptResult,
    Lifecycle,
    LoadStage,
    ResolutionAction,
    ResolutionOutcome,
    ResolutionStage,
    RuntimeMode,
    Severity,
    ValidationLevel,
)
from hwr.telemetry.event import Begin, End, Event, event


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
class PolicyRecorded(Event):
    """What this worker was told that a watcher has to know: from when on an operation without progress counts as stalled."""

    NAME: ClassVar[str] = "hwr.runtime.policy.record"
    SEV: ClassVar[Severity] = Severity.DEBUG
    stall_after_seconds: float


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
