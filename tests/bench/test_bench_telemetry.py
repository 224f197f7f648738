"""What telemetry costs: an event, a span, the fold of a journal, a scrape."""

from __future__ import annotations

import logging
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from figures import record
from prometheus_client import CollectorRegistry, generate_latest

from hwr import telemetry
from hwr.outcomes import StoreStatus, ValidationLevel
from hwr.telemetry import events as E
from hwr.telemetry.reader import JournalReader, read_state

pytestmark = pytest.mark.bench

EVENT_BUDGET_US = 10.0
FOLD_BUDGET_EVENTS = 200_000
ROUNDS = 7
KEY = "0123456789abcdef" * 4


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Path]:
    """Write a real journal, log at the level that a host has by default."""
    logging.getLogger("hwr").setLevel(logging.WARNING)
    directory = telemetry.configure(run_dir=tmp_path)
    assert directory is not None
    yield directory
    telemetry.close()
    logging.getLogger("hwr").setLevel(logging.NOTSET)


def microseconds(call: Callable[[int], None], count: int) -> float:
    """Return the median over rounds of what one call costs."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for number in range(count):
            call(number)
        rounds.append((time.perf_counter() - begun) / count * 1e6)
    return statistics.median(rounds)


def test_an_event(configured: Path) -> None:
    """One event, from the call to the written line, and each of the two of a span."""
    progress = microseconds(lambda done: telemetry.emit(E.ChecksumProgress(done_bytes=done, planned_bytes=1 << 31)), 4000)

    def span(_: int) -> None:
        with telemetry.span(E.LookupBegun(key=KEY, validation=ValidationLevel.FULL_CHECKSUM)) as one:
            one.add(status=StoreStatus.HIT, bytes=1 << 31, tensors=351)

    pair = microseconds(span, 2000) / 2
    record("event: progress", progress, "µs", f"<= {EVENT_BUDGET_US:g}", progress <= EVENT_BUDGET_US)
    record("event: of a begin/end pair", pair, "µs", f"<= {EVENT_BUDGET_US:g}", pair <= EVENT_BUDGET_US)
    assert read_state(configured).seq_gaps == 0


def test_telemetry_off() -> None:
    """The same call where telemetry is off."""
    telemetry.configure(False)
    off = microseconds(lambda done: telemetry.emit(E.ChecksumProgress(done_bytes=done, planned_bytes=1 << 31)), 20_000)
    telemetry.close()
    record("event: telemetry off", off, "µs")


def test_the_fold_of_a_journal(configured: Path) -> None:
    """Events a second from the file to the state, and how much memory a journal ten times as long needs more."""
    for number in range(20_000):
        with telemetry.span(E.LookupBegun(key=KEY, validation=ValidationLevel.FULL_CHECKSUM)) as one:
            one.progress(E.ChecksumProgress(done_bytes=number, planned_bytes=1 << 31))
            one.add(status=StoreStatus.HIT)

    def read() -> int:
        reader = JournalReader(configured, from_start=True)
        count = sum(1 for _ in reader.records())
        reader.close()
        return count

    rates = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        count = read()
        rates.append(count / (time.perf_counter() - begun))
    rate = statistics.median(rates)
    assert count > 60_000
    record("fold of a journal", rate, "events/s", f">= {FOLD_BUDGET_EVENTS:,}", rate >= FOLD_BUDGET_EVENTS)
    tracemalloc.start()
    read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    segments = sum(path.stat().st_size for path in configured.glob("*.jsonl"))
    record("fold of a journal: peak memory over its size", peak / segments, "ratio", "<= 0.5", peak <= segments / 2)


def test_a_scrape(configured: Path) -> None:
    """One exposition of one worker, and one copy of its state."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(telemetry.collector())
    scrape = microseconds(lambda _: generate_latest(registry) and None, 20) / 1e3
    snapshot = microseconds(lambda _: telemetry.snapshot() and None, 200)
    record("exposition of one worker", scrape, "ms")
    record("snapshot of the state", snapshot, "µs")
    assert telemetry.snapshot() is not None
