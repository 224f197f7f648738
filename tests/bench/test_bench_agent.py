"""What the agent costs: itself, whoever scrapes it, and whoever it looks at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from figures import record
from node_agents import Agent, PlainWorker, get, running
from node_scrape import Scraper
from victim import cpu_seconds, store_with, victim_figures

pytestmark = pytest.mark.bench

CORE_BUDGET = 0.01
RSS_BUDGET_MIB = 80
SCRAPE_BUDGET_S = 0.1
VICTIM_BUDGET = 1.5
VICTIM_STALL_BUDGET_S = 0.008
SCRAPE_EVERY_SECONDS = 15.0
GIB = 1 << 30


@pytest.fixture
def started() -> Iterator[list[Agent | PlainWorker]]:
    """Processes that end with the benchmark."""
    with running() as list_of:
        yield list_of


def test_the_agent_itself(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Eight workers, two hundred artifacts, a hundred thousand events: processor at a scrape each 15 s, memory, 500 scrapes."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for rank in range(8):
        worker = PlainWorker(run_dir, rank=rank)
        started.append(worker)
        worker.do(f"for _ in range({100_000 if rank == 0 else 10}): telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))")
    for number in range(200):
        store_with(tmp_path / "store", f"{number:064x}", 4096)
    agent = Agent(run_dir, "--root", str(tmp_path / "store")).ready()
    started.append(agent)
    time.sleep(5)  # past its first looks; a measurement, no synchronisation
    begun, used = time.monotonic(), cpu_seconds(agent.pid)
    for _ in range(4):
        assert get(f"{agent.url}/metrics")[0] == 200
        time.sleep(SCRAPE_EVERY_SECONDS)
    share = (cpu_seconds(agent.pid) - used) / (time.monotonic() - begun)
    record("agent: share of a core, scraped each 15 s", share, "cores", f"<= {CORE_BUDGET}", share <= CORE_BUDGET)
    status = Path(f"/proc/{agent.pid}/status").read_text()
    rss = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    record("agent: peak resident memory", rss, "MiB", f"<= {RSS_BUDGET_MIB}", rss <= RSS_BUDGET_MIB)
    with Scraper(agent.url) as scraper:
        told = scraper.scrape_often(500).told()
    record("agent: p99 of 500 scrapes", told["p99"] * 1000, "ms", f"<= {SCRAPE_BUDGET_S * 1000:g}", told["p99"] <= SCRAPE_BUDGET_S)
    record("agent: slowest of 500 scrapes", told["max"] * 1000, "ms")


def test_whoever_is_watched(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """4 GiB mapped: the worker's own mmap and munmap with the agent running and stopped, alternated, while it is scraped."""
    ratio, added = victim_figures(tmp_path, started, 4 * GIB, rounds=5, seconds=6.0)
    record("victim: p99.9 of mmap+munmap, agent on over off", ratio, "x", f"<= {VICTIM_BUDGET}", ratio <= VICTIM_BUDGET)
    ok = added <= VICTIM_STALL_BUDGET_S
    record("victim: longest stall, agent on minus off", added * 1000, "ms", f"<= {VICTIM_STALL_BUDGET_S * 1000:g}", ok)
