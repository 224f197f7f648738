"""Who writes a journal: the `res` of a segment's first line.

Owns the facts that identify a process across namespaces, copies and reboots. Promises to read them once per process and to
leave absent what cannot be known. Refuses command lines and environments: they hold secrets.
"""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from hwr.errors import Unavailable
from hwr.outcomes import Role
from hwr.procfs.identity import read_boot_id, read_pid_namespace, start_ns
from hwr.telemetry.clock import realtime_offset_ns
from hwr.units import printable

_VERSIONS: Final = ("hwr-suite", "torch", "safetensors", "transformers", "diffusers", "blake3")


@dataclass(frozen=True, slots=True)
class Writer:
    """What the host told us about this process."""

    run_id: str
    engine: str
    rank: int
    role: Role


def resource(writer: Writer) -> dict[str, Any]:
    """Return OpenTelemetry-style resource attributes of this process."""
    pid = os.getpid()
    facts: dict[str, Any] = {
        "service.name": "hwr",
        "service.version": _version("hwr-suite"),
        "host.name": printable(socket.gethostname()),
        "process.pid": pid,
        "process.uid": os.geteuid(),
        "process.start_ns": start_ns(pid),
        "boot_id": read_boot_id(),
        "pid_ns": read_pid_namespace(),
        "clock.realtime_offset_ns": realtime_offset_ns(),
        "hwr.run_id": writer.run_id,
        "hwr.engine": printable(writer.engine),
        "hwr.rank": writer.rank,
        "hwr.role": writer.role.value,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
    }
    return {key: value for key, value in facts.items() if value is not None and not isinstance(value, Unavailable)}


def process_start_ns() -> int:
    """Return when this process started (CLOCK_BOOTTIME), 0 if /proc does not say."""
    value = start_ns(os.getpid())
    return value if isinstance(value, int) else 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
