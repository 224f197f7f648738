"""A real agent in a process of its own, and plain workers that do what their test says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DEADLINE_SECONDS = 60.0
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# A worker: telemetry, then one Python statement a line from standard input, each answered by a line.
WORKER = """
import os, sys, time
from hwr import telemetry
from hwr.telemetry import events as E
from hwr.outcomes import *
telemetry.configure(run_dir=sys.argv[1], engine=sys.argv[2], rank=int(sys.argv[3]))
place = {"telemetry": telemetry, "E": E, "os": os, "sys": sys, "time": time, **{n: v for n, v in globals().items() if n[0].isupper()}}
print(os.getpid(), flush=True)
for line in sys.stdin:
    exec(line, place)
    print("done", flush=True)
"""


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: did not come true in {seconds} s"
        time.sleep(0.02)  # a poll, with the deadline above
    return value


def get(url: str, headers: Mapping[str, str] | None = None, timeout: float = 30) -> tuple[int, bytes]:
    """Return status and body, whatever the status is."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def series_of(text: str) -> Series:
    """Return every sample of an exposition; one that stands twice fails here, as a scraper would drop it silently."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


class Agent:
    """A running agent."""

    def __init__(self, run_dir: Path, *arguments: str, environ: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        command = [*prefix, sys.executable, "-m", "diag.node", "--run-dir", str(run_dir), "--port", "0", *arguments]
        own = {name: value for name, value in os.environ.items() if not name.startswith("HWR_")}
        (run_dir / "agent.json").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            command, env={**own, **(environ or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        told = until(self._told, "the agent says where it listens")
        self.url: str = told["url"]
        self.pid: int = told["pid"]

    def _told(self) -> dict[str, Any] | None:
        assert self.process.poll() is None, self.process.communicate()
        with contextlib.suppress(OSError, ValueError):
            value: dict[str, Any] = json.loads((self.run_dir / "agent.json").read_text())
            return value
        return None

    def metrics(self) -> Series:
        status, body = get(f"{self.url}/metrics")
        assert status == 200, body
        return series_of(body.decode())

    def startupz(self) -> dict[str, Any]:
        status, body = get(f"{self.url}/startupz")
        assert status == 200, body
        value: dict[str, Any] = json.loads(body)
        return value

    def snapshot(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(get(f"{self.url}/snapshot")[1])
        return value

    def ready(self) -> Agent:
        until(lambda: get(f"{self.url}/readyz")[0] == 200, "the agent is ready")
        return self

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; return its status and what it had to say."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, err


class PlainWorker:
    """A process with a journal that runs statements."""

    def __init__(
        self, run_dir: Path, rank: int = 0, engine: str = "default", run_id: str = "run", prefix: Sequence[str] = (), code: str = WORKER
    ) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith("HWR_")}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, str(run_dir), engine, str(rank)],
            env={**own, "HWR_RUN_ID": run_id},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ns_pid = int(self.process.stdout.readline())

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, statement: str) -> None:
        """Run one statement and wait until it has run."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self, number: int | None = None) -> None:
        """End it: in order, or by a signal."""
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.wait(DEADLINE_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def running() -> Iterator[list[Agent | PlainWorker]]:
    """End whatever was put into the list, stopped ones too."""
    started: list[Agent | PlainWorker] = []
    try:
        yield started
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)
                one.process.kill()
            one.process.wait(DEADLINE_SECONDS)
            for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
