"""Whoever is watched hardly notices, and the watcher hardly costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_agents import Agent, PlainWorker, get, running, until
from node_scrape import Scraper
from victim import cpu_seconds, store_with, victim_figures

# Budgets of the design; the small forms assert five times as much, since nothing else is still on a machine that runs tests.
TAIL_RATIO = 1.5
ADDED_STALL_SECONDS = 0.008
CORE_SHARE = 0.01
PEAK_KIB = 80 << 10
P99_SECONDS = 0.1
MIB = 1 << 20


@pytest.fixture
def started() -> Iterator[list[Agent | PlainWorker]]:
    """Processes that end with the test."""
    with running() as list_of:
        yield list_of


def test_the_victim_hardly_notices(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """A worker's own mmap and munmap, agent running and stopped by turns: the tail and the longest stall."""
    ratio, added = victim_figures(tmp_path, started, 256 * MIB, rounds=2, seconds=2.0)
    assert ratio <= TAIL_RATIO * 5
    assert added <= ADDED_STALL_SECONDS * 5


def test_the_agent_is_small(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Processor over ten seconds, and peak memory, with eight workers and two hundred artifacts."""
    share, peak_kib, _ = costs(tmp_path, started, 10.0)
    assert share <= CORE_SHARE * 5
    assert peak_kib <= PEAK_KIB


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Five minutes of cost at a scrape each 15 s, and five minutes of a victim of 4 GiB, at the nominal budgets; memory does not grow."""
    (tmp_path / "cost").mkdir()
    share, peak_kib, grown_kib = costs(tmp_path / "cost", started, 300.0)
    (tmp_path / "victim").mkdir()
    ratio, added = victim_figures(tmp_path / "victim", started, 4096 * MIB, rounds=15, seconds=10.0)
    print(json.dumps({"share": share, "peak_kib": peak_kib, "grown_kib": grown_kib, "ratio": ratio, "added_seconds": added}))
    assert peak_kib <= PEAK_KIB
    assert grown_kib <= 4096
    assert ratio <= TAIL_RATIO
    assert added <= ADDED_STALL_SECONDS
    assert share <= CORE_SHARE * 2, "the budget is one hundredth; see the closing figures for how near it is on this machine"


def costs(place: Path, started: list[Agent | PlainWorker], seconds: float) -> tuple[float, int, int]:
    """Return the agent's share of a core, its peak memory, and by how much its memory grew meanwhile (KiB)."""
    run_dir = place / "run"
    run_dir.mkdir()
    workers = [PlainWorker(run_dir, rank=rank) for rank in range(8)]
    started += workers
    workers[0].do("for _ in range(100_000): telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))")
    for number in range(200):
        store_with(place / "store", f"{number:064x}", 4096)
    agent = Agent(run_dir, "--root", str(place / "store")).ready()
    started.append(agent)
    events = ("hwr_events_total", (("event", "hwr.worker.phase.change"),))
    until(lambda: agent.metrics().get(events, 0) >= 100_000, "the long journal is read")
    begun, used, resident = time.monotonic(), cpu_seconds(agent.pid), _memory(agent.pid, "VmRSS")
    while (left := seconds - (time.monotonic() - begun)) > 0:
        assert get(f"{agent.url}/metrics")[0] == 200
        time.sleep(min(15.0, left))  # a measured time, no synchronisation
    share = (cpu_seconds(agent.pid) - used) / (time.monotonic() - begun)
    with Scraper(agent.url) as scraper:
        assert scraper.scrape_often(100).percentile(0.99) <= P99_SECONDS * 5
    peak, grown = _memory(agent.pid, "VmHWM"), _memory(agent.pid, "VmRSS") - resident
    agent.stop()
    for worker in workers:
        worker.end()
    return share, peak, max(0, grown)


def _memory(pid: int, key: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{key}:")[2].split()[0])
