"""Two sets of retention runs side by side, such as an older and a newer version of a dependency.

Owns which cases are compared, when they differ, and whether the answer is whole. Promises that verdicts which are different, or intervals
that have nothing in common, are a difference; and that an answer is not whole while a case is on one side only, could not be measured, or
has runs that could not be read. Refuses to say which side is better.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from diag.probes.matrix import Case
from diag.probes.retention_files import Collected, Run
from diag.report.findings import Finding
from diag.report.retention_matrix_summary import Interval
from diag.report.retention_matrix_text import COLUMNS, blocks_text, bytes_text, case_columns
from hwr.units import one_line, short_key

# What a run object says of where it was measured. Affinity and pid are of one run, not of an environment.
_FACTS: Final = ("python", "implementation", "executable", "safetensors", "torch", "kernel", "hostname", "pythonmalloc")
_MATRIX_FACTS: Final = ("packages", "cpu", "transparent_hugepage", "governor", "libc")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ARGUMENTS: Final = ("iterations", "sample_every", "warmup", "header_bytes", "tensors", "call")


class Comparison(StrEnum):
    """What was found of one case."""

    SAME = "same"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Side:
    """The runs of one case on one side, taken together: every verdict, and the hull of the intervals."""

    verdicts: tuple[str, ...]
    blocks: Interval | None
    bytes: Interval | None
    runs: int

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Side:
        """Take what was measured; a run without a verdict counts, and adds none."""
        taken = list(runs)
        judged = [run for run in taken if run.complete and run.verdict is not None]
        blocks = [found for run in judged if (found := Interval.of(run.measure("blocks_per_call"))) is not None]
        sizes = [found for run in judged if (found := Interval.of(run.measure("bytes_per_call"))) is not None]
        return cls(tuple(sorted({str(run.verdict) for run in judged})), _hull(blocks), _hull(sizes), len(taken))

    @property
    def known(self) -> bool:
        """Whether it has one verdict that says something."""
        return len(self.verdicts) == 1 and self.verdicts != ("inconclusive",)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "verdicts": list(self.verdicts),
            "blocks_per_call": None if self.blocks is None else self.blocks.to_json(),
            "bytes_per_call": None if self.bytes is None else self.bytes.to_json(),
            "runs": self.runs,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """One case on both sides."""

    case: Case
    before: Side
    after: Side

    @property
    def reasons(self) -> tuple[str, ...]:
        """In what the two differ, a sentence each."""
        said = []
        if self.before.known and self.after.known and self.before.verdicts != self.after.verdicts:
            said.append(f"{self.before.verdicts[0]} before, {self.after.verdicts[0]} after")
        if self.before.blocks is not None and self.after.blocks is not None and self.before.blocks.apart(self.after.blocks):
            said.append("blocks per call differ")
        if self.before.bytes is not None and self.after.bytes is not None and self.before.bytes.apart(self.after.bytes):
            said.append("bytes per call differ")
        return tuple(said)

    @property
    def comparison(self) -> Comparison:
        """What was found."""
        if self.reasons:
            return Comparison.DIFFERS
        return Comparison.SAME if self.before.known and self.after.known else Comparison.UNKNOWN

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **self.case.to_json(),
            "comparison": self.comparison.value,
            "reasons": list(self.reasons),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Both sets: the cases that both have, those that only one has, and where the environments and the arguments differ."""

    before: Collected
    after: Collected
    pairs: tuple[Pair, ...]
    only_before: tuple[Case, ...]
    only_after: tuple[Case, ...]
    environment: Mapping[str, tuple[str, str]]

    @property
    def missing(self) -> tuple[str, ...]:
        """What the answer lacks to be whole, a part of a sentence each."""
        unread = len(self.before.unread) + len(self.after.unread)
        single = len(self.only_before) + len(self.only_after)
        unknown = sum(pair.comparison is Comparison.UNKNOWN for pair in self.pairs)
        said = ["no case is on both sides"] if not self.pairs else []
        said += [f"{_counted(unread, 'file was', 'files were')} left out"] if unread else []
        said += [f"{_counted(single, 'case is', 'cases are')} on one side only"] if single else []
        why = "a side is inconclusive, not measured, or its repetitions disagree"
        return (*said, *([f"{_counted(unknown, 'case', 'cases')} cannot be told ({why})"] if unknown else []))

    @property
    def complete(self) -> bool:
        """Whether every case of either side was compared with the other's."""
        return not self.missing

    def findings(self) -> list[Finding]:
        """Return a finding for each case that differs."""
        return [
            Finding(code="differs", subject=str(pair.case), text="; ".join(pair.reasons), evidence=pair.to_json())
            for pair in self.pairs
            if pair.comparison is Comparison.DIFFERS
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "before": {"path": str(self.before.path), "runs": len(self.before.runs), "unread": list(self.before.unread)},
            "after": {"path": str(self.after.path), "runs": len(self.after.runs), "unread": list(self.after.unread)},
            "complete": self.complete,
            "environment": {name: {"before": old, "after": new} for name, (old, new) in self.environment.items()},
            "cases": [pair.to_json() for pair in self.pairs],
            "only_before": [case.to_json() for case in self.only_before],
            "only_after": [case.to_json() for case in self.only_after],
        }


