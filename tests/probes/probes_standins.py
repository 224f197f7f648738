"""A stand-in for the probe: it takes its arguments and writes its lines, and then does what a test wants it to."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/hwr-diag/retention-run.json").read_text())

_HEAD = """
import json, os, signal, subprocess, sys, time
given = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
keys = ("schema_version", "arguments", "python", "torch", "safetensors", "kernel", "hostname", "pid", "cpu_affinity", "torch_threads",
        "pythonmalloc", "preparation_seconds", "samples")
facts = dict.fromkeys(keys) | {"schema_version": 1, "pid": os.getpid(), "samples": []}
facts["arguments"] = {name.replace("-", "_"): value for name, value in given.items()}
stream = os.open(given["samples"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def write(value):
    os.write(stream, json.dumps(value).encode() + b"\\n")

def sample(phase, iterations, **more):
    one = {"phase": phase, "iterations": iterations, "loop_seconds": 0.0, "rss_bytes": 0, "private_bytes": 0, "anonymous_bytes": 0}
    facts["samples"].append(one | {"fd_count": 3} | more)
    write({"sample": facts["samples"][-1]})

def end():
    write({"end": facts})
    print(json.dumps(facts))

"""


def stand_in(directory: Path, body: str) -> Path:
    """Write a probe whose body may use `given`, `facts`, `write`, `sample` and `end`."""
    path = directory / "stand_in.py"
    path.write_text(_HEAD + body)
    return path


def checked(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run object that its published schema takes, as a reader of its JSON gets it."""
    read: dict[str, Any] = json.loads(json.dumps(run, allow_nan=False))
    jsonschema.validate(read, SCHEMA)
    return read


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        os.sched_yield()


def is_gone(pid: int) -> bool:
    """Say whether a process has ended (a zombie has)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    return True
