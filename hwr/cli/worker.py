"""The worker's part of `hwr run`; run as a module it is a spawned rank that reads its work from standard input.

Owns loading, stepping, holding and the report. Promises that a signal while holding ends it in order: phase, lease, exit event.
Refuses to know the other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from hwr import telemetry
from hwr.cli.children import end_with_parent, terminating
from hwr.cli.print_config import print_config
from hwr.cli.progress import shown
from hwr.ending import ended, show_logs, terminated
from hwr.errors import ForwardFailed, NotImplementedYet, Unavailable
from hwr.options import Options, refuse_unimplemented
from hwr.outcomes import LoadStage, Phase
from hwr.report import Report
from hwr.telemetry import events as E
from hwr.telemetry.endpoint import MetricsServer
from hwr.telemetry.failures import record_failure
from hwr.units import bytes_text, printable, seconds_text, short_key
from hwr.usage import open_streams


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker is to do. `rank` is None where there is one only; `steps` None means one step if input can be derived."""

    model: str
    dtype: str | None
    steps: int | None
    hold: bool
    as_json: bool
    quiet: bool
    log_level: str | None
    print_config: bool
    rank: int | None
    parent: int = 0

    def for_rank(self, rank: int) -> dict[str, Any]:
        """Return the work of one rank, started by this process, as JSON values."""
        return asdict(replace(self, rank=rank, parent=os.getpid()))


def run_work(work: Work, options: Options) -> int:
    """Load, run, report, hold; return the exit status. Typed failures are raised."""
    told = options.telemetry
    run_dir = None if told.run_dir is None else str(told.run_dir)
    telemetry.configure(told.enabled, run_dir, told.engine, work.rank)
    refuse_unimplemented(options)
    endpoint = _serve(options, work)
    with terminated(terminating) as stop, shown(quiet=work.quiet) as done_showing:
        from hwr.loader.factory import PretrainedFactory
        from hwr.runtime import load
        from hwr.transport import register_loaded

        quiet_libraries()
        with load(PretrainedFactory(work.model, work.dtype), work.model, options) as loaded:
            digest = None
            try:
                register_loaded(loaded, options)
                if work.steps != 0:
                    digest = _steps(loaded.module, work.steps)
            finally:
                done_showing()
                _print(loaded.report, work, digest, endpoint)
            if work.hold:
                telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))
                while True:
                    signal.pause()
    telemetry.close()
    return stop.exit_code


def main() -> int:
    """Do the work that standard input orders."""
    open_streams()
    order = json.load(sys.stdin)
    work, options = Work(**order["work"]), Options.from_json(order["options"])
    end_with_parent(work.parent)
    show_logs(work.log_level)
    if work.print_config:
        print_config(options, as_json=work.as_json, rank=work.rank)
        return 0
    return ended(lambda: run_work(work, options), enabled=options.telemetry.enabled)


def _serve(options: Options, work: Work) -> MetricsServer | None:
    port = options.telemetry.metrics_port
    if port is None:
        return None
    # One port a rank, by rule: the rank is added; 0 takes a free one each.
    served = telemetry.serve_metrics(port + (work.rank or 0) if port else 0)
    if isinstance(served, Unavailable):
        print(f"hwr: no /metrics: {served.reason}", file=sys.stderr)
        return None
    return served


def _steps(module: Any, steps: int | None) -> str | None:
    from hwr.cli.synthetic import synthetic_input

    try:
        synthetic_input(module)
    except NotImplementedYet as problem:
        if steps is not None:
            raise
        print(f"hwr: {problem.cause}", file=sys.stderr)
        return None
    count = steps or 1
    try:
        return _forward(module, count)
    except ForwardFailed as problem:
        if steps is not None:
            raise
        record_failure(problem, fatal=False)
        print(f"hwr: {problem.cause}", file=sys.stderr)
        return None


def _forward(module: Any, count: int) -> str | None:
    from hwr.cli.synthetic import run_steps

    with (
        telemetry.span(E.StageBegun(stage=LoadStage.FORWARD), stage=LoadStage.FORWARD),
        telemetry.span(E.StepsBegun(steps=count)) as running,
    ):
        digest = run_steps(module, count)
        running.add(steps=count)
    return digest


def _print(report: Report, work: Work, digest: str | None, endpoint: MetricsServer | None) -> None:
    where = telemetry.journal_directory()
    if work.as_json:
        extra = {
            "rank": work.rank,
            "output_sha256": digest,
            "journal": None if where is None else str(where),
            "metrics": None if endpoint is None else endpoint.url,
        }
        _say(json.dumps({"schema_version": 1, **report.to_json(), **extra}))
        return
    rows = [
        ("outcome", report.outcome.value),
        ("mode, validation", f"{report.mode}, {report.validation}"),
        ("artifact", short_key(report.key) if report.key else "-"),
        ("bytes, tensors", f"{bytes_text(report.bytes)}, {report.tensors}" if report.bytes else "-"),
        (
            "seconds",
            f"{seconds_text(report.seconds)}: " + ", ".join(f"{stage} {seconds_text(s)}" for stage, s in report.stage_seconds.items()),
        ),
        ("miss", report.miss),
        ("publication", report.publication and report.publication.value),
        ("failures", "; ".join(f"{a.failure.code}: {a.failure.message.splitlines()[0]}" for a in report.attempts if a.failure) or None),
        ("publication failure", report.publication_failure and report.publication_failure.message.splitlines()[0]),
        ("transport", _transport(report)),
        ("output sha256", digest and digest[:16]),
        ("journal", printable(str(where)) if where is not None else "not written"),
        ("metrics", endpoint and endpoint.url),
    ]
    head = "" if work.rank is None else f"rank {work.rank} "
    _say("\n".join(f"{head}{name + ':':21}{value}" for name, value in rows if value is not None))


def _say(text: str) -> None:
    """Print lines whole: ranks that have just agreed print at the same moment, and `print` may write the last newline apart."""
    print(text + "\n", end="", flush=True)


def _transport(report: Report) -> str:
    if report.registered_bytes:
        return f"{report.transport}, {bytes_text(report.registered_bytes)}"
    why = f": {report.transport_reason}" if report.transport_reason else ""
    return f"{report.transport}{why}" + (f" ({printable(report.transport_detail)})" if report.transport_detail else "")


def quiet_libraries() -> None:
    """Foreign progress bars would tear ours; what they count is in our stages."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging as foreign

        foreign.disable_progress_bar()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main() or 0)
