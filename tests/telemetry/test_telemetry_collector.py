"""The exposition: parsed by the client's own parsers, without a duplicate, complete from the start, closed in its labels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from telemetry_samples import KEY, RES, play

from hwr.outcomes import Operation
from hwr.telemetry import events as E
from hwr.telemetry.catalogue import Kind, Observed, Scope
from hwr.telemetry.collector import TOP_ARTIFACTS, HwrCollector
from hwr.telemetry.hub import Hub
from hwr.telemetry.metrics import METRICS
from hwr.telemetry.state import WorkerState

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
BY_NAME = {metric.name: metric for metric in METRICS}


def hub(**res: Any) -> Hub:
    return Hub({**RES, **{name.replace("__", "."): value for name, value in res.items()}}, realtime_offset_ns=0)


def observed(*states: WorkerState) -> list[Observed]:
    return [
        Observed(state=state, up=True, heartbeat_ns=state.last_ns or None, stall=None if state.seq < 2 else "unknown") for state in states
    ]


def registry(*states: WorkerState) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(HwrCollector(lambda: observed(*states)))
    return made


def series(families: Iterable[Any]) -> Series:
    found: Series = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"duplicate {key}"
            found[key] = sample.value
    return found


def exposed(*states: WorkerState) -> Series:
    return series(parse_text(generate_latest(registry(*states)).decode()))


def of(found: Series, name: str, **labels: str) -> float | None:
    matches = [value for (sample, told), value in found.items() if sample == name and labels.items() <= dict(told).items()]
    assert len(matches) <= 1
    return matches[0] if matches else None


@pytest.mark.parametrize("seed", range(6))
def test_both_formats_parse_without_duplicates_and_within_the_budget(seed: int) -> None:
    """Two ranks with events at random: both formats parse, no series twice, 350 a rank, no NaN, no label value of its own making."""
    chance = random.Random(seed)
    hubs = [hub(hwr__rank=rank) for rank in range(2)]
    for one in hubs:
        play(one, 600, chance)
    made = registry(*(one.state for one in hubs))
    text = series(parse_text(generate_latest(made).decode()))
    opened = series(parse_openmetrics(generate_openmetrics(made).decode()))
    assert text.keys() == opened.keys()
    for rank in "01":
        of_rank = [key for key in text if ("rank", rank) in key[1]]
        of_artifacts = [key for key in of_rank if "artifact" in dict(key[1])]
        assert len(of_rank) - len(of_artifacts) <= 350
    assert all(value == value for value in text.values())
    for name, labels in text:
        metric = BY_NAME.get(name) or BY_NAME[name.rpartition("_")[0]]
        closed = {label.name: label.values for label in metric.labels}
        for label, value in labels:
            if label in closed and closed[label] is not None:
                assert value in (closed[label] or ())
            elif label == "artifact":
                assert len(value) == 12
            else:
                assert label in ("engine", "rank", "le") or metric.kind is Kind.INFO


def test_counters_histograms_and_statesets_are_there_from_the_start() -> None:
    """Each combination of closed values is there at 0 before anything happened; each gauge is absent until it is known."""
    found = exposed(WorkerState(res=RES))
    assert len(found) > 200
    for metric in METRICS:
        combinations = list(itertools.product(*(label.values or () for label in metric.labels)))
        if metric.kind is Kind.COUNTER:
            for values in combinations:
                assert of(found, metric.name, **dict(zip([label.name for label in metric.labels], values, strict=True))) == 0
        elif metric.kind is Kind.HISTOGRAM:
            for values in combinations:
                labels = dict(zip([label.name for label in metric.labels], values, strict=True))
                assert of(found, f"{metric.name}_count", **labels) == of(found, f"{metric.name}_sum", **labels) == 0
                buckets = [key for key in found if key[0] == f"{metric.name}_bucket" and labels.items() <= dict(key[1]).items()]
                assert len(buckets) == len(metric.bounds) + 1
        elif metric.name == "hwr_worker_stall":  # nobody judges
            assert [key for key in found if key[0] == metric.name] == []
        elif metric.kind is Kind.STATESET:
            states = [found[key] for key in found if key[0] == metric.name]
            assert len(states) == len(metric.labels[0].values or ())
            assert sum(states) == 1
        elif metric.kind is Kind.GAUGE and metric.name not in ("hwr_worker_up", "hwr_lock_waiters"):
            assert [key for key in found if key[0] == metric.name] == [], metric.name


def test_gauges_come_and_go() -> None:
    """A timestamp of an operation is there while one is open, with its deadline; memory is there once sampled."""
    worker = hub()
    begin = E.LockWaiting(lock="build", file="f", exclusive=True, deadline_seconds=60.0)
    worker.emit(begin, op="a")
    found = exposed(worker.state)
    started = of(found, "hwr_operation_started_timestamp_seconds", operation="lock")
    assert started == pytest.approx(worker.state.wall_seconds(worker.state.last_ns))
    assert of(found, "hwr_operation_deadline_timestamp_seconds", operation="lock") == pytest.approx((started or 0) + 60)
    assert of(found, "hwr_lock_waiters", lock="build") == 1
    assert of(found, "hwr_worker_phase", hwr_worker_phase="waiting_lock") == 1
    worker.emit(E.LockEnded(lock="build", seconds=2.0), op="a")
    worker.emit(E.MemorySampled(moment="after_map", source="status", cost_seconds=0.001, rss_anon_bytes=5, rss_file_bytes=0))
    found = exposed(worker.state)
    assert [key for key in found if key[0].startswith("hwr_operation_")] == []
    assert of(found, "hwr_lock_wait_seconds_total", lock="build") == 2
    assert of(found, "hwr_process_rss_bytes", kind="anon") == 5
    assert of(found, "hwr_process_rss_bytes", kind="file") == 0
    assert of(found, "hwr_process_rss_bytes", kind="shmem") is None
    assert set(BY_NAME["hwr_operation_started_timestamp_seconds"].labels[0].values or ()) == set(Operation)


def test_the_newest_worker_of_a_rank_wins_at_once() -> None:
    """Two journals of one engine and rank, in either order: only the later started process is shown."""
    old, new, other = hub(process__start_ns=1), hub(process__start_ns=2), hub(process__start_ns=1, hwr__engine="second")
    for one, steps in ((old, 5), (new, 1), (other, 3)):
        for _ in range(steps):
            one.emit(E.StageEnded(stage="lookup", seconds=1.0), op="x")
    for order in itertools.permutations((old, new, other)):
        found = exposed(*(one.state for one in order))
        assert of(found, "hwr_stages_total", engine="default", rank="0", stage="lookup") == 1
        assert of(found, "hwr_stages_total", engine="second", rank="0", stage="lookup") == 3
    strange = hub(process__start_ns="soon", process__pid=[], hwr__rank={"a": 1}, hwr__engine="\n" * 900, versions=3)
    assert exposed(strange.state, new.state)


def test_sums_over_workers_never_fall() -> None:
    """A replaced, vanished or restarted worker leaves what it had counted in the sum: `rate()` sees only what was new."""
    workers: list[WorkerState] = []
    made = CollectorRegistry(auto_describe=False)
    made.register(HwrCollector(lambda: observed(*workers)))

    def total() -> float | None:
        return of(series(parse_text(generate_latest(made).decode())), "hwr_events_total", event="hwr.runtime.steps.end")

    def ran(steps: int, **res: Any) -> WorkerState:
        one = hub(**res)
        for _ in range(steps):
            one.emit(E.StepsEnded(steps=1), op="x")
        return one.state

    assert total() == 0
    workers[:] = [ran(5, hwr__rank=0, process__start_ns=1), ran(7, hwr__rank=1, process__start_ns=1)]
    assert total() == 12
    workers[0] = ran(1, hwr__rank=0, process__start_ns=2)
    assert total() == 13
    assert total() == 13
    kept = workers.pop()
    assert total() == 13
    workers.append(kept)
    assert total() == 13
    workers[0] = ran(0, hwr__rank=0, process__start_ns=2)  # the same process, configured again
    assert total() == 13


def test_artifacts_are_the_largest_and_digests_only() -> None:
    """At most 50 artifacts, the largest; a key that is no digest is no label, two keys of one name are one series."""
    worker = hub()
    for number in range(80):
        facts = {"moment": "after_map", "source": "smaps", "cost_seconds": 0.0, "anonymous_bytes": 0}
        worker.emit(E.ArtifactMemorySampled(key=f"{number:012x}" + "0" * 52, mapped_bytes=number + 1, **facts))
        worker.emit(E.ArtifactMemorySampled(key=f"x|{number}", mapped_bytes=10**9, **facts))
        worker.emit(E.ArtifactMemorySampled(key=KEY[:12] + f"{number:052x}", mapped_bytes=1, **facts))
    found = exposed(worker.state)
    mapped = {dict(key[1])["artifact"]: value for key, value in found.items() if key[0] == "hwr_artifact_mapped_bytes"}
    assert len(mapped) == TOP_ARTIFACTS
    assert min(mapped.values()) == 31
    assert set(mapped) == {f"{number:012x}" for number in range(30, 80)}
    assert of(found, "hwr_artifact_anonymous_bytes", artifact=next(iter(mapped))) in (0, None)


def test_every_metric_can_move() -> None:
    """Each metric of the catalogue has an event that moves it: none is declared and dead."""
    resting, moved = WorkerState(res=RES), hub()
    everything = random.Random(1)
    for _ in range(30):
        play(moved, 300, everything)
    for purpose in (
        E.ChecksumBegun(key=KEY, planned_bytes=10, files=1),
        E.CollectiveBegun(op="barrier", sequence=3, world_size=2),
        E.LockWaiting(lock="pin", file="f", exclusive=True, deadline_seconds=1.0),
    ):
        moved.emit(purpose, op=type(purpose).__name__)
    moved.emit(E.AllocatorSampled(python_blocks=1, gc_collections=(1, 2, 3), in_use_bytes=1, free_bytes=1, mapped_bytes=1))
    moved.emit(E.ValidationEnded(level="full_checksum", error_code="checksum_mismatch", outcome="failed", seconds=1.0), op="v")
    moved.emit(E.FailureRecorded(error_code="enospc", stage="capacity", problem="p", retryable=True, fatal=False))
    sizes = {"mapped_bytes": 9, "anonymous_bytes": 9}
    moved.emit(E.ArtifactMemorySampled(moment="closed", source="smaps", cost_seconds=0.0, key=KEY, **sizes))
    moved.emit(E.MissExplained(key=KEY, sections=("layout",), candidates=1))
    moved.emit(E.TransportChosen(transport="registered", reason="registered"))
    moved.emit(E.EventsDropped(count=1, cause="disk_full"))
    moved.emit(E.PublicationEnded(result="published", bytes=10, seconds=1.0), op="p")
    moved.emit(
        E.MemorySampled(
            moment="closed",
            source="status",
            cost_seconds=1.0,
            rss_anon_bytes=1,
            locked_bytes=1,
            hugetlb_bytes=1,
            pss_bytes=1,
            private_bytes=1,
        )
    )
    moved.state.malformed += 1
    before, after = exposed(resting), exposed(moved.state)
    for metric in METRICS:
        samples = {key for key in after if key[0] == metric.name or key[0].rpartition("_")[0] == metric.name}
        changed = any(before.get(key) != after[key] for key in samples)
        assert changed or metric.name in ("hwr_build_info", "hwr_worker_up"), metric.name
    assert {metric.scope for metric in METRICS} == set(Scope) - {Scope.NODE}
