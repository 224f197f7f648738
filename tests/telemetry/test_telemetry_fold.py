"""J5: one meaning for an event, live, from its journal, and from a copy; and none of it depends on who wrote the file."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from telemetry_samples import KEY, RES, play

from hwr.outcomes import Phase
from hwr.telemetry import events as E
from hwr.telemetry.catalogue import Observed
from hwr.telemetry.collector import HwrCollector
from hwr.telemetry.encode import decode
from hwr.telemetry.fold import MAX_ARTIFACTS, MAX_OPEN, apply, fold
from hwr.telemetry.hub import Hub
from hwr.telemetry.journal import JournalWriter
from hwr.telemetry.reader import read_state
from hwr.telemetry.state import MAX_KEYS, WorkerState


def live(tmp_path: Path) -> Hub:
    hub = Hub(RES, realtime_offset_ns=0)
    hub.open_journal(lambda head: JournalWriter(tmp_path, head, segment_bytes=100_000, kept=1000))
    return hub


def exposed(*states: WorkerState) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HwrCollector(lambda: [Observed(state=state, up=True, heartbeat_ns=1) for state in states]))
    generate_openmetrics(registry)
    return generate_latest(registry)


@pytest.mark.parametrize("seed", range(10))
def test_j5_live_journal_and_copy_are_one(seed: int, tmp_path: Path) -> None:
    """J5: whatever was emitted, NaN and cut lists included: the live state, the journal's fold and its copy's are equal."""
    journal, copied = tmp_path / "journal", tmp_path / "copy"
    journal.mkdir()
    hub = live(journal)
    chance = random.Random(seed)
    play(hub, 300, chance)
    hub.emit(E.MissExplained(key=KEY, sections=("source", "layout") * 40_000, candidates=1))
    hub.emit(E.AllocatorSampled(python_blocks=1, gc_collections=(1, 2, 3)))
    play(hub, 300, chance)
    shutil.copytree(journal, copied)
    state = hub.snapshot()
    assert read_state(journal) == state
    assert read_state(copied) == state
    assert WorkerState.from_json(json.loads(orjson.dumps(state.to_json()))) == state
    assert exposed(state) == exposed(read_state(copied))


def test_the_phase_is_that_of_the_innermost_operation() -> None:
    """An open operation shows as its phase; a bracket without an operator's name does not; afterwards the worker's own word counts."""
    hub = Hub(RES, realtime_offset_ns=0)
    told = []
    hub.emit(E.PhaseChanged(phase=Phase.RESOLVING))
    hub.emit(E.ResolutionBegun(mode="preferred", validation="full_checksum"), op="a")
    told.append(hub.state.phase())
    hub.emit(E.LookupBegun(key=KEY, validation="full_checksum"), op="b", parent="a")
    hub.emit(E.ChecksumBegun(key=KEY, planned_bytes=100, files=1), op="c", parent="b")
    told.append(hub.state.phase())
    hub.emit(E.ChecksumProgress(done_bytes=40, planned_bytes=100), op="c")
    current = hub.state.current_operation()
    assert current is not None
    assert (current.operation, current.planned_bytes, current.done_bytes) == ("checksum", 100, 40)
    hub.emit(E.ChecksumEnded(seconds=1.0, bytes=100), op="c")
    told.append(hub.state.phase())
    hub.emit(E.LookupEnded(), op="b")
    hub.emit(E.PhaseChanged(phase=Phase.READY))
    told.append(hub.state.phase())
    assert told == [Phase.RESOLVING, Phase.VALIDATING, Phase.RESOLVING, Phase.READY]
    hub.emit(E.WorkerExited())
    assert hub.state.phase() is Phase.EXITED


def test_an_earlier_state_is_corrected_by_the_next_checkpoint(tmp_path: Path) -> None:
    """J2, J5: events that a reader missed come back with the next segment; that they were missed stays told."""
    hub = Hub(RES, realtime_offset_ns=0)
    records: list[dict[str, Any]] = []
    hub.listen(lambda _, record: records.append(json.loads(json.dumps(record))))
    for _ in range(10):
        hub.emit(E.StageEnded(stage="lookup", seconds=1.0), op="x")
    missing = fold(record for record in records if record["seq"] not in (3, 4))
    assert (missing.stages["lookup"], missing.seq_gaps) == (8, 2)
    head = decode(hub._segment_head(2).rstrip())
    assert head is not None
    apply(missing, head)
    assert (missing.stages["lookup"], missing.seq_gaps) == (10, 2)


def test_unknown_events_and_versions_are_accepted() -> None:
    """A journal of a later version is read: what is unknown is counted, what is known counts."""
    later = {"v": 2, "mono_ns": 1, "seq": 1, "event": "hwr.future.thing.begin", "op": "a", "attrs": {"new": [1]}, "trace": "x"}
    known = {"v": 2, "mono_ns": 2, "seq": 2, "event": "hwr.worker.phase.change", "attrs": {"phase": "hibernating", "more": 1}}
    state = fold([later, known])
    assert (state.unknown_events, state.malformed, state.seq) == (1, 0, 2)
    assert state.phase() is Phase.STARTING
    exposed(state)


NAMES = st.sampled_from([kind.NAME for kind in E.all_events()])
FIELDS = st.sampled_from(
    [
        "op",
        "outcome",
        "seconds",
        "error.code",
        "lock",
        "key",
        "lease",
        "planned_bytes",
        "done_bytes",
        "bytes",
        "files",
        "tensors",
        "validation",
        "level",
        "sections",
        "stage",
        "result",
        "mode",
        "phase",
        "state",
        "source",
        "moment",
        "cost_seconds",
        "reason",
        "count",
        "cause",
        "address",
        "port",
        "deadline_seconds",
        "gc_collections",
        "python_blocks",
        "rss_anon_bytes",
    ]
)
WORDS = st.sampled_from(["ok", "checksum", "default", "a|b", "k" * 200, KEY, "full_checksum", "verify", "hash", "status", "\x1b[2J"])
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=3), max_leaves=6)
STATE_FIELDS = st.sampled_from(list(WorkerState.__slots__))
CHECKPOINTS = st.fixed_dictionaries({"state": st.dictionaries(STATE_FIELDS, VALUES, max_size=6)})
RECORDS = st.fixed_dictionaries(
    {
        "event": NAMES,
        "seq": st.integers(-5, 2**64 - 1) | st.integers(0, 5),
        "mono_ns": st.integers(-(2**63), 2**64 - 1),
        "attrs": st.dictionaries(FIELDS, VALUES, max_size=10) | CHECKPOINTS,
    },
    optional={"op": VALUES, "parent": VALUES, "res": st.dictionaries(st.sampled_from(list(RES)), VALUES)},
)


@settings(max_examples=150, deadline=None)
@given(st.lists(RECORDS, max_size=12))
def test_records_of_any_shape_never_raise(records: list[dict[str, Any]]) -> None:
    """Whatever the values are: the fold goes on, every view of the state works, and the exposition has no duplicate."""
    state = WorkerState()
    for record in records:
        decoded = decode(orjson.dumps(record))
        if decoded is None:  # a place beyond 64 bits, in a line that had to be cleaned
            assert max(record["seq"], record["mono_ns"]) >= 1 << 63
            continue
        apply(state, decoded)
    assert state.phase() in Phase
    state.current_operation()
    text = exposed(state, state).decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert "nan" not in text.lower()
    again = WorkerState.from_json(orjson.loads(orjson.dumps(state.to_json())))
    assert again == state


@given(st.binary(max_size=2000) | st.lists(RECORDS | VALUES, max_size=3).map(lambda items: b"\n".join(map(orjson.dumps, items))))
def test_lines_of_any_bytes_never_raise(text: bytes) -> None:
    """Nor do bytes that are no JSON at all."""
    state = WorkerState()
    for line in text.split(b"\n"):
        record = decode(line)
        if record is not None:
            apply(state, record)
    exposed(state)


JSON_ANY = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(STATE_FIELDS | FIELDS, inner), max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(STATE_FIELDS, JSON_ANY)
def test_a_checkpoint_is_taken_whole_or_not_at_all(name: str, value: Any) -> None:
    """A checkpoint with a field of another type is refused and counted; the state from before stays."""
    state = fold([{"mono_ns": 1, "seq": 1, "event": "hwr.worker.process.start", "attrs": {}}])
    told = {**WorkerState().to_json(), "seq": 9, name: value}
    apply(state, {"mono_ns": 2, "seq": 9, "event": E.SegmentOpened.NAME, "attrs": {"state": json.loads(orjson.dumps(told))}})
    assert (state.seq == told["seq"] and state.malformed == (told["malformed"])) or (state.seq, state.malformed) == (1, 1)
    exposed(state)


def test_somebody_elses_journal_cannot_grow_the_state() -> None:
    """Label values without end, operations without end, artifacts without end: every table has its limit, and memory is flat."""

    def hostile(start: int, count: int) -> None:
        for number in range(start, start + count):
            for event, attrs in (
                ("hwr.store.lock.end", {"outcome": "ok", "seconds": 1, "lock": f"lock{number}"}),
                ("hwr.store.lock.begin", {"lock": "build", "file": "f" * 1000, "deadline_seconds": 1, "deep": [[["x"] * 100]] * 100}),
                ("hwr.memory.artifact.sample", {"source": f"s{number}", "cost_seconds": 1, "key": f"{number:064x}", "moment": "closed"}),
                ("hwr.store.lease.open", {"lease": f"l{number}", "key": "k", "bytes": 1, "files": 1, "tensors": 1, "validation": "v"}),
                ("hwr.runtime.failure.record", {"error.code": f"code{number}", "stage": "x" * 60_000}),
                ("hwr.validation.artifact.end", {"outcome": "ok", "seconds": 1, "level": f"level{number}"}),
            ):
                apply(state, {"mono_ns": 1, "seq": number, "event": event, "op": f"o{number}", "attrs": attrs})

    state = WorkerState()
    hostile(0, 3000)
    assert len(state.ops) <= MAX_OPEN
    assert len(state.artifacts) <= MAX_ARTIFACTS
    assert len(state.leases) <= MAX_ARTIFACTS
    assert max(len(table) for table in (state.lock_waits, state.failures, state.validation_seconds, state.memory_sample_ns)) <= MAX_KEYS
    assert state.malformed > 0
    exposed(state)
    tracemalloc.start()
    hostile(3000, 1000)
    before = tracemalloc.take_snapshot()
    hostile(4000, 1000)
    growth = sum(change.size_diff for change in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    assert growth < 200_000


def test_counters_never_fall() -> None:
    """A negative or huge amount is malformed, not subtracted."""
    state = WorkerState()
    for seq, seconds in enumerate((2.0, -1.0, "1", None, 1e300, 3), 1):
        attrs = {"outcome": "ok", "seconds": seconds, "stage": "lookup"}
        apply(state, {"mono_ns": 1, "seq": seq, "event": "hwr.runtime.stage.end", "op": "a", "attrs": attrs})
    assert state.stage_seconds == {"lookup": 5.0}
    assert state.malformed == 4
