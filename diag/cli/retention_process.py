"""In which process the runs of a matrix or a search are measured.

Owns the way from the arguments to interpreter, processors and likeness. Promises that a matrix which is resumed takes the likeness that it
was begun with, so that the worker need not live on. Refuses what cannot be used before anything is measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from diag.cli import retention_run
from diag.probes.interpreter import cpus_of, runnable
from diag.probes.likeness import is_like_variable


def process_of(arguments: argparse.Namespace, written: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of a request that say in which process; the likeness of a matrix that is resumed is the one that was written.

    Raises:
        HwrError: the interpreter, the processors or the worker are not usable.
    """
    recorded = (written or {}).get("likeness")
    if arguments.like is None or not isinstance(recorded, dict) or (written or {}).get("like") != arguments.like:
        return retention_run.process_of(arguments)
    return {
        "python": runnable(str(recorded.get("python")) if arguments.python is None else arguments.python),
        "cpu": tuple(recorded.get("cpu_affinity") or ()) if arguments.cpu is None else cpus_of(arguments.cpu),
        "environment": dict(recorded.get("environment") or {}),
        "like": recorded,
    }


def likeness_of(process: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the likeness of a process as JSON values, None without `--like`."""
    like = process.get("like")
    return like if like is None or isinstance(like, dict) else like.to_json()


def child_environment(process: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment in which the interpreter is asked what it has: the one in which it will measure, as far as it matters."""
    like = process.get("like") is not None
    inherited = {name: value for name, value in os.environ.items() if not (like and is_like_variable(name))}
    return {**inherited, **process.get("environment", {})}
