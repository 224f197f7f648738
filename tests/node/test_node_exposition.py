"""The agent's exposition: both formats, no series twice, the watcher's figures, nothing stale of the dead, sums that go on."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from node_snapshots import MIB, OFFSET_NS, STOPPED, busy, hub, key, snapshot, worker
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from diag.node.exposition import Exposition
from diag.node.snapshot import CollectorHealth, NodeSnapshot
from hwr.outcomes import CollectorName, Liveness, Role, Stall
from hwr.telemetry import events as E
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.node_metrics import NODE_METRICS
from hwr.telemetry.totals import KEPT_GONE, Totals

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(families: Iterable[Any]) -> Series:
    found: Series = {}
    for family in families:
        for sample in family.samples:
            name = (sample.name, tuple(sorted(sample.labels.items())))
            assert name not in found, f"duplicate {name}"
            found[name] = sample.value
    return found


def exposed(seen: NodeSnapshot, exposition: Exposition | None = None) -> Series:
    body, content_type = (exposition or Exposition()).render(seen, "text/plain")
    assert content_type.startswith("text/plain")
    return series(parse_text(body.decode()))


def of(found: Series, name: str, **labels: str) -> float | None:
    matches = [value for (sample, told), value in found.items() if sample == name and labels.items() <= dict(told).items()]
    assert len(matches) <= 1
    return matches[0] if matches else None


def node(count: int = 8, **more: Any) -> NodeSnapshot:
    """Return a node with workers that have said a bit of everything."""
    hubs = [busy(hub(rank)) for rank in range(count)]
    now = boot_ns()
    return snapshot(tuple(worker(one, at_ns=now) for one in hubs), at_ns=now, **more)


def test_both_formats_have_the_same_series_and_no_series_twice() -> None:
    """Eight workers, 200 artifacts: both parse, equal, within 3,000, and no value is NaN."""
    seen = node(artifacts=200)
    exposition = Exposition()
    text, opened = exposition.render(seen, ""), exposition.render(seen, OPENMETRICS)
    assert opened[1].startswith("application/openmetrics-text")
    first, second = series(parse_text(text[0].decode())), series(parse_openmetrics(opened[0].decode()))
    assert first.keys() == second.keys()
    assert len(first) <= 3000
    assert all(value == value for value in first.values())
    for metric in NODE_METRICS:
        samples = [labels for sample, labels in first if sample == metric.name]
        assert samples or metric.name in ("hwr_node_mlocked_bytes", "hwr_store_limit_bytes"), f"{metric.name} is declared and never there"
        assert not any(name in ("engine", "rank", "pid", "path") for labels in samples for name, _ in labels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say() -> None:
    """Prometheus's own linter accepts names, types and help."""
    body, _ = Exposition().render(node(2), "")
    done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=1.x.y", "text/plain; version=;;", "\x00" * 5000, ",;,=", OPENMETRICS + "; q=x"]
)
def test_an_odd_accept_header_is_served(accept: str) -> None:
    """Whatever a client says it accepts, it gets an exposition."""
    body, content_type = Exposition().render(node(1), accept)
    assert body
    assert content_type.isascii()


def test_memory_is_what_the_watcher_read_last() -> None:
    """A newer reading of the agent's takes the place of the worker's own; an older one does not; the journal's state stays as it is."""
    one = busy(hub())
    now = boot_ns()
    seen = worker(one, at_ns=now)
    found = exposed(snapshot((seen,), at_ns=now))
    assert of(found, "hwr_process_rss_bytes", kind="anon") == 30 * MIB
    assert of(found, "hwr_process_rss_bytes", kind="file") == 20 * MIB  # the worker's own: the agent has none
    assert of(found, "hwr_process_pss_bytes") == 40 * MIB
    assert of(found, "hwr_memory_sample_timestamp_seconds", source="smaps_rollup") == pytest.approx((now + OFFSET_NS) / 1e9)
    assert of(found, "hwr_artifact_anonymous_bytes", artifact=key(1)[:12]) == 5
    assert seen.state.memory["rss_anon_bytes"] == 10 * MIB
    assert seen.state.artifacts[key(1)]["anonymous_bytes"] == 0
    older = replace(seen, memory={name: replace(figure, sampled_ns=1) for name, figure in seen.memory.items()})
    assert of(exposed(snapshot((older,), at_ns=now)), "hwr_process_rss_bytes", kind="anon") == 10 * MIB


