"""What a watcher needs from a worker's journal, and what its own folds to: merged, bounded, and the same from a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from telemetry_samples import RES

import hwr
from hwr import telemetry
from hwr.errors import HwrError
from hwr.options import Options
from hwr.telemetry import events as E
from hwr.telemetry.fold import MAX_COLLECTIVES, MAX_ROOTS, apply, fold
from hwr.telemetry.fold_node import MAX_VERDICTS
from hwr.telemetry.hub import Hub
from hwr.telemetry.state import MAX_KEYS, WorkerState


def hub() -> Hub:
    return Hub(RES, realtime_offset_ns=0)


def raw(event: str, attrs: dict[str, Any], seq: int = 1, **more: Any) -> dict[str, Any]:
    return {"mono_ns": seq, "seq": seq, "event": event, "attrs": attrs, **more}


def test_a_collective_is_open_until_its_own_end() -> None:
    """The sequence stays as the last one entered; an end of another operation closes nothing."""
    one = hub()
    one.emit(E.CollectiveBegun(op="all_reduce", sequence=6, world_size=4), op="a")
    one.emit(E.CollectiveEnded(seconds=0.1), op="a")
    one.emit(E.CollectiveBegun(op="all_reduce", sequence=7, world_size=4, deadline_seconds=5.0, bytes=10), op="b")
    one.emit(E.CollectiveBegun(op="barrier", sequence=1, world_size=4), op="c")
    one.emit(E.CollectiveEnded(seconds=0.1), op="c")
    held = one.state.collectives
    assert (held["all_reduce"]["sequence"], held["all_reduce"]["world_size"]) == (7, 4)
    assert held["all_reduce"]["begun_ns"] == one.state.ops["b"].begun_ns
    assert held["barrier"]["begun_ns"] is None
    current = one.state.current_operation()
    assert current is not None
    assert current.operation == "collective"
    assert WorkerState.from_json(json.loads(orjson.dumps(one.state.to_json()))) == one.state


def test_opened_stores_are_known_the_newest_last() -> None:
    """A worker's store is found through its journal; of many only the newest are kept."""
    one = hub()
    for number in (*range(20), 7):
        one.emit(E.DomainOpening(root=f"/stores/{number}"), op=f"d{number}")
    roots = list(one.state.roots)
    assert len(roots) == MAX_ROOTS
    assert roots[-1] == "/stores/7"
    assert "/stores/0" not in roots
    assert one.state.roots["/stores/7"] == one.state.last_ns


def test_a_load_says_when_it_counts_as_stalled() -> None:
    """Once, before anything can go wrong, with what the option says."""

    def nothing() -> Any:
        raise LookupError("there is no such model")

    with telemetry.record() as seen, pytest.raises((HwrError, LookupError)):
        hwr.load(nothing, "/nowhere", Options.of(telemetry=False, hwr_stall_after_seconds=5.0))
    (told,) = seen.of(E.PolicyRecorded)
    assert told.stall_after_seconds == 5.0
    assert fold(seen.records).stall_after_seconds == 5.0
    assert seen.names()[0] == E.PolicyRecorded.NAME


def test_samples_merge_and_null_takes_away() -> None:
    """Fields go into entries, entries into parts; what a sample does not name stays."""
    one = hub()
    one.emit(E.NodeSampled(processes={"1": {"state": "S", "name": "a"}, "2": {"state": "R"}}))
    one.emit(E.NodeSampled(processes={"1": {"state": "T"}, "2": None}, stores={"d": {"root": "/s", "entries": {"ready": 3}}}))
    assert one.state.node == {
        "processes": {"1": {"state": "T", "name": "a"}},
        "stores": {"d": {"root": "/s", "entries": {"ready": 3}}},
    }
    one.emit(E.NodeSampled(stores={"d": {"root": None}}))
    assert one.state.node["stores"]["d"]["root"] is None
    assert WorkerState.from_json(json.loads(orjson.dumps(one.state.to_json()))) == one.state


def test_the_last_verdict_on_each_worker_is_kept() -> None:
    """A later one replaces it; beyond a number the one that was judged longest ago goes."""
    one = hub()
    for number in range(MAX_VERDICTS + 5):
        one.emit(E.StallJudged(worker=f"run/r{number}", run_id="run", engine="e", rank=number, stall="stopped", confidence="high"))
    one.emit(E.StallJudged(worker="run/r9", run_id="run", engine="e", rank=9, stall="none", confidence="high", blames=("e/1",)))
    assert len(one.state.verdicts) == MAX_VERDICTS
    assert "run/r0" not in one.state.verdicts
    assert one.state.verdicts["run/r9"]["stall"] == "none"
    assert one.state.verdicts["run/r9"]["mono_ns"] == one.state.last_ns


def test_somebody_elses_samples_cannot_grow_the_state() -> None:
    """Entries, fields and texts without end are refused and counted; what was held stays."""
    state = WorkerState()
    deep: Any = "x"
    for _ in range(50):
        deep = [deep]
    hostile: list[dict[str, Any]] = [
        {"processes": {f"p{number}": {"a": 1} for number in range(5000)}},
        {"processes": {"p1": {f"f{number}": 1 for number in range(5000)}}},
        {"processes": {"p1": {"a": "x" * 100_000}}},
        {"processes": {"p1": {"a": [deep] * 2000}}},
        {"processes": {"x" * 5000: {"a": 1}}},
        {"processes": {"p1": 5}},
        {"processes": []},
        {"unknown": {"p1": {"a": 1}}},
    ]
    for seq, attrs in enumerate(hostile, 1):
        apply(state, raw(E.NodeSampled.NAME, attrs, seq))
    assert len(state.node["processes"]) == MAX_KEYS
    assert state.node["processes"]["p1"] == {"a": 1}
    assert set(state.node) == {"processes"}
    assert state.malformed == len(hostile) - 1
    for seq in range(100, 200):
        apply(state, raw(E.CollectiveBegun.NAME, {"op": f"op{seq}", "sequence": seq, "world_size": 2}, seq, op="o"))
        apply(state, raw(E.DomainOpening.NAME, {"root": "/" + "x" * 5000}, seq, op="o"))
        apply(state, raw(E.StallJudged.NAME, {"worker": "w" * seq, "evidence": ["x" * 100_000]}, seq))
    assert len(state.collectives) == MAX_COLLECTIVES
    assert (state.roots, state.verdicts) == ({}, {})


def test_a_checkpoint_of_an_earlier_release_is_taken() -> None:
    """It lacks what is new since; that is empty or unknown, and nothing is malformed."""
    told = WorkerState(seq=5, stages={"lookup": 2}).to_json()
    for name in ("roots", "collectives", "stall_after_seconds", "node", "verdicts"):
        del told[name]
    state = WorkerState()
    apply(state, raw(E.SegmentOpened.NAME, {"segment": 2, "state": told}, 5))
    assert (state.stages, state.malformed, state.roots, state.stall_after_seconds) == ({"lookup": 2}, 0, {}, None)
