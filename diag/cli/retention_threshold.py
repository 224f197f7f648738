"""Find where blocks per call change along one axis: `hwr-diag retention matrix --find-threshold`.

Owns the range, the short runs and the report of the steps. Promises both sides of each step with the absolute place of the tensor in the
file, each measured twice, and a span of the journal for each run. Refuses an answer where the interpreter does not count blocks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diag.cli.retention_matrix import request_of
from diag.cli.retention_process import likeness_of, process_of
from diag.probes.child import Stop, stoppable
from diag.probes.matrix import Case, Plan, Step
from diag.probes.threshold import MAX_POINTS, Axis, Found, Point, find
from diag.probes.threshold import Step as Threshold
from diag.report.streams import Progress
from hwr.errors import Unavailable
from hwr.units import one_line

_DEFAULTS = {Axis.ELEMENTS: (1, 4096), Axis.OFFSET: (0, 4096)}
_ITERATIONS = 10_000
_LEAST_ITERATIONS = 3_000  # 256 blocks, which two readings cannot tell apart (diag.analysis.retention), are a twelfth of a block then


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Search, report, and return the exit status."""
    from diag.report.document import document, print_document
    from diag.report.streams import out

    axis = Axis(arguments.find_threshold)
    low, high, other = _range(parser, arguments, axis)
    with stoppable() as stop, tempfile.TemporaryDirectory(prefix="hwr-diag-") as scratch:
        plan = _plan(parser, arguments, axis, other)
        with Progress(quiet=arguments.quiet) as progress:
            search = _Search(plan, axis, Path(scratch), stop, progress)
            found = find(axis, low, high, search.measure)
        told = document("retention threshold", _findings(found, plan), **_facts(found, plan, search))
        if arguments.output is not None:
            _write(arguments.output, told)
        if arguments.json:
            print_document(told)
        else:
            out("\n".join(_lines(found, plan, search)))
    return stop.exit_code or _exit(found, search)


class _Search:
    """Measures values of the axis; keeps what every run tells alike."""

    def __init__(self, plan: Plan, axis: Axis, scratch: Path, stop: Stop, progress: Progress) -> None:
        self.plan, self.axis, self.scratch, self.stop, self.progress = plan, axis, scratch, stop, progress
        self.runs = 0
        self.facts: Mapping[str, Any] = {}
        self.exit_code: int | None = None

    def measure(self, value: int) -> Point | Unavailable:
        """Measure one value in a fresh process."""
        from diag.cli.retention_measuring import measured
        from diag.probes.retention import Status, exit_code_of
        from diag.report.streams import PROGRAM

        if self.stop.signal:
            return Unavailable(f"interrupted by {self.stop.name}")
        elements, offset = self.plan.tensor_elements[0], self.plan.offset_bytes[0]
        case = Case(self.plan.modes[0], value, offset) if self.axis is Axis.ELEMENTS else Case(self.plan.modes[0], elements, value)
        self.runs += 1
        samples = self.scratch / f"{self.runs}.samples.jsonl"
        run = measured(request_of(self.plan, Step(case, self.runs)), samples, self.progress, self.stop, control=False)
        self.facts = run
        if run["ending"]["status"] != Status.ENDED:
            self.exit_code = exit_code_of(run)
            return Unavailable(one_line(f"{run['ending']['status']}: {run['ending']['message'] or 'no message'}"))
        blocks = run["analysis"]["blocks_per_call"]
        if blocks is None:
            return Unavailable("this interpreter counts no blocks (PYTHONMALLOC=malloc, or not CPython); they are what is bisected")
        place = run.get("file") or {}
        self.progress.tell(f"{PROGRAM}: {self.axis} {value}: {blocks['estimate']:.3f} blocks a call ({self.runs} runs)", lasting=True)
        return Point(value, float(blocks["estimate"]), place.get("begin"), place.get("end"))


def _range(parser: argparse.ArgumentParser, arguments: argparse.Namespace, axis: Axis) -> tuple[int, int, int]:
    """Return low and high of the axis, and the one value of the other."""
    given = {Axis.ELEMENTS: arguments.tensor_elements, Axis.OFFSET: arguments.offset_bytes}
    flags = {Axis.ELEMENTS: "--tensor-elements", Axis.OFFSET: "--offset-bytes"}
    ends = given[axis] or _DEFAULTS[axis]
    if len(ends) != 2 or ends[0] >= ends[1]:
        parser.error(f"{flags[axis]} is the range of the search: LOW,HIGH")
    other = Axis.OFFSET if axis is Axis.ELEMENTS else Axis.ELEMENTS
    values = given[other] or ((64,) if other is Axis.ELEMENTS else (0,))
    if len(values) != 1:
        parser.error(f"{flags[other]} takes one value while {axis} is searched")
    return ends[0], ends[1], values[0]


