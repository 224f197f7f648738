"""Measure cases x element counts x offsets x repetitions, each in a fresh process; or find where a figure changes along an axis.

Owns the arguments and the order of work. Promises one whole file a run, a summary that is true however the matrix ended, and that the same
command in the same directory goes on where it stopped. Refuses a directory that was begun with other arguments or in another environment.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from diag.cli.retention_run import add_process_arguments
from diag.cli.values import call, path, seconds, whole, wholes, word

TYPE_CHECKING = False  # what typing calls so; help and usage errors do without what the work needs
if TYPE_CHECKING:
    from typing import Any

    from diag.cli.retention_directory import MatrixDirectory
    from diag.probes.child import Stop
    from diag.probes.matrix import Plan, Step
    from diag.probes.retention import Request
    from diag.report.streams import Progress

MODES = ("get_tensor", "get_slice", "load_file", "reopen", "reuse", "hwr_lease")  # diag.probes.matrix; a test holds the two together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--modes", type=_modes, metavar="M,…", help=f"cases (default: {','.join(MODES)}; call with --call)")
    what.add_argument("--tensor-elements", type=wholes(1), metavar="N,…", help="float32 elements (default: 16,64,4096)")
    what.add_argument("--offset-bytes", type=wholes(0), metavar="N,…", help="where the tensor begins in the data section (default: 0,4000)")
    what.add_argument("--header-bytes", type=whole(8, multiple=8), metavar="N", help="length of the header, a multiple of 8")
    what.add_argument("--tensors", type=whole(1), metavar="N", help="tensors in the file of mode reopen (default: 64)")
    what.add_argument("--call", type=call, metavar="FILE.py:FUNCTION", help="what mode call calls; MODULE:FUNCTION on PYTHONPATH too")
    what.add_argument("--repetitions", type=whole(1), default=2, metavar="N", help="runs of each case, far apart in time (default: 2)")
    what.add_argument("--iterations", type=whole(1), metavar="N", help="calls a run (default: 20000; 10000 to find a threshold)")
    what.add_argument("--sample-every", type=whole(1), metavar="N", help="calls between samples (default: a tenth of the calls)")
    what.add_argument("--warmup", type=whole(1), default=1000, metavar="N", help="calls before the baseline (default: 1000)")
    add_process_arguments(parser)
    what.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="seconds for a run (default: 120)")
    what.add_argument(
        "--attribute", action="store_true", help="record with memray where what stays was allocated; slow, memory is not comparable"
    )
    out = parser.add_argument_group("what comes of it")
    out.add_argument("-o", "--output", type=path, metavar="DIR", help="the matrix's directory, new, empty, or of the same matrix before")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--run-dir", type=word, metavar="DIR", help="directory of journals (default: HWR_RUN_DIR, or the node's own)")
    out.add_argument("--quiet", action="store_true", help="no progress on standard error")
    threshold = parser.add_argument_group(
        "threshold",
        "Bisect one axis for where blocks per call change, in short runs of one mode. The axis takes LOW,HIGH, the other one value.",
    )
    threshold.add_argument("--find-threshold", choices=("elements", "offset"), metavar="AXIS", help="elements or offset")
    threshold.add_argument("--mode", choices=MODES, metavar="M", help="the mode of the bisection (default: get_tensor)")
    parser.set_defaults(command=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Do what was asked, and return the exit status."""
    from hwr import telemetry
    from hwr.ending import telemetry_wanted
    from hwr.outcomes import Role

    work = _matrix
    if arguments.find_threshold is not None:
        if arguments.modes is not None:
            parser.error("--find-threshold takes one mode: --mode M")
        from diag.cli.retention_threshold import run as work
    elif arguments.mode is not None:
        parser.error("--mode belongs to --find-threshold; a matrix takes --modes M,…")
    elif arguments.output is None:
        parser.error("the following arguments are required: -o/--output")
    telemetry.configure(telemetry_wanted(None), arguments.run_dir, role=Role.TOOL)
    status = work(parser, arguments)
    telemetry.close()
    return status


