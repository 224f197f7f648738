"""Measure one case, judge it, and tell of it in the journal.

Owns the order of a run and its control, and their events. Promises that whatever is measured, by itself, in a matrix or in a search, is a
span of the journal, and that a run which was ended early is judged as far as it came. Refuses files and reports: its callers have them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diag.analysis.retention import judge
from diag.probes.child import Stop
from diag.probes.matrix import CALL, Case
from diag.probes.retention import CONTROL, Request, Status, measure
from diag.report.streams import Progress
from hwr import telemetry
from hwr.outcomes import Outcome, RetentionVerdict
from hwr.telemetry.events.diagnosis import RetentionReported, RetentionRunBegun, RetentionRunProgress

_OUTCOMES: Final = {"timeout": "timeout", "signal": "failed", "broken": "failed", "unusable": "failed", "usage": "failed"}


def measured(
    request: Request, samples: Path, progress: Progress, stop: Stop, *, control: bool = True, against: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measure a case, judge it, and tell of it in the journal; return the run object.

    It is judged against its control: with `control` one that is measured now, else `against`, a run object that is there already.
    """
    case = f"{CALL} {request.call}" if request.mode == CALL else Case(request.mode, request.tensor_elements, request.offset_bytes)
    begun = RetentionRunBegun(
        mode=request.mode,
        elements=request.tensor_elements,
        offset_bytes=request.offset_bytes,
        iterations=request.iterations,
        deadline_seconds=request.timeout_seconds,
    )
    with telemetry.span(begun) as span:

        def sampled(sample: Mapping[str, Any]) -> None:
            done = int(sample.get("iterations") or 0)
            span.progress(RetentionRunProgress(done_iterations=done, planned_iterations=request.iterations))
            if sample.get("phase") == "loop":
                progress.tell(f"{case}: {done:,} of {request.iterations:,} calls")

        progress.tell(f"{case}: preparing")
        told = measure(request, samples, sampled, stop=stop)
        status = told["ending"]["status"]
        span.add(seconds=told["run"]["seconds"])
        if status != Status.ENDED:
            span.add(outcome=Outcome.CANCELLED if stop.signal else Outcome(_OUTCOMES[status]), error_reason=status)
            if any(sample.get("phase") == "loop" for sample in told["samples"]):
                told["analysis"] = judge(told).to_json()
            return told
        if control and request.mode != CONTROL and not stop.signal:
            told["control"] = _control(request, samples, progress, stop, told["warnings"])
        beside = told["control"] or against
        usable = beside if beside and beside["complete"] else None
        analysis = told["analysis"] = judge(told, usable).to_json()
        blocks, size = analysis.get("blocks_per_call") or {}, analysis.get("bytes_per_call") or {}
        span.add(
            verdict=RetentionVerdict(analysis["verdict"]),
            blocks_per_call=blocks.get("estimate"),
            bytes_per_call=size.get("estimate"),
            calls=analysis.get("calls"),
        )
        _report(told)
    return told


def _control(request: Request, samples: Path, progress: Progress, stop: Stop, warnings: list[str]) -> dict[str, Any]:
    aside = samples.with_name(f".{samples.name}.control")
    plain = dataclasses.replace(request, mode=CONTROL, call=None, attribute=False)
    try:
        told = measured(plain, aside, progress, stop, control=False)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    if not told["complete"]:
        said = (told["ending"]["message"] or told["ending"]["status"]).partition("\n")[0]
        warnings.append(f"the control was not measured: {said}")
    return {name: value for name, value in told.items() if name not in ("control", "analysis")}


def _report(told: Mapping[str, Any]) -> None:
    resident = {sample["phase"]: sample["rss_bytes"] for sample in told["samples"]}
    classes = told["analysis"].get("classes") or {}
    telemetry.emit(
        RetentionReported(
            mode=told["arguments"]["mode"],
            before_bytes=resident.get("baseline"),
            after_gc_bytes=resident.get("loop"),
            interpreter_bytes=classes.get("interpreter"),
            malloc_in_use_bytes=classes.get("malloc_in_use"),
            allocator_free_bytes=classes.get("allocator_free"),
            other_anonymous_bytes=classes.get("other_anonymous"),
            file_backed_bytes=classes.get("file"),
            locked_bytes=classes.get("locked"),
        )
    )
