"""Run directories as workers and an agent leave them: real journals of real hubs, at moments that the test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwr.telemetry.hub import Hub
from hwr.telemetry.journal import JournalWriter
from hwr.telemetry.rundir import create_worker_directory


def write(run_dir: Path, one: Hub, run: str = "run", *, role: str = "worker", segment_bytes: int = 8 << 20) -> Path:
    """Let a hub write its journal below a run directory; return its directory."""
    res: dict[str, Any] = one.res
    res["hwr.role"], res["boot_id"], res["host.name"] = role, res.get("boot_id", "boot"), "node"
    made = create_worker_directory(run_dir, run, res["hwr.rank"], res["process.pid"], res["process.start_ns"])
    one.open_journal(lambda head: JournalWriter(made.path, head, segment_bytes=segment_bytes))
    return made.path