@pytest.mark.parametrize("liveness", [Liveness.DEAD, Liveness.EXITED])
def test_the_dead_hold_nothing_and_have_counted(liveness: Liveness) -> None:
    """Memory, leases, waits and registrations of a dead process are gone from the gauges; counters and its last phase are not."""
    one = busy(hub())
    now = boot_ns()
    found = exposed(snapshot((worker(one, at_ns=now, liveness=liveness, verdict=replace(STOPPED, stall=Stall.DEAD)),), at_ns=now))
    assert of(found, "hwr_worker_up") == 0
    assert of(found, "hwr_worker_stall", hwr_worker_stall="dead") == 1
    assert of(found, "hwr_worker_phase", hwr_worker_phase="waiting_lock") == 1
    assert of(found, "hwr_stages_total", stage="lookup") == 1
    assert of(found, "hwr_gc_collections_total", generation="0") == 7
    assert of(found, "hwr_leases") == 0
    assert of(found, "hwr_lock_waiters", lock="build") == 0
    assert of(found, "hwr_collective_sequence", op="all_reduce") == 17
    for name in (
        "process_rss_bytes",
        "process_pss_bytes",
        "artifact_mapped_bytes",
        "allocator_bytes",
        "operation_started_timestamp_seconds",
    ):
        assert not [sample for sample, _ in found if sample == f"hwr_{name}"], name
    assert not [sample for sample, _ in found if sample == "hwr_collective_started_timestamp_seconds"]


def test_what_cannot_be_known_is_absent() -> None:
    """A worker of unknown liveness is neither up nor down; a node without a reading has no figures, and no zeros in their place."""
    now = boot_ns()
    seen = replace(
        snapshot((worker(busy(hub()), at_ns=now, liveness=Liveness.UNKNOWN),), at_ns=now),
        kernel=None,
        stores=(),
        artifacts=(),
        collectors=(CollectorHealth(name=CollectorName.KERNEL, problem="/proc is empty"),),
    )
    found = exposed(seen)
    assert of(found, "hwr_worker_up") is None
    assert of(found, "hwr_collector_success", collector="kernel") == 0
    for name in ("node_pinned_bytes", "node_pressure_stalled_seconds_total", "store_free_bytes", "collector_timestamp_seconds"):
        assert not [sample for sample, _ in found if sample == f"hwr_{name}"], name


def test_several_collectors_of_a_name_are_one_series() -> None:
    """It succeeds if all do; the time is the oldest one's, and there is none if one never brought anything."""
    seen = node(1)
    found = exposed(seen)
    assert of(found, "hwr_collector_success", collector="store") == 0
    assert of(found, "hwr_collector_duration_seconds", collector="store") == pytest.approx(0.09)
    assert of(found, "hwr_collector_timestamp_seconds", collector="store") == pytest.approx(seen.wall_ns(seen.taken_ns) / 1e9)
    never = replace(seen, collectors=(*seen.collectors, CollectorHealth(name=CollectorName.STORE, target="/new")))
    assert of(exposed(never), "hwr_collector_timestamp_seconds", collector="store") is None


def test_only_workers_that_have_the_name_are_shown() -> None:
    """One whose engine and rank were taken has no series, nor has the agent; two engines with the same ranks have both."""
    now = boot_ns()
    workers = (
        worker(busy(hub()), at_ns=now, shown=False),
        worker(busy(hub(start_ns=20)), at_ns=now),
        worker(busy(hub(start_ns=30)), at_ns=now, engine="default-2"),
        worker(busy(hub(1)), at_ns=now, role=Role.AGENT),
    )
    found = exposed(snapshot(workers, at_ns=now))
    ups = sorted(dict(labels)["engine"] for sample, labels in found if sample == "hwr_worker_up")
    assert ups == ["default", "default-2"]
    assert of(found, "hwr_workers", liveness="alive") == 3
    assert of(found, "hwr_runs_discovered") == 2
    assert of(found, "hwr_unreadable", collector="memory") == 1
    assert of(found, "hwr_unreadable", collector="other") == 0


def test_artifacts_in_use_come_before_large_ones() -> None:
    """At most 50; the one that somebody uses is among them although all others are larger."""
    found = exposed(node(1, artifacts=200))
    names = {dict(labels)["artifact"] for sample, labels in found if sample == "hwr_artifact_info"}
    assert len(names) == 50
    assert key(1)[:12] in names
    assert of(found, "hwr_artifact_mappers", artifact=key(1)[:12]) == 2
    assert of(found, "hwr_artifact_orphans") == 1


