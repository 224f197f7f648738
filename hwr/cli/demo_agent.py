"""The node agent in the demo: started as a child, scraped as Prometheus would, and what it saw in a few lines.

Owns the child and the lines. Promises figures from the scraped text alone, and an agent that ends with the demo. Refuses to import the node
side: the runtime does not know who looks at it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from hwr.errors import Unavailable
from hwr.units import bytes_text

STARTED_SECONDS: Final = 30.0
# The agent looks once a second, and at the page cache of what is leased every 15.
SEEN_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class AgentChild:
    """A running agent: where it answers."""

    url: str

    @property
    def metrics(self) -> str:
        """Where a scraper looks."""
        return f"{self.url}/metrics"


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@contextlib.contextmanager
def agent(run_dir: Path, root: Path, environ: Mapping[str, str]) -> Iterator[AgentChild | Unavailable]:
    """Run an agent over these two directories; it ends with the block, whatever ends that."""
    command = [sys.executable, "-m", "diag.node", "--run-dir", str(run_dir), "--root", str(root), "--port", "0"]
    told = run_dir / "agent.json"
    told.unlink(missing_ok=True)
    own = {name: value for name, value in environ.items() if name not in ("HWR_RUN_ID", "HWR_RUN_DIR")}
    with subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            yield _listening(child, told)
        finally:
            child.terminate()


def seen(child: AgentChild, ready: Callable[[Series], bool] | None = None) -> Series | Unavailable:
    """Scrape until the agent has seen what the demo is about; what it has at the end of the time otherwise."""
    until = time.monotonic() + SEEN_SECONDS
    wanted = ready or _has_seen
    while True:
        try:
            with urllib.request.urlopen(child.metrics, timeout=10) as answer:
                series = _series(answer.read().decode())
        except OSError as error:
            return Unavailable(str(error))
        if wanted(series) or time.monotonic() > until:
            return series
        time.sleep(_POLL_SECONDS)


def lines(series: Series) -> Iterator[str]:
    """Yield what the agent saw, a line a worker and a line an artifact."""
    for engine, rank in sorted({(dict(labels)["engine"], dict(labels)["rank"]) for name, labels in series if name == "hwr_worker_up"}):
        of = {"engine": engine, "rank": rank}
        words = [
            "up" if _value(series, "hwr_worker_up", **of) else "gone",
            _state(series, "hwr_worker_phase", of),
            f"stall {_state(series, 'hwr_worker_stall', of)}",
            f"transport {_state(series, 'hwr_transport', of)}",
            f"{_bytes(series, 'hwr_process_rss_bytes', kind='anon', **of)} anonymous",
            f"{_bytes(series, 'hwr_process_rss_bytes', kind='file', **of)} of files",
        ]
        yield f"  worker {engine}/{rank}: {', '.join(words)}"
    for key in sorted({dict(labels)["artifact"] for name, labels in series if name == "hwr_artifact_page_cache_bytes"}):
        anonymous = [
            value for (name, labels), value in series.items() if name == "hwr_artifact_anonymous_bytes" and ("artifact", key) in labels
        ]
        diverged = f", {bytes_text(sum(anonymous))} of it diverged from the file" if anonymous else ""
        yield f"  artifact {key}: {_bytes(series, 'hwr_artifact_page_cache_bytes', artifact=key)} in the page cache{diverged}"


def _listening(child: subprocess.Popen[bytes], told: Path) -> AgentChild | Unavailable:
    until = time.monotonic() + STARTED_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, KeyError):
            value: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
            if value["pid"] == child.pid:
                return AgentChild(str(value["url"]))
        if child.poll() is not None:
            return Unavailable(f"the agent ended with status {child.returncode}")
        time.sleep(_POLL_SECONDS)
    return Unavailable("the agent does not say where it listens")


def _has_seen(series: Series) -> bool:
    names = {name for name, _ in series}
    return {"hwr_worker_up", "hwr_worker_stall", "hwr_artifact_page_cache_bytes"} <= names


def _series(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, tuple(sorted(labels.items()))))


def _bytes(series: Series, name: str, **labels: str) -> str:
    value = _value(series, name, **labels)
    return "-" if value is None else bytes_text(value)


def _state(series: Series, name: str, of: Mapping[str, str]) -> str:
    for (found, labels), value in series.items():
        if found == name and value and set(of.items()) <= set(labels):
            return dict(labels)[name]
    return "-"
