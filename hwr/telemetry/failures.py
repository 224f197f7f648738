"""Typed failures as events.

Owns the one event that counts a failure. Promises that a failure is counted once, however many rooms it travels through.
Refuses exceptions that have no code.
"""

from __future__ import annotations

from hwr.errors import HwrError
from hwr.telemetry.events import FailureRecorded
from hwr.telemetry.process import emit


def record_failure(error: HwrError, *, fatal: bool) -> None:
    """Emit a failure, unless it was already; one that wraps another counts as that other."""
    inner = getattr(error, "failure", error)
    if inner.recorded:
        return
    inner.recorded = True
    emit(
        FailureRecorded(
            error_code=inner.code.value,
            error_reason=inner.reason or None,
            stage=inner.stage,
            problem=inner.cause,
            retryable=inner.retryable,
            fatal=fatal,
        )
    )
