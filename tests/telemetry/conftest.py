"""Telemetry switched off around each test, real child processes, and waiting for a condition instead of sleeping."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hwr
from hwr import telemetry

REPOSITORY = Path(hwr.__file__).parents[1]
DEADLINE_SECONDS = 20


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end with telemetry off and nothing of it in the environment."""
    for name in ("HWR_RUN_ID", "HWR_RUN_DIR", "HWR_RANK", "HWR_ENGINE", "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what a test exports is undone
        monkeypatch.delenv(name)
    telemetry.close()
    yield
    telemetry.close()


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait for a condition, at most 20 seconds."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            os.sched_yield()

    return wait


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python children that run code, print `ready`, run more code and wait for their standard input to end."""
    with contextlib.ExitStack() as stack:

        def child(code: str, *arguments: object, after: str = "sys.stdin.read()", **environ: str) -> subprocess.Popen[str]:
            text = f"import os, sys\n{code}\nprint('ready', flush=True)\n{after}"
            command = [sys.executable, "-W", "error", "-c", text, *map(str, arguments)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environment(), **environ})
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield child


@pytest.fixture
def python() -> Callable[..., str]:
    """Run Python code, below a command prefix if there is one, and return what it prints; a warning is an error there too."""

    def run(code: str, *arguments: object, prefix: tuple[str, ...] = (), errors: bool = False, **environ: str) -> str:
        command = [*prefix, sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
        env = {**environment(), **environ}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, cwd="/", check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stderr if errors else done.stdout

    return run


@pytest.fixture
def as_root() -> None:
    """Skip where namespaces and other users are out of reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def environment() -> dict[str, str]:
    """Let a child import what is tested here."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
