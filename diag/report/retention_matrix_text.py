"""A matrix for people: a table of at most 100 columns, and what of it needs a reader's eye.

Owns the text of `summary.txt` and of one run's line. Promises that nothing is shown as 0 that was not measured. Refuses colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from diag.probes.matrix import Case
from diag.report.retention_matrix_summary import Interval, Repetition, Row, Summary
from hwr.units import one_line

COLUMNS: Final = 100
NOTE: Final = (
    "Blocks are those of the interpreter, counted; bytes the slope of anonymous memory; both a call,",
    "less the control, which is the reuse run of the same elements, offset and repetition. What stays",
    "after its objects died is evidence about a dependency or an allocator. It is no root cause and no",
    "estimate per request; flat at one size rules out nothing at another.",
)


def text(summary: Summary, environment: Mapping[str, Any]) -> str:
    """Return the whole summary, a line's end at its end."""
    return "\n".join(_lines(summary, environment)) + "\n"


def run_line(repetition: Repetition) -> str:
    """Say in half a line what a run found, under the name of its file."""
    said = [f"{repetition.step.stem}: {repetition.verdict or repetition.why}"]
    if repetition.blocks is not None:
        said.append(f"{_number(repetition.blocks.estimate, 3)} blocks")
    if repetition.bytes is not None:
        said.append(f"{_number(repetition.bytes.estimate, 1)} bytes a call")
    return ", ".join(said)


def case_columns(case: Case) -> str:
    """Return the first columns of a table: mode, elements, offset; a function of the user's has no tensor."""
    elements, offset = (case.tensor_elements, case.offset_bytes) if case.has_tensor else ("-", "-")
    return f"{case.mode:10} {elements:>6} {offset:>6}"


def blocks_text(found: Interval | None) -> str:
    """Format blocks per call: exact to a thousandth."""
    return _interval(found, 3)


def bytes_text(found: Interval | None) -> str:
    """Format bytes per call: to a tenth."""
    return _interval(found, 1)


def environment_lines(environment: Mapping[str, Any]) -> Iterator[str]:
    """Say in a few lines where it was measured."""
    python, packages = environment.get("python") or {}, environment.get("packages") or {}
    named = [f"{name} {(packages.get(name) or {}).get('version') or 'not found'}" for name in ("safetensors", "torch")]
    yield one_line(f"{python.get('implementation')} {python.get('version')} ({python.get('executable')}), {', '.join(named)}")
    cpu, allocator = environment.get("cpu") or {}, (environment.get("allocator") or {}).get("environment") or {}
    said = [
        f"Linux {environment.get('kernel')}",
        str(environment.get("libc") or "C library not known"),
        f"{cpu.get('count')} x {cpu.get('model')}",
    ]
    said.append(f"transparent huge pages {environment.get('transparent_hugepage') or 'not known'}")
    yield one_line(", ".join(said))
    if allocator:
        yield one_line("allocator environment: " + ", ".join(f"{name}={value}" for name, value in allocator.items()))


def _lines(summary: Summary, environment: Mapping[str, Any]) -> Iterator[str]:
    plan = summary.plan
    yield from environment_lines(environment)
    yield (
        f"{plan.iterations} calls a run after {plan.warmup} of warm-up, a sample every {plan.sample_every}, "
        f"{plan.repetitions} repetition{'s' if plan.repetitions != 1 else ''}"
    )
    if summary.interrupted:
        yield f"Interrupted by {summary.interrupted} after {summary.measured} of {len(summary.repetitions)} runs; the same command goes on."
    if any(not row.asked for row in summary.rows):
        yield "The mode reuse was measured too: it is the control of every group."
    yield ""
    yield f"{'mode':10} {'elem':>6} {'offset':>6}  {'begin..end':12} {'#':>2} {'verdict':12}  {'blocks a call':21} bytes a call"
    for row in summary.rows:
        yield from _row(row)
    yield ""
    yield from textwrap.wrap(summary.agreement, COLUMNS)
    totals = summary.to_json()["totals"]
    yield ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in totals.items() if count) + f" of {len(summary.repetitions)} runs"
    if summary.not_measured:
        yield from _not_measured(summary)
    yield from _warnings(summary)
    yield ""
    yield from NOTE


def _row(row: Row) -> Iterator[str]:
    place = "-" if row.place is None else f"{row.place[0]}..{row.place[1]}"
    head = f"{case_columns(row.case)}  {place:12}"
    for entry in row.repetitions:
        figures = f"{blocks_text(entry.blocks):21} {bytes_text(entry.bytes)}"
        yield f"{head} {entry.step.repetition:>2} {entry.verdict or 'not measured':12}  {figures}".rstrip()
        head = " " * len(head)


def _not_measured(summary: Summary) -> Iterator[str]:
    yield "Not measured:"
    by_reason: dict[str, list[str]] = {}
    for entry in summary.not_measured:
        by_reason.setdefault(entry.why or "", []).append(entry.step.stem)
    for why, stems in by_reason.items():
        shown = ", ".join(stems[:6]) + (f" and {len(stems) - 6} more" if len(stems) > 6 else "")
        yield from textwrap.wrap(f"{why}: {shown}", COLUMNS, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _warnings(summary: Summary) -> Iterator[str]:
    """Say each kind of warning once; what names processes or figures stands behind its colon, in the files of the runs."""
    by_kind: dict[str, list[str]] = {}
    for entry in summary.repetitions:
        for warning in entry.warnings:
            by_kind.setdefault(one_line(warning.partition(":")[0]), []).append(entry.step.stem)
    for kind, stems in by_kind.items():
        where = f"{len(stems)} runs" if len(stems) > 1 else stems[0]
        yield f"warning ({where}): {kind}"


def _interval(found: Interval | None, decimals: int) -> str:
    if found is None:
        return "-"
    return f"{_number(found.estimate, decimals)} [{_number(found.low, decimals)}, {_number(found.high, decimals)}]"


def _number(value: float, decimals: int) -> str:
    shown = f"{value:.{0 if abs(value) >= 1000 else decimals}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown  # no -0.000