def side_by_side(before: Collected, after: Collected) -> SideBySide:
    """Put two sets of runs side by side."""
    old, new = _cases(before), _cases(after)
    pairs = tuple(Pair(case, Side.of(old[case]), Side.of(new[case])) for case in old if case in new)
    facts, other = environment_of(before), environment_of(after)
    changed = {name: (facts.get(name, "-"), other.get(name, "-")) for name in [*facts, *(other.keys() - facts.keys())]}
    differing = {name: both for name, both in changed.items() if both[0] != both[1]}
    return SideBySide(
        before, after, pairs, tuple(case for case in old if case not in new), tuple(case for case in new if case not in old), differing
    )


def environment_of(collected: Collected) -> dict[str, str]:
    """Return by name what the runs and the matrix say of where they were measured; values that runs disagree in, all of them."""
    found: dict[str, dict[str, None]] = {}
    for run in collected.runs:
        for name, value in _facts(run.data):
            found.setdefault(name, {})[value] = None
    for name in _MATRIX_FACTS:
        for inner, value in _flat(name, collected.environment.get(name)):
            if not inner.endswith(".version"):  # the runs say it
                found.setdefault(inner, {})[value] = None
    return {name: " and ".join(values) for name, values in found.items()}


def lines(found: SideBySide) -> Iterator[str]:
    """Yield the comparison for people, at most 100 columns but for paths and versions."""
    yield f"before  {one_line(str(found.before.path))} ({_runs(found.before)})"
    yield f"after   {one_line(str(found.after.path))} ({_runs(found.after)})"
    for side, collected in (("before", found.before), ("after", found.after)):
        yield from (f"left out {side}: {sentence}" for sentence in collected.unread)
    yield ""
    if found.environment:
        yield "What differs between the two environments, and in what was asked:"
        width = max(map(len, found.environment))
        for name, (old, new) in found.environment.items():
            yield f"  {name:{width}}  before  {old}"
            yield f"  {'':{width}}  after   {new}"
    else:
        yield "Nothing that the runs tell of their environments differs."
    yield ""
    if not found.pairs:
        yield "Nothing can be compared: the two have no case in common."
    else:
        yield f"{'mode':10} {'elem':>6} {'offset':>6}  {'':6} {'verdict':12}  {'blocks a call':21} {'bytes a call':23} "
    for pair in found.pairs:
        yield from _pair(pair)
    for name, cases in (("before", found.only_before), ("after", found.only_after)):
        if cases:
            yield from textwrap.wrap(f"Only {name}: {'; '.join(map(str, cases))}.", COLUMNS, subsequent_indent="  ")
    if found.pairs:
        yield ""
        yield from textwrap.wrap(_conclusion(found), COLUMNS)


def _pair(pair: Pair) -> Iterator[str]:
    head = f"{case_columns(pair.case)} "
    for name, side in (("before", pair.before), ("after", pair.after)):
        verdict = "/".join(side.verdicts) or "not measured"
        yield f"{head} {name:6} {verdict:12}  {blocks_text(side.blocks):21} {bytes_text(side.bytes)}".rstrip()
        head = " " * len(head)
    yield f"{head} {pair.comparison.value}{': ' if pair.reasons else ''}{'; '.join(pair.reasons)}"


def _conclusion(found: SideBySide) -> str:
    counts = {kind: sum(pair.comparison is kind for pair in found.pairs) for kind in Comparison}
    said = f"{counts[Comparison.DIFFERS]} of {len(found.pairs)} cases differ, {counts[Comparison.SAME]} are the same."
    return said if found.complete else f"{said} This is no whole answer: {', '.join(found.missing)}."


def _cases(collected: Collected) -> dict[Case, list[Run]]:
    found: dict[Case, list[Run]] = {}
    for run in sorted(collected.runs, key=lambda run: (run.case, run.name)):
        found.setdefault(run.case, []).append(run)
    return found


def _facts(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _FACTS:
        yield name, _shown(run.get(name))
    allocator = run.get("allocator") or {}
    yield "libc", _shown(allocator.get("libc"))
    yield from _flat("allocator.environment", allocator.get("environment"))
    yield from _flat("torch_threads", run.get("torch_threads"))
    for name in _ARGUMENTS:
        yield f"arguments.{name}", _shown(run["arguments"].get(name))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for inner, part in value.items():
            yield from _flat(f"{name}.{one_line(str(inner), 60)}", part)
    elif value is not None:
        yield name, _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    said = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return short_key(said) if _DIGEST.fullmatch(said) else one_line(said, 200)


def _hull(intervals: list[Interval]) -> Interval | None:
    if not intervals:
        return None
    return Interval(
        estimate=sum(found.estimate for found in intervals) / len(intervals),
        low=min(found.low for found in intervals),
        high=max(found.high for found in intervals),
        resolution=max(found.resolution for found in intervals),
    )


def _runs(collected: Collected) -> str:
    return f"{len(collected.runs)} run{'s' if len(collected.runs) != 1 else ''}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
