"""Real processes to read, and small /proc trees on disk for texts that no kernel here writes."""

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

REPOSITORY = Path(hwr.__file__).parents[1]


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, at most 20 seconds."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            os.sched_yield()

    return wait


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python children that print `ready` and then wait for their standard input to end; end them afterwards."""
    with contextlib.ExitStack() as stack:

        def child(code: str, *arguments: object, ready: bool = True) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", f"import os, sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()", *map(str, arguments)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
            )
            stack.callback(process.kill)
            if ready:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            return process

        yield child


@pytest.fixture
def python_as() -> Callable[..., str]:
    """Run Python code below a command prefix (another user, other namespaces) and return what it prints."""

    def run(prefix: list[str], code: str, *arguments: object, stdin: int = subprocess.DEVNULL) -> str:
        command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, env=environment(), cwd="/", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def as_root() -> None:
    """Skip where namespaces and other users are out of reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture
def nobody(as_root: None) -> list[str]:
    """Prefix a command so that it runs without any privilege."""
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Write one file of a /proc on disk and return its root."""

    def write(name: str, text: bytes) -> Path:
        path = tmp_path / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        return tmp_path / "proc"

    return write


def environment() -> dict[str, str]:
    """Let a child import what is tested here."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
