"""The stand-in for libcudart, read-only shared mappings to register, and children to load libraries in."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy
import pytest
from cuda_standin import foundry, standin  # noqa: F401 (fixtures)

import hwr

REPOSITORY = Path(hwr.__file__).parents[1]


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Callable[[int], int]]:
    """Map a file of that many bytes shared and read-only, as the store does, and return its address."""
    kept = []

    def map_file(nbytes: int) -> int:
        path = tmp_path / f"payload-{len(kept)}"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        kept.append(mapping)
        return address_of(mapping)

    yield map_file
    for mapping in kept:
        mapping.close()


@pytest.fixture
def python() -> Callable[..., str]:
    """Run Python code in a fresh interpreter, below a command prefix, and return what it prints."""

    def run(code: str, *arguments: object, prefix: Sequence[str] = ()) -> str:
        environment = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)}
        command = [*prefix, sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def nobody() -> list[str]:
    """Prefix a command so that it runs without any privilege."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait for a condition, at most 20 seconds."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            os.sched_yield()

    return wait


def address_of(mapping: mmap.mmap) -> int:
    """Return where a mapping begins; ctypes.from_buffer wants one that can be written."""
    return int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data)
