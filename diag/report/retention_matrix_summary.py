"""What the runs of a matrix say together.

Owns the row of a case, whether its repetitions agree, and the counts over all. Promises that a run which was not measured is listed with
its reason and never counted as flat, and that agreement is stated only where there were two answers. Refuses to judge a run: that is
the analysis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from diag.probes.matrix import Case, Plan, Step
from diag.probes.retention_files import Run
from diag.report.findings import Finding
from hwr.units import one_line

NOT_REACHED: Final = "not reached"
_WHY: Final = ("cannot measure: ", "broken measurement: ")  # the probe's own words


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate a call, the ends of its interval, and what the run could not tell apart."""

    estimate: float
    low: float
    high: float
    resolution: float = 0.0

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> Interval | None:
        """Take it from an analysis; None where the analysis has no such measure."""
        if found is None or found.get("estimate") is None:
            return None
        low, high = (found["estimate"] if found.get(name) is None else found[name] for name in ("low", "high"))
        return cls(found["estimate"], low, high, found.get("resolution") or 0.0)

    def apart(self, other: Interval) -> bool:
        """Say whether the two have nothing in common, what neither run could tell apart set aside."""
        tolerance = max(self.resolution, other.resolution)
        return self.low - other.high > tolerance or other.low - self.high > tolerance

    def to_json(self) -> dict[str, float]:
        """Return it as JSON values."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high, "resolution": self.resolution}


@dataclass(frozen=True, slots=True)
class Repetition:
    """One run of a case. `why` says why there is no verdict, exactly where there is none."""

    step: Step
    verdict: str | None
    blocks: Interval | None
    bytes: Interval | None
    seconds: float | None
    why: str | None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.verdict is None) != (self.why is not None):
            raise ValueError(f"{self.step.stem}: a verdict, or why there is none")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        control = self.step.control_stem
        return {
            "repetition": self.step.repetition,
            "file": f"{self.step.stem}.json",
            "control_file": None if control is None else f"{control}.json",
            "verdict": self.verdict,
            "blocks_per_call": None if self.blocks is None else self.blocks.to_json(),
            "bytes_per_call": None if self.bytes is None else self.bytes.to_json(),
            "seconds": self.seconds,
            "why": self.why,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its repetitions. `place` is the absolute begin and end of the tensor in the file."""

    case: Case
    asked: bool
    place: tuple[int, int] | None
    repetitions: tuple[Repetition, ...]

    @property
    def disagreement(self) -> str | None:
        """In what its repetitions differ; None where they agree, or were not two."""
        measured = [entry for entry in self.repetitions if entry.verdict is not None]
        verdicts = sorted({entry.verdict or "" for entry in measured})
        if len(verdicts) > 1:
            return f"verdicts {' and '.join(verdicts)}"
        blocks = [entry.blocks for entry in measured if entry.blocks is not None]
        if any(before.apart(after) for before, after in pairwise(blocks)):
            return f"blocks per call {' and '.join(f'{entry.estimate:.3f}' for entry in blocks)}"
        return None

    @property
    def agree(self) -> bool | None:
        """Whether its repetitions agree; None where there are not two answers."""
        answers = sum(entry.verdict is not None for entry in self.repetitions)
        return None if answers < 2 else self.disagreement is None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        begin, end = self.place or (None, None)
        return {
            **self.case.to_json(),
            "asked": self.asked,
            "begin": begin,
            "end": end,
            "verdicts": [entry.verdict for entry in self.repetitions],
            "agree": self.agree,
            "disagreement": self.disagreement,
            "repetitions": [entry.to_json() for entry in self.repetitions],
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """A matrix as far as it came; `interrupted` names the signal that ended it early."""

    plan: Plan
    rows: tuple[Row, ...]
    interrupted: str | None = None

    @property
    def repetitions(self) -> tuple[Repetition, ...]:
        """Every run of every case."""
        return tuple(entry for row in self.rows for entry in row.repetitions)

    @property
    def measured(self) -> int:
        """Runs with a verdict."""
        return sum(entry.verdict is not None for entry in self.repetitions)

    @property
    def not_measured(self) -> tuple[Repetition, ...]:
        """Runs without a verdict."""
        return tuple(entry for entry in self.repetitions if entry.verdict is None)

    @property
    def agreement(self) -> str:
        """One sentence about the repetitions."""
        told = [row for row in self.rows if row.agree is not None]
        if not told:
            return "No case has two measured repetitions: whether they agree is not known."
        differing = [row for row in told if not row.agree]
        open_cases = f" Of {len(self.rows) - len(told)} further cases it is not known." if len(told) < len(self.rows) else ""
        if not differing:
            return (
                f"The repetitions of {'both' if len(told) == 2 else f'all {len(told)}'} cases agree.{open_cases}"
                if len(told) > 1
                else (f"The repetitions of the one case agree.{open_cases}")
            )
        named = "; ".join(f"{row.case}: {row.disagreement}" for row in differing)
        return f"The repetitions of {len(differing)} of {len(told)} cases do not agree: {named}.{open_cases}"

    def findings(self) -> list[Finding]:
        """Return a finding for each case that retained in some repetition."""
        found = []
        for row in self.rows:
            retained = [entry for entry in row.repetitions if entry.verdict == "retained"]
            if retained:
                blocks = [entry.blocks.to_json() for entry in retained if entry.blocks is not None]
                sizes = [entry.bytes.to_json() for entry in retained if entry.bytes is not None]
                evidence = {"files": [f"{entry.step.stem}.json" for entry in retained], "blocks_per_call": blocks, "bytes_per_call": sizes}
                text = f"retained in {len(retained)} of {len(row.repetitions)} repetitions"
                found.append(Finding(code="retained", subject=str(row.case), text=text, evidence=evidence))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        verdicts = [entry.verdict for entry in self.repetitions]
        totals = {word: verdicts.count(word) for word in ("retained", "flat", "inconclusive")}
        return {
            "complete": self.measured == len(self.repetitions),
            "interrupted": self.interrupted,
            "planned": len(self.repetitions),
            "measured": self.measured,
            "totals": {**totals, "not_measured": len(self.not_measured)},
            "agreement": self.agreement,
            "cases": [row.to_json() for row in self.rows],
            "not_measured": [{"file": f"{entry.step.stem}.json", "why": entry.why} for entry in self.not_measured],
        }


def summarize(plan: Plan, runs: Mapping[str, Mapping[str, Any]], *, interrupted: str | None = None) -> Summary:
    """Put the runs, by the stem of their names, into the rows of their plan."""
    by_case: dict[Case, list[Step]] = {}
    for step in plan.steps():
        by_case.setdefault(step.case, []).append(step)
    order = {mode: number for number, mode in enumerate((*plan.modes, "reuse"))}
    cases = sorted(by_case, key=lambda case: (order[case.mode], case.tensor_elements, case.offset_bytes))
    return Summary(plan, tuple(_row(case, by_case[case], runs) for case in cases), interrupted)


def _row(case: Case, steps: Sequence[Step], runs: Mapping[str, Mapping[str, Any]]) -> Row:
    found = [runs.get(step.stem) for step in steps]
    places = [place for run in found if run is not None and (place := Run("", run).place()) is not None]
    return Row(case, steps[0].asked, places[0] if places else None, tuple(map(repetition_of, steps, found)))


def repetition_of(step: Step, run: Mapping[str, Any] | None) -> Repetition:
    """Say what a run of the plan found, or why it found nothing."""
    if run is None:
        return Repetition(step, None, None, None, None, NOT_REACHED)
    told = Run("", run)
    verdict = told.verdict if told.complete else None
    ending = run.get("ending") or {}
    why = None
    if verdict is None:
        message = _decisive(str(ending.get("message") or ""))
        why = one_line(f"{ending.get('status', 'broken')}{f': {message}' if message else ''}")
    seconds = (run.get("run") or {}).get("seconds")
    blocks, sizes = Interval.of(told.measure("blocks_per_call")), Interval.of(told.measure("bytes_per_call"))
    if verdict is None:
        blocks = sizes = None
    return Repetition(step, verdict, blocks, sizes, seconds, why, tuple(map(str, run.get("warnings") or ())))


def _decisive(message: str) -> str:
    """Return the line that says why; libraries may have warned before it."""
    lines = message.splitlines() or [""]
    return next((line for line in lines if line.startswith(_WHY)), lines[0])
