"""Measure one case in a fresh process, with a control in another, and judge what stays.

Owns the arguments, the files of `-o DIR` and the ending. Promises that what was measured before a signal is
written and printed, that a refused argument is two lines and no report, and the whole run object with `--json`.
Refuses to call anything a finding that was not measured whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from diag.cli.values import path, seconds, whole, word
from diag.probes.retention import Request

MODES: Final = {
    "get_tensor": "one open file, get_tensor each time",
    "get_slice": "one open file, get_slice and the whole slice each time",
    "reopen": "open a file of many tensors, read one, close",
    "load_file": "safetensors.torch.load_file each time",
    "reuse": "one view, looked up each time: the control",
    "call": "a function of yours (--call)",
    "hwr_lease": "acquire and release a lease of our own store",
}
_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(Request)}
# argparse's own words, from the probe.
_REFUSED: Final = re.compile(r": error: (?:argument (--[a-z-]+)[^:]*: )?(.*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.formatter_class = argparse.RawTextHelpFormatter
    known = "\n".join(f"  {name:10} {text}" for name, text in MODES.items())
    parser.add_argument("--mode", required=True, choices=MODES, metavar="MODE", help=f"how a tensor is come by:\n{known}")
    for name, least, text in (
        ("tensor_elements", 1, "float32 elements of the tensor"),
        ("iterations", 1, "measured calls"),
        ("sample_every", 1, "calls between samples"),
        ("warmup", 1, "calls before the baseline"),
        ("offset_bytes", 0, "where the tensor begins in the data section"),
    ):
        what = f"{text} (default: {_DEFAULTS[name]})"
        parser.add_argument(_flag(name), type=whole(least), default=_DEFAULTS[name], metavar="N", help=what)
    parser.add_argument(
        "--header-bytes",
        type=whole(8, multiple=8),
        metavar="N",
        help="length of the file's header, a multiple of 8 (default: 160, or what it needs)",
    )
    parser.add_argument("--tensors", type=whole(1), metavar="N", help="tensors in the file of mode reopen (default: 64)")
    parser.add_argument(
        "--call", metavar="FILE.py:FUNCTION", help="what mode call calls, without arguments; MODULE:FUNCTION on PYTHONPATH too"
    )
    add_process_arguments(parser)
    parser.add_argument(
        "--timeout", type=seconds, default=_DEFAULTS["timeout_seconds"], metavar="S", help="seconds for each process (default: 120)"
    )
    parser.add_argument("--no-control", action="store_true", help="do not measure the control (mode reuse) after it")
    parser.add_argument(
        "--attribute", action="store_true", help="record with memray where what stays was allocated; slower, memory differs"
    )
    parser.add_argument("-o", "--output", metavar="DIR", type=path, help="keep the run object and the repository's state there")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the run, its control and its analysis")
    parser.add_argument("--run-dir", type=word, metavar="DIR", help="directory of journals (default: HWR_RUN_DIR, or the node's own)")
    parser.set_defaults(command=run)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what decides the process that measures."""
    parser.add_argument(
        "--python", type=word, metavar="PATH", help="interpreter of another environment with torch and safetensors (default: this one)"
    )
    parser.add_argument("--cpu", type=word, metavar="LIST", help="processors that it may run on, such as 0,2-3 (default: as here)")
    parser.add_argument(
        "--like", metavar="PID", type=whole(1), help="take interpreter, processors and allocator environment from a live worker"
    )


def process_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request that `add_process_arguments` decides; what is given explicitly wins over `--like`.

    Raises:
        HwrError: the interpreter, the processors or the worker are not usable.
    """
    from diag.probes.interpreter import cpus_of, runnable

    cpu = None if arguments.cpu is None else cpus_of(arguments.cpu)
    if arguments.like is None:
        return {"python": runnable(sys.executable if arguments.python is None else arguments.python), "cpu": cpu}
    from diag.probes.likeness import like

    worker = like(arguments.like, python=None if arguments.python is None else runnable(arguments.python))
    if arguments.python is None:
        runnable(worker.python, option=f"--like {arguments.like}", environment={**os.environ, **worker.environment})
    return {
        "python": worker.python,
        "cpu": worker.cpu_affinity if cpu is None else cpu,
        "environment": worker.environment,
        "like": worker,
    }


def run(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit status."""
    from diag.cli.retention_measuring import measured
    from diag.probes.child import stoppable
    from diag.probes.retention import exit_code_of
    from diag.report.document import print_document, write_document
    from diag.report.retention_text import lines
    from diag.report.streams import Progress, note, out
    from hwr import telemetry
    from hwr.ending import telemetry_wanted
    from hwr.outcomes import Role

    request = request_of(arguments)
    telemetry.configure(telemetry_wanted(None), arguments.run_dir, role=Role.TOOL)
    with stoppable() as stop, _samples(arguments.output, request) as samples:
        if arguments.output is not None:
            from diag.probes.repository import snapshot

            for text in snapshot(arguments.output):
                note(text)
        with Progress() as progress:
            told = measured(request, samples, progress, stop, control=not arguments.no_control)
        if told["ending"]["status"] == "usage":
            _refuse(told)
        try:
            if arguments.output is not None:
                write_document(samples.with_name(samples.name.removesuffix(".samples.jsonl") + ".json"), told)
                samples.unlink(missing_ok=True)
        finally:
            if arguments.json:
                print_document(told)
            else:
                out("\n".join(lines(told)))
    telemetry.close()
    return stop.exit_code or exit_code_of(told)


def request_of(arguments: argparse.Namespace) -> Request:
    """Return what the command line asks for.

    Raises:
        HwrError: the interpreter, the processors or the worker are not usable.
    """
    named = (
        "mode",
        "tensor_elements",
        "iterations",
        "sample_every",
        "warmup",
        "offset_bytes",
        "header_bytes",
        "tensors",
        "call",
        "attribute",
    )
    chosen = {name: getattr(arguments, name) for name in named}
    return Request(**chosen, timeout_seconds=arguments.timeout, **process_of(arguments))


@contextlib.contextmanager
def _samples(directory: Path | None, request: Request) -> Iterator[Path]:
    """Give the path of the samples file: in `directory` under the next free repetition, which is taken by it, or aside."""
    from diag.cli.retention_directory import made, refused
    from diag.probes.matrix import stem
    from diag.probes.retention_files import SAMPLES_SUFFIX
    from hwr.errors import OptionError, errno_text

    if directory is None:
        with tempfile.TemporaryDirectory(prefix="hwr-diag-", ignore_cleanup_errors=True) as aside:
            yield Path(aside) / f"run{SAMPLES_SUFFIX}"
        return
    made(directory)
    try:
        for repetition in itertools.count(1):
            name = stem(request.mode, request.tensor_elements, request.offset_bytes, repetition)
            samples = directory / f"{name}{SAMPLES_SUFFIX}"
            if (directory / f"{name}.json").exists():
                continue
            with contextlib.suppress(FileExistsError):  # another run's, in progress or killed
                os.close(os.open(samples, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                break
    except OSError as error:
        raise refused(directory, errno_text(error)) from error
    try:
        yield samples
    except OptionError:
        samples.unlink(missing_ok=True)  # nothing was measured
        raise


def _refuse(told: Mapping[str, Any]) -> NoReturn:
    from hwr.errors import OptionError

    message = str(told["ending"]["message"])
    found = _REFUSED.search(message)
    option, problem = (found[1], found[2]) if found else (None, message.rpartition("\n")[2])
    raise OptionError(option=option or "arguments", problem=problem, remedy="Try: hwr-diag retention run --help")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
