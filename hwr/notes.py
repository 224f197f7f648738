"""What a load tells while it goes on.

Owns the stages, attempts and rungs of one load: each becomes an event and a line of the report. Promises that report and journal never
disagree, since both are written here. Refuses to decide what comes next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hwr import telemetry
from hwr.errors import EXIT_TIMEOUT, HwrError
from hwr.errors import SourceRejected as RejectedSource
from hwr.outcomes import AttemptResult, Lifecycle, LoadStage, ResolutionAction, ResolutionStage, RuntimeMode, SourceReason
from hwr.report import Attempt, Failure, Report
from hwr.telemetry import events as E
from hwr.telemetry.hub import Span

_SIZES = ("file_bytes", "expected_bytes", "declared_header_bytes", "missing_bytes", "extra_bytes")


@dataclass(slots=True)
class OpenAttempt:
    """An attempt that goes on; whoever makes it sets what it knows."""

    result: AttemptResult = AttemptResult.SUCCESS
    action: ResolutionAction = ResolutionAction.SKIP  # nothing else was needed
    failure: Failure | None = None


class Notes:
    """The teller of one load."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @contextmanager
    def stage(self, stage: LoadStage) -> Iterator[Span]:
        """Bracket a stage; its seconds count also if it fails."""
        running = telemetry.span(E.StageBegun(stage=stage), stage=stage)
        seconds = self._report.stage_seconds
        try:
            with running:
                yield running
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + running.seconds

    @contextmanager
    def attempt(self, stage: ResolutionStage, *, quiet: bool = False, last: bool = False) -> Iterator[OpenAttempt]:
        """Note an attempt; `quiet` ones are noted only if they fail, and after the `last` there is nothing else to try."""
        attempt = OpenAttempt()
        begun = time.monotonic()
        try:
            yield attempt
        except HwrError as error:
            attempt.result = AttemptResult.TIMEOUT if error.exit_code == EXIT_TIMEOUT else AttemptResult.ERROR
            attempt.failure = Failure.of(error)
            if self._report.mode is not RuntimeMode.PREFERRED or not error.retryable or last:
                attempt.action = ResolutionAction.FAIL_STARTUP
            elif attempt.action is ResolutionAction.SKIP:
                attempt.action = ResolutionAction.CANONICAL_FALLBACK
            self._note(attempt, stage, begun)
            raise
        if not quiet:
            self._note(attempt, stage, begun)

    def said(self) -> tuple[str, ...]:
        """Return the attempts in short, for the report event."""
        return tuple(f"{one.stage}:{one.result}" + (f":{one.failure.code}" if one.failure else "") for one in self._report.attempts)

    def rejected(self, error: RejectedSource, where: str) -> None:
        """Tell of a refused checkpoint, with the sizes that show it."""
        sizes = {name: error.details[name] for name in _SIZES if isinstance(error.details.get(name), int)}
        file = str(error.details.get("file") or error.details.get("directory") or where)
        telemetry.emit(E.SourceRejected(reason=SourceReason(error.code.value), file=file, problem=error.cause, **sizes))

    def advance(self, state: Lifecycle) -> None:
        """Climb a rung of the lifecycle ladder."""
        self._report.lifecycle = state
        telemetry.emit(E.LifecycleAdvanced(state=state))

    def _note(self, attempt: OpenAttempt, stage: ResolutionStage, begun: float) -> None:
        failure = attempt.failure
        done = Attempt(stage, attempt.result, attempt.action, time.monotonic() - begun, failure)
        self._report.attempts.append(done)
        telemetry.emit(
            E.AttemptRecorded(
                stage=stage,
                result=done.result,
                action=done.action,
                seconds=done.seconds,
                error_code=failure.code if failure else None,
                error_reason=(failure.reason or None) if failure else None,
            )
        )
