"""Run objects as hwr-diag stores them, made from a rate per call: what a real run says, without the run."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diag.analysis.retention import judge
from diag.probes.matrix import Plan, Step, stem

HEADER_BYTES = 160


def run_object(
    mode: str = "get_tensor",
    elements: int = 64,
    offset: int = 0,
    *,
    blocks: float = 0.0,
    size: float = 0.0,
    iterations: int = 20_000,
    loops: int = 10,
    control: Mapping[str, Any] | None = None,
    judged: bool = True,
    counts_blocks: bool = True,
    **facts: Any,
) -> dict[str, Any]:
    """Return a whole run in which each call keeps `blocks` interpreter blocks and `size` bytes, and nothing else moves."""
    every = iterations // loops

    def sample(phase: str, calls: int) -> dict[str, Any]:
        kept = int(size * calls) // 4096 * 4096
        found = {
            "phase": phase,
            "iterations": calls,
            "loop_seconds": calls / 1e6,
            "rss_bytes": (200 << 20) + kept,
            "private_bytes": (150 << 20) + kept,
            "anonymous_bytes": (120 << 20) + kept,
            "fd_count": 4,
            "allocated_blocks": 500_000 + round(blocks * calls) if counts_blocks else None,
            "interpreter_bytes": (50 << 20) + int(size * calls) if counts_blocks else None,
            "malloc_in_use_bytes": 90 << 20,
            "malloc_free_bytes": 1 << 15,
            "file_bytes": 80 << 20,
            "locked_bytes": 0,
            "reader_bytes": 0,
        }
        return {**found, "last_tensor_alive": mode == "reuse"} if phase == "loop" else found

    begin = 8 + HEADER_BYTES + offset
    run: dict[str, Any] = {
        "schema_version": 1,
        "arguments": {
            "mode": mode,
            "tensor_elements": elements,
            "iterations": iterations,
            "sample_every": every,
            "warmup": 1000,
            "offset_bytes": offset,
            "header_bytes": None,
            "tensors": 64,
            "call": None,
        },
        "python": "3.11.2",
        "torch": "2.13.0+cpu",
        "safetensors": "0.8.0",
        "kernel": "6.1.0",
        "hostname": "node",
        "pid": 4242,
        "cpu_affinity": [0, 1],
        "torch_threads": {"intraop": 1, "interop": 1},
        "pythonmalloc": None,
        "preparation_seconds": 0.01,
        "samples": [
            sample("before_file", 0),
            sample("baseline", 0),
            *(sample("loop", every * (number + 1)) for number in range(loops)),
            sample("closed", iterations),
        ],
        "executable": "/usr/bin/python3",
        "implementation": "CPython",
        "file": {
            "header_bytes": HEADER_BYTES,
            "payload_bytes": elements * 4,
            "file_bytes": begin + elements * 4,
            "offset_bytes": offset,
            "begin": begin,
            "end": begin + elements * 4,
            "tensors": 1,
        },
        "allocator": {"libc": "glibc 2.36", "environment": {}},
        "size_classes": None,
        "cached_integer_references": None,
        "attribution": None,
        "complete": True,
        "ending": {"status": "ended", "exit_code": 0, "signal": None, "message": ""},
        "run": {
            "command": ["python3"],
            "environment": {},
            "timeout_seconds": 120.0,
            "started": "2026-01-01T00:00:00.000Z",
            "seconds": 2.5,
            "like": None,
        },
        "neighbours": {"started": [], "ended": [], "unread": 0},
        "control": None,
        "analysis": None,
        "warnings": [],
    }
    run.update(copy.deepcopy(facts))
    if judged:
        run["analysis"] = judge(run, control).to_json()
    return run


def killed(run: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return the run as it is told when its probe was killed after so many samples."""
    cut = {**run, "samples": run["samples"][:samples], "complete": False, "analysis": None}
    return cut | {"ending": {"status": "signal", "exit_code": None, "signal": "SIGKILL", "message": "the probe was ended by SIGKILL"}}


def samples_text(run: Mapping[str, Any], samples: int, *, torn: bool = False) -> str:
    """Return what the probe of a run had written after so many samples."""
    begin = {**run, "samples": [], "preparation_seconds": None}
    lines = [json.dumps({"begin": begin}), *(json.dumps({"sample": sample}) for sample in run["samples"][:samples])]
    return "\n".join(lines) + ('\n{"sample": {"pha' if torn else "\n")


def plan_of(**asked: Any) -> Plan:
    """Return a small plan."""
    small: dict[str, Any] = {"modes": ("get_tensor", "reuse"), "tensor_elements": (64,), "offset_bytes": (0, 4000), "repetitions": 2}
    return Plan(**{**small, "python": "/usr/bin/python3", "environment": {"python": {"version": "3.11.2"}}, **asked})


def run_of(plan: Plan, step: Step, **facts: Any) -> dict[str, Any]:
    """Return a whole run of a plan's step; get_tensor keeps two blocks and 64 bytes."""
    kept = {"blocks": 2.0, "size": 64.0} if step.case.mode == "get_tensor" else {}
    case = step.case
    return run_object(case.mode, case.tensor_elements, case.offset_bytes, iterations=plan.iterations, **{**kept, **facts})


def matrix_directory(path: Path, *, safetensors: str = "0.8.0", modes: tuple[str, ...] = ("get_tensor", "reuse"), **rates: float) -> Path:
    """Write the runs of a matrix of two offsets and two repetitions, without its plan."""
    path.mkdir()
    for repetition in (1, 2):
        for offset in (0, 4000):
            for mode in modes:
                kept = rates if mode != "reuse" else {}
                run = run_object(mode, 64, offset, safetensors=safetensors, **kept)
                (path / f"{stem(mode, 64, offset, repetition)}.json").write_text(json.dumps(run))
    return path