def request_of(plan: Plan, step: Step) -> Request:
    """Return the request of one run."""
    from diag.probes.matrix import CALL
    from diag.probes.retention import Request

    likeness = plan.likeness or {}
    return Request(
        mode=step.case.mode,
        tensor_elements=step.case.tensor_elements,
        offset_bytes=step.case.offset_bytes,
        iterations=plan.iterations,
        sample_every=plan.sample_every,
        warmup=plan.warmup,
        header_bytes=plan.header_bytes,
        tensors=plan.tensors,
        call=plan.call if step.case.mode == CALL else None,
        python=plan.python,
        cpu=plan.cpu,
        timeout_seconds=plan.timeout_seconds,
        environment=dict(likeness.get("environment") or {}),
        attribute=plan.attribute and not step.is_control,
        like=plan.likeness,
    )


def _matrix(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from diag.cli.retention_directory import MatrixDirectory
    from diag.cli.retention_process import child_environment, likeness_of, process_of
    from diag.probes.child import stoppable
    from diag.probes.environment import binding, call_digest, describe
    from diag.probes.matrix import CALL, ELEMENTS, MAX_RUNS, OFFSETS, Plan, runs_of
    from diag.probes.repository import snapshot
    from diag.report.streams import Progress, note
    from hwr.errors import OptionError, Unavailable

    modes = arguments.modes or MODES
    elements, offsets = arguments.tensor_elements or ELEMENTS, arguments.offset_bytes or OFFSETS
    if (CALL in modes) != (arguments.call is not None):
        parser.error("mode call and --call FILE.py:FUNCTION go together")
    runs = runs_of(modes, len(elements) * len(offsets), arguments.repetitions)
    if runs > MAX_RUNS:
        parser.error(f"that would be {runs} runs; at most {MAX_RUNS}")
    with stoppable() as stop, MatrixDirectory.locked(arguments.output) as directory:
        process = process_of(arguments, directory.written_plan())
        python, environment = process["python"], describe(process["python"], child_environment(process))
        if isinstance(environment, Unavailable):
            raise OptionError(option=f"--python {python}", problem=environment.reason, remedy="Say another interpreter.")
        iterations = arguments.iterations or 20_000
        plan = Plan(
            modes=tuple(modes),
            tensor_elements=elements,
            offset_bytes=offsets,
            repetitions=arguments.repetitions,
            iterations=iterations,
            sample_every=arguments.sample_every or max(1, iterations // 10),
            warmup=arguments.warmup,
            header_bytes=arguments.header_bytes,
            tensors=arguments.tensors,
            call=arguments.call,
            call_sha256=call_digest(arguments.call),
            python=python,
            cpu=process["cpu"],
            like=arguments.like,
            likeness=likeness_of(process),
            timeout_seconds=arguments.timeout,
            attribute=arguments.attribute,
            environment=binding(environment),
        )
        resumed = directory.adopt(plan, environment)
        for sentence in snapshot(directory.path):
            note(sentence)
        with Progress(quiet=arguments.quiet) as progress:
            found = _measured(directory, plan, stop, progress, resumed=resumed)
        return _told(directory, plan, environment, found, stop, as_json=arguments.json)


def _measured(directory: MatrixDirectory, plan: Plan, stop: Stop, progress: Progress, *, resumed: bool) -> dict[str, dict[str, Any]]:
    """Measure what is not there yet, until the end or a signal; return the runs by the stems of their names."""
    from diag.report.retention_matrix_summary import repetition_of
    from diag.report.retention_matrix_text import run_line
    from diag.report.streams import PROGRAM
    from hwr.units import seconds_text

    steps = plan.steps()
    kept = {step.stem: run for step in steps if (run := directory.kept(step, plan)) is not None} if resumed else {}
    if resumed:
        progress.tell(f"{PROGRAM}: {len(kept)} of {len(steps)} runs are there already", lasting=True)
    runs, spent = dict(kept), _Spent(steps, kept)
    for number, step in enumerate(steps, start=1):
        if step.stem in kept:
            if step.control_stem in runs.keys() - kept.keys():  # its control was measured again: what it was judged against is gone
                directory.finish(step, against_control(runs[step.stem], step, runs))
            continue
        if stop.signal:
            break
        begun = time.monotonic()
        progress.tell(f"{PROGRAM}: {number}/{len(steps)} {step.case}, repetition {step.repetition}")
        run = _one(directory, plan, step, stop, runs, progress)
        if stop.exit_code and not run["complete"]:
            break  # its samples stay; the next start measures it again
        runs[step.stem] = run
        directory.finish(step, run)
        spent.took(step, time.monotonic() - begun)
        left = spent.left()
        rest = f", {seconds_text(left)} left" if left else ""
        progress.tell(f"{PROGRAM}: {number}/{len(steps)} {run_line(repetition_of(step, run))}{rest}", lasting=True)
    return runs


def _one(
    directory: MatrixDirectory, plan: Plan, step: Step, stop: Stop, runs: Mapping[str, Mapping[str, Any]], progress: Progress
) -> dict[str, Any]:
    """Measure and judge one run."""
    from diag.cli.retention_measuring import measured

    against = runs.get(step.control_stem or "")
    run = measured(request_of(plan, step), directory.samples(step), progress, stop, control=False, against=against)
    return against_control(run, step, runs)


def against_control(run: dict[str, Any], step: Step, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Judge a run of the matrix against its control among `runs`, and name the control's file in it."""
    from diag.analysis.retention import judge

    run["control_file"] = None
    control = runs.get(step.control_stem or "")
    if control is not None and run["complete"]:
        run["control_file"] = f"{step.control_stem}.json"
        if control["complete"]:
            run["analysis"] = judge(run, control).to_json()
        else:
            run["warnings"].append(f"the control was not measured: {control['ending']['status']}")
    return run


def _told(
    directory: MatrixDirectory,
    plan: Plan,
    environment: Mapping[str, Any],
    runs: Mapping[str, Mapping[str, Any]],
    stop: Stop,
    *,
    as_json: bool,
) -> int:
    """Write the summary, print it, and return the exit status."""
    from diag.cli.retention_directory import ENVIRONMENT, SUMMARY, SUMMARY_TEXT
    from diag.probes.retention import exit_code_of
    from diag.report.document import document, print_document
    from diag.report.exits import Exit, combined
    from diag.report.retention_matrix_summary import summarize
    from diag.report.retention_matrix_text import text
    from diag.report.streams import out
    from hwr.units import printable

    summary = summarize(plan, runs, interrupted=stop.name if stop.signal else None)
    told = document(
        "retention matrix", summary.findings(), directory=printable(str(directory.path)), environment_file=ENVIRONMENT, **summary.to_json()
    )
    shown = text(summary, environment)
    directory.write(SUMMARY, told)
    directory.write_text(SUMMARY_TEXT, shown)
    if as_json:
        print_document(told)
    else:
        out(shown.rstrip("\n"))
    if stop.signal:
        return stop.exit_code
    missing = [Exit.NOT_MEASURED] if len(runs) < len(plan.steps()) else []
    return combined([*map(exit_code_of, runs.values()), *missing])


class _Spent:
    """How long runs took, and what that says of the rest: a mode's own mean, else the mean of all."""

    def __init__(self, steps: Sequence[Step], kept: Mapping[str, Mapping[str, Any]]) -> None:
        self._open = {step.stem: step.case.mode for step in steps if step.stem not in kept}
        self._seconds: dict[str, list[float]] = {}
        for run in kept.values():
            seconds = (run.get("run") or {}).get("seconds")
            if isinstance(seconds, int | float):
                self._seconds.setdefault(run["arguments"]["mode"], []).append(float(seconds))

    def took(self, step: Step, seconds: float) -> None:
        """Note that a run ended."""
        self._open.pop(step.stem, None)
        self._seconds.setdefault(step.case.mode, []).append(seconds)

    def left(self) -> float:
        """Estimate the seconds of what is still to be measured."""
        every = [seconds for of_mode in self._seconds.values() for seconds in of_mode]
        if not every:
            return 0.0
        mean = sum(every) / len(every)
        return sum(sum(found) / len(found) if (found := self._seconds.get(mode)) else mean for mode in self._open.values())


def _modes(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(","))
    unknown = [word for word in found if word not in (*MODES, "call")]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(MODES)}, call")
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a mode twice")
    return found