def _plan(parser: argparse.ArgumentParser, arguments: argparse.Namespace, axis: Axis, other: int) -> Plan:
    if arguments.call is not None:
        parser.error("--call belongs to a matrix; a function of yours has no size and no offset to search along")
    if arguments.attribute:
        parser.error("--attribute belongs to a matrix; a search counts blocks only")
    process = process_of(arguments)
    iterations = arguments.iterations or _ITERATIONS
    if iterations < _LEAST_ITERATIONS:
        parser.error(f"--iterations {iterations}: with less than {_LEAST_ITERATIONS} calls, bookkeeping hides a tenth of a block")
    return Plan(
        modes=(arguments.mode or "get_tensor",),
        tensor_elements=(1 if axis is Axis.ELEMENTS else other,),
        offset_bytes=(0 if axis is Axis.OFFSET else other,),
        repetitions=1,
        iterations=iterations,
        sample_every=arguments.sample_every or max(1, iterations // 10),
        warmup=arguments.warmup,
        header_bytes=arguments.header_bytes,
        tensors=arguments.tensors,
        python=process["python"],
        cpu=process["cpu"],
        like=arguments.like,
        likeness=likeness_of(process),
        timeout_seconds=arguments.timeout,
        attribute=False,
    )


def _facts(found: Found, plan: Plan, search: _Search) -> dict[str, Any]:
    facts = {name: search.facts.get(name) for name in ("python", "safetensors", "torch", "executable", "kernel")}
    asked = {"mode": plan.modes[0], "iterations": plan.iterations, "warmup": plan.warmup, "header_bytes": plan.header_bytes}
    fixed = {"offset_bytes": plan.offset_bytes[0]} if found.axis is Axis.ELEMENTS else {"tensor_elements": plan.tensor_elements[0]}
    return {"environment": facts, "arguments": {**asked, **fixed}, "runs": search.runs, **found.to_json()}


def _findings(found: Found, plan: Plan) -> list[Any]:
    from diag.report.findings import Finding

    said = []
    if found.problem is None and found.retained:
        most = max(point.blocks_per_call for point in found.points)
        text = f"up to {most:.3f} blocks a call are retained; {len(found.steps)} thresholds in {found.axis} {found.low} to {found.high}"
        said.append(
            Finding(code="retained", subject=plan.modes[0], text=text, evidence={"thresholds": [step.to_json() for step in found.steps]})
        )
    return said


def _lines(found: Found, plan: Plan, search: _Search) -> Iterator[str]:
    facts = search.facts
    yield one_line(
        f"Python {facts.get('python')} ({facts.get('executable')}), safetensors {facts.get('safetensors')}, torch {facts.get('torch')}"
    )
    held = f"offset {plan.offset_bytes[0]}" if found.axis is Axis.ELEMENTS else f"{plan.tensor_elements[0]} elements"
    yield f"{plan.modes[0]}, {held}, {found.axis} {found.low} to {found.high}: {plan.iterations} calls a run, {search.runs} runs"
    yield ""
    if found.steps:
        yield f"{'':6} {found.axis:>8}  {'blocks a call':>13}  {'again':>7}  {'begin':>8}  {'end':>8}"
        for step in found.steps:
            yield from _step(step)
        yield ""
        yield "begin and end are the absolute place of the tensor in the file, in bytes."
    elif found.problem is None:
        first = found.points[0].blocks_per_call
        yield f"No threshold: {first:.3f} blocks a call at both ends."
    if found.problem is not None:
        yield f"Inconclusive: {found.problem}."
    else:
        yield "Between two values with the same figure it was not looked further: a step up and back down there is not seen."
    if len(found.points) >= MAX_POINTS:
        yield f"{len(found.points)} values were measured, which is the most that a search measures."


def _step(step: Threshold) -> Iterator[str]:
    again = step.again or (None, None)
    for name, point, second in (("below", step.below, again[0]), ("at", step.at, again[1])):
        place = "  ".join(f"{'-' if value is None else value:>8}" for value in (point.begin, point.end))
        repeated = "-" if second is None else f"{second:.3f}"
        yield f"{name:6} {point.value:>8}  {point.blocks_per_call:>13.3f}  {repeated:>7}  {place}"


def _exit(found: Found, search: _Search) -> int:
    from diag.report.exits import Exit

    if found.problem is not None:
        return search.exit_code or int(Exit.NOT_MEASURED)
    return int(Exit.FINDINGS if found.retained else Exit.FINE)


def _write(directory: Path, told: Mapping[str, Any]) -> None:
    """Write the object into the directory; a search is not resumed, so the file is replaced."""
    from diag.cli.retention_directory import made
    from diag.report.document import write_document

    made(directory)
    write_document(directory / f"threshold-{told['arguments']['mode']}-{told['axis']}.json", told)
