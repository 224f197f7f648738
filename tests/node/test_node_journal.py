"""What the agent writes: changes beyond noise, verdicts and failures once, little enough to keep hours, and never a line too long."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from node_snapshots import MIB, SECOND, STOPPED, busy, hub, snapshot, worker

from diag.node.journal import NodeJournal
from diag.node.snapshot import CollectorHealth, MemoryFigure, NodeSnapshot
from hwr.outcomes import CollectorName, Liveness, MemorySource, Stall
from hwr.telemetry import events as E
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.encode import encode
from hwr.telemetry.hub import Hub
from hwr.telemetry.schema import problems

HOURS_BYTES_PER_SECOND = 2048


class Written:
    """A hub in memory, with what a journal of it would hold."""

    def __init__(self) -> None:
        self.hub: Hub = hub(pid=77)
        self.records: list[dict[str, Any]] = []
        self.hub.listen(lambda _event, record: self.records.append(record))
        self.journal = NodeJournal(self.hub.emit)

    def record(self, seen: NodeSnapshot) -> list[dict[str, Any]]:
        """Record a snapshot and return what was written for it."""
        del self.records[:]
        self.journal.record(seen)
        return list(self.records)

    def samples(self, seen: NodeSnapshot) -> dict[str, Any]:
        """Record a snapshot and return the parts of its samples."""
        merged: dict[str, Any] = {}
        for record in self.record(seen):
            if record["event"] == E.NodeSampled.NAME:
                for part, entries in record["attrs"].items():
                    merged.setdefault(part, {}).update(entries)
        return merged


def scene(count: int = 8, artifacts: int = 3, at_ns: int | None = None) -> NodeSnapshot:
    now = at_ns or boot_ns()
    return snapshot(tuple(worker(busy(hub(rank)), at_ns=now) for rank in range(count)), at_ns=now, artifacts=artifacts)


def later(seen: NodeSnapshot, seconds: float = 1.0, **more: Any) -> NodeSnapshot:
    """Return the same node a bit later: heartbeats, times of sampling and cheap counters went on."""
    by = int(seconds * SECOND)
    workers = []
    for one in seen.workers:
        assert one.process is not None
        assert one.heartbeat_ns is not None
        flip = "R" if one.process.state == "S" else "S"
        process = replace(
            one.process, state=flip, sampled_ns=one.process.sampled_ns + by, utime_s=(one.process.utime_s or 0) + seconds / 2, majflt=9
        )
        memory = {
            name: replace(figure, bytes=figure.bytes + 4096, sampled_ns=figure.sampled_ns + by) for name, figure in one.memory.items()
        }
        workers.append(replace(one, heartbeat_ns=one.heartbeat_ns + by, process=process, memory=memory))
    collectors = tuple(replace(each, seconds=0.01, sampled_ns=(each.sampled_ns or 0) + by) for each in seen.collectors)
    assert seen.kernel is not None
    kernel = replace(seen.kernel, sampled_ns=seen.kernel.sampled_ns + by, vmstat={"compact_stall": seen.kernel.vmstat["compact_stall"] + 1})
    changes: dict[str, Any] = {"taken_ns": seen.taken_ns + by, "workers": tuple(workers), "collectors": collectors, "kernel": kernel}
    return replace(seen, **{**changes, **more})


def test_the_first_sample_has_everything_and_fits_its_schema() -> None:
    """Every part is told, in lines of less than 64 KiB although there are thousands of artifacts, and nothing is cut."""
    written = Written()
    seen = scene(artifacts=3000)
    records = written.record(seen)
    samples = [record for record in records if record["event"] == E.NodeSampled.NAME]
    assert len(samples) > 1
    for record in samples:
        assert len(encode(record)) < 64 << 10
        assert "cut" not in record["attrs"]
        assert problems(json.loads(encode(record))) == []
    assert {part for record in samples for part in record["attrs"]} == set(E.NodeSampled.__slots__)
    assert len(written.hub.state.node["artifacts"]) == 500
    assert written.hub.state.malformed == 0


def test_noise_is_not_told_and_movement_is() -> None:
    """Heartbeats, times, a page more, a process that runs and sleeps: nothing. Two MiB more, another state: that, and no more."""
    written = Written()
    seen = scene(2)
    written.record(seen)
    seen = later(seen)
    assert written.samples(seen) == {}
    first = seen.workers[0]
    assert first.process is not None
    memory = {**first.memory, "pss": MemoryFigure(bytes=60 * MIB, source=MemorySource.SMAPS_ROLLUP, sampled_ns=seen.taken_ns)}
    moved = replace(first, memory=memory, process=replace(first.process, state="T"))
    told = written.samples(replace(seen, workers=(moved, *seen.workers[1:])))
    assert list(told) == ["processes", "memory"]
    assert told["processes"] == {"4000": {"state": "T", "sampled_ns": first.process.sampled_ns}}
    assert told["memory"] == {
        "run/r0.4000.10": {"pss": {"bytes": 60 * MIB, "source": "smaps_rollup", "sampled_ns": seen.taken_ns, "cost_seconds": None}}
    }


def test_what_went_is_taken_away() -> None:
    """A process, a lock and a worker that are not there any more are null once, and gone from what the fold holds."""
    written = Written()
    seen = scene(2)
    written.record(seen)
    told = written.samples(replace(seen, workers=seen.workers[:1], locks=()))
    assert told["workers"] == {"run/r1.4001.10": None}
    assert told["processes"] == {"4001": None}
    assert list(told["locks"].values()) == [None]
    assert written.hub.state.node["locks"] == {}
    assert list(written.hub.state.node["workers"]) == ["run/r0.4000.10"]


def test_a_silent_heart_is_told_once_and_its_return_too() -> None:
    """While it beats its time is noise; three seconds without are a fact."""
    written = Written()
    seen = scene(1)
    written.record(seen)
    (one,) = seen.workers
    told = written.samples(replace(seen, taken_ns=seen.taken_ns + 4 * SECOND))
    assert told["workers"]["run/r0.4000.10"] == {"silent_since_ns": one.heartbeat_ns}
    assert "workers" not in written.samples(replace(seen, taken_ns=seen.taken_ns + 5 * SECOND))
    beating = replace(one, heartbeat_ns=seen.taken_ns + 6 * SECOND)
    told = written.samples(replace(seen, taken_ns=seen.taken_ns + 6 * SECOND, workers=(beating,)))
    assert told["workers"]["run/r0.4000.10"] == {"silent_since_ns": None}


def test_a_verdict_is_told_when_its_class_or_whom_it_blames_changes() -> None:
    """Not at first when all is well, not when only the evidence counts on; and again when it is over."""
    written = Written()
    seen = scene(1)
    (one,) = seen.workers

    def judged(**changes: Any) -> list[dict[str, Any]]:
        now = replace(seen, workers=(replace(one, verdict=replace(STOPPED, **changes)),))
        return [record["attrs"] for record in written.record(now) if record["event"] == E.StallJudged.NAME]

    assert [record for record in written.record(seen) if record["event"] == E.StallJudged.NAME] == []
    (told,) = judged()
    assert (told["worker"], told["stall"], told["runbook"]) == ("run/r0.4000.10", "stopped", "stall.md#stopped")
    assert told["blames"] == ["default/0"]
    assert judged(evidence=("the kernel says T for 2 s",)) == []
    assert len(judged(blames=("pid 5",))) == 1
    (over,) = judged(stall=Stall.NONE, blames=(), evidence=(), runbook="")
    assert over["stall"] == "none"
    assert written.hub.state.verdicts["run/r0.4000.10"]["stall"] == "none"


def test_a_collector_that_fails_is_named_once() -> None:
    """One line when it begins, one when it ends, and a text that counts seconds is no news."""
    written = Written()
    seen = replace(scene(0), collectors=())

    def health(ok: bool, problem: str | None, seconds: float = 0) -> list[str]:
        one = CollectorHealth(name=CollectorName.STORE, target="/s", ok=ok, problem=problem, sampled_ns=1, seconds=0.1)
        now = replace(seen, collectors=(one,), taken_ns=seen.taken_ns + int(seconds * SECOND))
        return [record["event"] for record in written.record(now) if "collector" in record["event"]]

    assert health(True, None) == []
    assert health(False, "hangs for 3 s") == [E.CollectorFailed.NAME]
    assert health(False, "hangs for 4 s", 1) == []
    assert health(False, "hangs for 99 s", 96) == [E.CollectorFailed.NAME]
    assert health(True, None, 97) == [E.CollectorRecovered.NAME]
    assert health(True, None, 98) == []


@pytest.mark.parametrize("count", [8])
def test_hours_fit_into_the_journal(count: int) -> None:
    """Eight busy workers for ten minutes: at most 2 KiB a second after the first line, and what is folded of it stays the same size."""
    written = Written()
    seen = scene(count, artifacts=200)
    written.record(seen)
    total, longest = 0, 600
    for _ in range(longest):
        seen = later(seen)
        total += sum(len(encode(record)) for record in written.record(seen))
    assert total / longest <= HOURS_BYTES_PER_SECOND
    assert written.hub.state.malformed == 0
    assert all(one.liveness is Liveness.ALIVE for one in seen.workers)
