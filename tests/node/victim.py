"""Whoever is watched: maps an artifact, and measures its own small mmap and munmap calls while it is.

A program as those of `scene_workers`, and what starts it. Its answer to `measure SECONDS` is a line of JSON: calls, p99.9 and the longest.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import statistics
from pathlib import Path
from typing import Any

from node_agents import Agent, PlainWorker, get
from scene import SceneWorker

KEY = "5e" * 32
MIB = 1 << 20

PROGRAM = """
import json, mmap, os, sys, time
from hwr import telemetry
from hwr.telemetry import events as E
run_dir, rank, payload, key = sys.argv[1:]
telemetry.configure(run_dir=run_dir, engine="default", rank=int(rank))
with telemetry.span(E.DomainOpening(root=os.path.dirname(os.path.dirname(os.path.dirname(payload))))):
    pass
with open(payload, "rb") as file:
    weights = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
weights.madvise(mmap.MADV_POPULATE_READ if hasattr(mmap, "MADV_POPULATE_READ") else 22)
telemetry.emit(E.LeaseOpened(key=key, lease="l", bytes=len(weights), files=1, tensors=1, validation="manifest_and_metadata"))
print("ready", flush=True)
for line in sys.stdin:
    until = time.monotonic() + float(line)
    took = []
    while time.monotonic() < until:
        for _ in range(50):
            begun = time.perf_counter_ns()
            mmap.mmap(-1, 65536).close()
            took.append(time.perf_counter_ns() - begun)
        time.sleep(0.0005)
    took.sort()
    print(json.dumps({"calls": len(took), "p999": took[int(len(took) * 0.999)] / 1e9, "longest": took[-1] / 1e9}), flush=True)
"""


def store_with(root: Path, key: str, payload_bytes: int) -> Path:
    """Make a store with one artifact whose payload is sparse; return the payload."""
    artifact = root / "artifacts" / key
    artifact.mkdir(parents=True)
    for name in ("locks", "tmp", "quarantine", "deny"):
        (root / name).mkdir(exist_ok=True)
    payload = artifact / "model-00001.safetensors"
    with payload.open("wb") as file:
        file.truncate(payload_bytes)
    (artifact / "manifest.json").write_text("{}")
    (artifact / "READY.json").write_text("{}")
    for path in artifact.iterdir():
        path.chmod(0o444)
    artifact.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    return payload


class Victim(SceneWorker):
    """The process."""

    def __init__(self, place: Path, run_dir: Path, payload: Path, *, rank: int = 0, key: str = KEY) -> None:
        super().__init__(rank, PROGRAM, [str(payload), key], run_dir, f"victim-{rank}", place / f"victim{rank}.err")
        self.expect("ready")

    def measure(self, seconds: float) -> dict[str, Any]:
        """Let it measure itself for so long."""
        self.say(str(seconds))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, Path(self._errors.name).read_text()
        value: dict[str, Any] = json.loads(line)
        return value


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in both modes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def victim_figures(
    place: Path, started: list[Agent | PlainWorker], payload_bytes: int, *, rounds: int, seconds: float
) -> tuple[float, float]:
    """Return the ratio of the medians of p99.9, and by how much the median of the longest stalls grew."""
    run_dir = place / "run"
    run_dir.mkdir()
    victim = Victim(place, run_dir, store_with(place / "store", KEY, payload_bytes))
    try:
        agent = Agent(run_dir, "--root", str(place / "store")).ready()
        started.append(agent)
        figures: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for _ in range(rounds):
            for watched in (False, True):
                os.kill(agent.pid, signal.SIGCONT if watched else signal.SIGSTOP)
                if watched:
                    get(f"{agent.url}/metrics")
                figures[watched].append(victim.measure(seconds))
        os.kill(agent.pid, signal.SIGCONT)
    finally:
        victim.end()
    tail = {watched: statistics.median(one["p999"] for one in found) for watched, found in figures.items()}
    longest = {watched: statistics.median(one["longest"] for one in found) for watched, found in figures.items()}
    return tail[True] / tail[False], longest[True] - longest[False]