def test_sums_go_on_where_the_last_agent_ended() -> None:
    """A restarted agent neither falls nor counts twice, though a long journal is read anew in pieces and names are given otherwise."""
    name = "hwr.runtime.stage.end"
    now = boot_ns()

    def ran(steps: int, rank: int = 0, start_ns: int = 10, **more: Any) -> Any:
        one = hub(rank, start_ns=start_ns)
        for _ in range(steps):
            one.emit(E.StageEnded(stage="lookup", seconds=1.0), op="x")
        return worker(one, at_ns=now, **more)

    def total(exposition: Exposition, *workers: Any) -> float | None:
        return of(exposed(snapshot(workers, at_ns=now), exposition), "hwr_events_total", event=name)

    first = Exposition()
    assert total(first, ran(5), ran(7, 1)) == 12
    assert total(first, ran(3, start_ns=20), ran(7, 1)) == 15  # rank 0 restarted
    second = Exposition(first.totals())
    assert total(second) == 15
    assert total(second, ran(1, start_ns=20), ran(2, 1)) == 15  # the journals are read up to here
    assert total(second, ran(3, start_ns=20), ran(8, 1, engine="default-2")) == 16
    assert total(second, ran(4, start_ns=20), ran(8, 1), ran(2, 2)) == 19
    assert total(second, ran(1, start_ns=20), ran(8, 1)) == 20  # caught up, then configured again: it counts from 0
    assert total(Exposition(second.totals())) == 20


def test_sums_of_many_restarts_stay_small() -> None:
    """Of a thousand workers that came and went only the newest are kept apart, and their sum is right before and after a restart."""
    totals = Totals({})
    for restart in range(1000):
        sums = totals.sums({("run/e", "0", restart, 1): {("m", "a"): 1.0, ("m", "b"): 2.0}})
        assert sums == {("m", "a"): restart + 1.0, ("m", "b"): 2.0 * (restart + 1)}
    kept = totals.to_json()
    assert len(kept) < 2 * (KEPT_GONE + 3)
    again = Totals(kept)
    assert again.sums({}) == sums
    assert again.sums({("run/e", "0", 999, 1): {("m", "a"): 1.0, ("m", "b"): 2.0}}) == sums


def test_a_replaced_worker_counts_on_in_the_sums() -> None:
    """One without series of its own is summed as long as it is seen: the last agent may have ended before it wrote what it counted."""
    now = boot_ns()
    old, new = busy(hub(start_ns=10)), busy(hub(start_ns=20))
    before, after = worker(old, at_ns=now), worker(new, at_ns=now)
    first = Exposition()
    name = "hwr.runtime.stage.end"
    assert of(exposed(snapshot((before,), at_ns=now), first), "hwr_events_total", event=name) == 1
    kept = first.totals()
    old.emit(E.StageEnded(stage="lookup", seconds=1.0), op="s")
    gone = worker(old, at_ns=now, liveness=Liveness.DEAD, shown=False)
    assert of(exposed(snapshot((gone, after), at_ns=now), first), "hwr_events_total", event=name) == 3
    found = exposed(snapshot((gone, after), at_ns=now), Exposition(kept))
    assert of(found, "hwr_events_total", event=name) == 3
    assert of(found, "hwr_stages_total", stage="lookup") == 1


def test_what_is_no_base_is_left_out() -> None:
    """A file of totals that somebody else wrote changes nothing."""
    now = boot_ns()
    broken = {
        "x": 1.0,
        "[" * 5000: 1.0,
        '["last", "r", "0", "a", 1, "m"]': 2.0,
        '["retired", 5]': 3.0,
        '["retired", "hwr_other_total"]': 9.0,
    }
    found = exposed(snapshot((worker(busy(hub()), at_ns=now),), at_ns=now), Exposition(broken))
    assert of(found, "hwr_events_total", event="hwr.runtime.stage.end") == 1


@pytest.mark.soak
def test_eight_workers_render_in_25_milliseconds() -> None:
    """The best of 20 renderings; the rest is noise of the machine."""
    seen, exposition = node(artifacts=200), Exposition()
    costs = []
    for _ in range(20):
        begun = time.process_time()
        exposition.render(seen, OPENMETRICS)
        costs.append(time.process_time() - begun)
    assert min(costs) <= 0.025
