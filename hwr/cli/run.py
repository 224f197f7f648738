"""`hwr run`: load a model the way a server would, say how, run it.

Owns the command line, the ranks, and the report. Promises that with one rank this very process is the worker, and that with several
each gets the same options object, value for value, the given ones and their origins included (R2).
Refuses to run with options that this version does not have; `--print-config` shows them all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hwr.cli.arguments import add_options, composed
from hwr.cli.children import forwarding
from hwr.cli.print_config import print_config
from hwr.cli.values import one_dtype, present, whole
from hwr.cli.worker import Work, run_work
from hwr.ending import ended
from hwr.errors import OptionError
from hwr.options import Options, misspelt_variables
from hwr.telemetry import rundir
from hwr.units import printable

LAST_PORT = 65535


def add_command(commands: Any) -> None:
    """Add `run` to the commands."""
    parser = commands.add_parser("run", help="load a model, report how, run forward passes", description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", metavar="MODEL_DIR", type=present, help="directory of a checkpoint: config.json and safetensors weights")
    parser.add_argument("--dtype", metavar="DTYPE", help="load in this dtype (default: as the library would)")
    parser.add_argument("--steps", metavar="N", help="forward passes on synthetic input (default: 1 where input can be derived)")
    parser.add_argument("--ranks", metavar="N", default="1", help="independent processes to start (default: 1, this one)")
    parser.add_argument("--hold", action="store_true", help="stay up after the last step, until a signal")
    parser.add_argument("--print-config", action="store_true", help="print every option, its value and where it came from, for each rank")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object a rank")
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), help="show the log projection on standard error")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    add_options(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run it."""
    options = composed(arguments)
    ranks = whole("--ranks", arguments.ranks, least=1)
    steps = None if arguments.steps is None else whole("--steps", arguments.steps, least=0)
    work = Work(
        model=arguments.model,
        dtype=one_dtype(arguments.dtype),
        steps=steps,
        hold=arguments.hold,
        as_json=arguments.json,
        quiet=arguments.quiet,
        log_level=arguments.log_level,
        print_config=arguments.print_config,
        rank=None if ranks == 1 else 0,
    )
    port = options.telemetry.metrics_port
    if port and port + ranks - 1 > LAST_PORT:
        raise OptionError(
            option="--metrics-port", problem=f"{port} leaves no port for rank {ranks - 1}", remedy="Each rank adds its number."
        )
    if not arguments.print_config:
        for name, near in misspelt_variables(os.environ).items():
            print(f"hwr: note: {printable(name)} is no option; did you mean {near}?", file=sys.stderr)
    if ranks == 1:
        if arguments.print_config:
            print_config(options, as_json=arguments.json)
            return 0
        return ended(lambda: run_work(work, options), enabled=options.telemetry.enabled)
    return _run_ranks(work, options, ranks)


def _run_ranks(work: Work, options: Options, ranks: int) -> int:
    """Start one process a rank, hand each its work, and return the worst exit status."""
    environ = dict(os.environ)
    environ["HWR_RUN_ID"] = rundir.run_id(environ)  # one run, many ranks
    children: list[subprocess.Popen[str]] = []
    with forwarding(children) as stop:
        for rank in range(ranks):
            child = subprocess.Popen(
                [sys.executable, "-m", "hwr.cli.worker"],
                stdin=subprocess.PIPE,
                env={**environ, "HWR_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                text=True,
            )
            children.append(child)
            if stop.signal:  # it came between the start of the child and its place in the list
                child.send_signal(stop.signal)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already; its status says how
                child.stdin.write(json.dumps({"work": work.for_rank(rank), "options": options.to_json()}))
                child.stdin.close()
        statuses = _ended(children)
    return max((128 - status if status < 0 else status for status in statuses), default=0)


def _ended(children: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Wait for all, and tell of each that ends badly when it does: the others go on, and may hold for hours."""
    left = {child.pid: rank for rank, child in enumerate(children)}
    while left:
        told = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        rank = left.pop(told.si_pid, None) if told is not None else None
        if rank is None:
            break  # a child that is not ours: wait for ours in order
        if status := children[rank].wait():
            others = ", ".join(f"{rank} (pid {pid})" for pid, rank in left.items())
            still = f"; still running: rank {others}" if others else ""
            print(f"hwr: rank {rank} ended with status {status}{still}", file=sys.stderr, flush=True)
    return [child.wait() for child in children]
