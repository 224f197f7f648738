"""A copied directory is the node as it was: what the agent saw and what workers said, at any moment; odd files are only files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from node_journals import write
from node_snapshots import SECOND, STOPPED, busy, hub, key, snapshot, worker

import diag
from diag.analysis.stall import Verdict
from diag.node.exposition import Exposition
from diag.node.journal import NodeJournal
from diag.node.recorded import name_of
from diag.node.replay import NOBODY_JUDGED, NothingRecorded, moments, replay
from diag.node.snapshot import NodeSnapshot, from_json, to_json
from hwr.outcomes import Liveness, Stall, View
from hwr.telemetry import events as E
from hwr.telemetry.clock import boot_ns

REPOSITORY = Path(diag.__file__).parents[1]


def recorded(run_dir: Path, count: int = 2) -> tuple[NodeSnapshot, NodeJournal, list[Any]]:
    """Return the node that an agent recorded below a run directory, with the journals still open."""
    hubs = [hub(rank) for rank in range(count)]
    directories = [write(run_dir, one) for one in hubs]
    agent = hub(0, pid=77, start_ns=99)
    write(run_dir, agent, "agent", role="agent")
    agent.emit(E.WorkerStarted())
    for one in hubs:
        busy(one)
    now = boot_ns()
    workers = tuple(worker(one, at_ns=now, directory=str(place)) for one, place in zip(hubs, directories, strict=True))
    seen = snapshot((replace(workers[0], engine="second", verdict=STOPPED), *workers[1:]), at_ns=now)
    journal = NodeJournal(agent.emit)
    journal.record(seen)
    return seen, journal, [*hubs, agent]


def test_a_copy_is_the_node_as_the_agent_saw_it(tmp_path: Path) -> None:
    """Kernel, stores, locks, artifacts, processes, memory, names and verdicts come back as they were; liveness is `recorded`."""
    seen, _, hubs = recorded(tmp_path / "runs")
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    again = replay(tmp_path / "copy")
    assert again.view is View.REPLAY
    for part in ("kernel", "stores", "locks", "cgroups", "run_directories", "host", "boot_id", "started_ns", "unreadable"):
        assert getattr(again, part) == getattr(seen, part), part
    assert sorted(again.artifacts, key=lambda one: one.key) == sorted(seen.artifacts, key=lambda one: one.key)
    assert again.collectors == seen.collectors
    assert [one.name for one in again.workers] == ["default/1", "second/0"]
    for one, was in zip(again.workers, sorted(seen.workers, key=lambda one: one.engine), strict=True):
        assert (one.memory, one.artifacts, one.pid, one.verdict) == (was.memory, was.artifacts, was.pid, was.verdict)
        assert one.process is not None
        assert one.process == was.process
        assert one.liveness is Liveness.RECORDED
        assert one.state.seq == hubs[one.rank].state.seq
    assert from_json(to_json(again)) == again
    assert b"hwr_worker_stall" in Exposition().render(again, "")[0]


def test_snapshots_fit_the_published_schema(tmp_path: Path) -> None:
    """What the agent hands out and what a copy becomes are valid for docs/schema/node-snapshot.json; a wrong one is not."""
    schema = json.loads((REPOSITORY / "docs" / "schema" / "node-snapshot.json").read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    seen, _, _ = recorded(tmp_path)
    for one in (seen, replay(tmp_path), replace(seen, workers=(), kernel=None, stores=())):
        validator.validate(json.loads(to_json(one)))
    wrong = {**json.loads(to_json(seen)), "workers": [{"engine": 5}]}
    assert not validator.is_valid(wrong)


def test_hours_later_a_checkpoint_has_it_all(tmp_path: Path) -> None:
    """The segment in which a part was told is long gone: the checkpoint has it, names that are not ASCII and threads included."""
    agent = hub(0, pid=77, start_ns=99)
    place = write(tmp_path, agent, "agent", role="agent", segment_bytes=20_000)
    now = boot_ns()
    one = worker(busy(hub()), at_ns=now)
    assert one.process is not None
    thread = replace(one.process.threads[0], name="Grüße\\x1b")
    seen = snapshot((replace(one, process=replace(one.process, threads=(thread,) * 5), verdict=STOPPED),), at_ns=now)
    NodeJournal(agent.emit).record(seen)
    for _ in range(3000):
        agent.emit(E.CollectorRecovered(collector="store", target="/s"))
    assert not (place / "events.000001.jsonl").exists()
    write(tmp_path, one_hub := hub())
    one_hub.emit(E.WorkerStarted())
    for at_ns in (None, boot_ns()):
        again = replay(tmp_path, at_ns)
        (found,) = again.workers
        assert found.process is not None
        assert found.process.threads == (thread,) * 5
        assert found.verdict == STOPPED
        for part in ("kernel", "stores", "locks", "cgroups", "collectors"):
            assert getattr(again, part) == getattr(seen, part), part


def test_a_moment_of_the_past_is_seen_as_it_was_then(tmp_path: Path) -> None:
    """Between two samples the older one holds; what a worker said later, and what was judged later, is not there yet."""
    seen, journal, hubs = recorded(tmp_path)
    first, then = moments(tmp_path)
    assert first <= then <= boot_ns()
    hubs[0].emit(E.StageEnded(stage="lookup", seconds=1.0), op="z")
    calm = replace(seen.workers[0], verdict=Verdict())
    journal.record(replace(seen, workers=(calm, seen.workers[1]), locks=(), taken_ns=seen.taken_ns + SECOND))
    before, after = replay(tmp_path, then), replay(tmp_path)
    assert before.locks == seen.locks
    assert after.locks == ()
    assert before.taken_ns == then
    assert [one.verdict.stall for one in before.workers] == [Stall.NONE, Stall.STOPPED]
    assert [one.verdict.stall for one in after.workers] == [Stall.NONE, Stall.NONE]
    stages = [snapshot.workers[1].state.stages["lookup"] for snapshot in (before, after)]
    assert stages == [1, 2]
    with pytest.raises(NothingRecorded):
        replay(tmp_path, first - SECOND)


def test_without_an_agent_nobody_judged(tmp_path: Path) -> None:
    """One run, or one worker's directory: the worker's own words, and that no agent recorded it."""
    places = [write(tmp_path / "runs", busy_hub, "one") for busy_hub in (hub(0), hub(1))]
    for rank, place in enumerate(places):
        assert place.name.startswith(f"r{rank}.")
    with pytest.raises(NothingRecorded):
        replay(tmp_path / "runs")  # a head without an event says nothing yet
    other = busy(hub(2))
    write(tmp_path / "runs", other, "one")
    other.emit(E.PhaseChanged(phase="serving"))
    for directory in (tmp_path / "runs", tmp_path / "runs" / "one"):
        again = replay(directory)
        (only,) = again.workers
        assert (only.rank, only.verdict.stall, only.verdict.evidence) == (2, Stall.NONE, (NOBODY_JUDGED,))
        assert only.state.artifacts[key(1)]["mapped_bytes"]
        assert again.kernel is None
    with pytest.raises(NothingRecorded):
        moments(tmp_path / "nowhere")


def said(run_dir: Path, run: str, *, start_ns: int, boot: str = "boot") -> Any:
    """Write a journal of one event; the process began at `start_ns`."""
    one = hub(0, start_ns=start_ns)
    one.res["boot_id"] = boot
    write(run_dir, one, run)
    one.emit(E.WorkerStarted())
    return one


def test_names_without_an_agent(tmp_path: Path) -> None:
    """Two of one engine and rank that lived at one time are two engines; one that came after another's end takes its name."""
    said(tmp_path, "a", start_ns=10)
    said(tmp_path, "b", start_ns=20)
    said(tmp_path, "c", start_ns=boot_ns() + 1)
    again = replay(tmp_path)
    assert sorted((one.run_id, one.engine, one.shown) for one in again.workers) == [
        ("a", "default", False),
        ("b", "default-2", True),
        ("c", "default", True),
    ]


def test_another_boot_is_left_out_and_named(tmp_path: Path) -> None:
    """Its clock began anew: nothing of it can be put beside the others."""
    said(tmp_path, "a", start_ns=10, boot="before")
    said(tmp_path, "b", start_ns=10, boot="now")
    again = replay(tmp_path)
    assert [one.run_id for one in again.workers] == ["b"]
    assert again.unreadable == ("journals of other boots are left out: 1",)


def test_what_is_no_journal_is_passed_over(tmp_path: Path) -> None:
    """A FIFO, a link, a file of ten sparse gigabytes, lines of nonsense and an agent that tells lies: the rest is there, nothing raises."""
    seen, _, _ = recorded(tmp_path)
    for number, plant in enumerate(
        (os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), lambda path: path.write_bytes(b"\x00{]\n" * 9))
    ):
        place = tmp_path / "odd" / f"r{number}.1.1"
        place.mkdir(parents=True)
        plant(place / "events.000001.jsonl")
    sparse = tmp_path / "odd" / "r7.1.1"
    sparse.mkdir()
    with (sparse / "events.000001.jsonl").open("wb") as file:
        file.truncate(10 << 30)
    liar = tmp_path / "odd" / "r8.5.100000"
    liar.mkdir()
    parts: dict[str, Any] = {
        "node": {"kernel": {"sampled_ns": "soon"}, "agent": {"host": 5, "unreadable": [[], {}]}, "pressure": {"a": 1, "b": {"x": []}}},
        "workers": {name_of(seen.workers[0].directory): {"engine": "\u001b[31m", "pid": -1, "shown": "no", "notes": [1]}},
        "processes": {"-1": {"pid": "x"}},
        "memory": {name_of(seen.workers[0].directory): {"pss": 5, "rss": {"bytes": "many"}}},
        "uses": {"x": {}},
        "artifacts": {"k": {"key": []}},
        "locks": {"l": {"kind": "none"}},
        "stores": {"s": {"domain": 1}},
    }
    head = {"v": 1, "ts": "", "mono_ns": boot_ns(), "seq": 0, "event": E.SegmentOpened.NAME, "attrs": {"segment": 1}}
    head["res"] = {"hwr.role": "agent", "boot_id": "boot", "hwr.rank": -5}
    lines = [head]
    for number, (part, entries) in enumerate(parts.items(), 1):
        lines.append({"mono_ns": boot_ns(), "seq": number, "event": E.NodeSampled.NAME, "attrs": {part: entries}})
    verdict = {"worker": name_of(seen.workers[0].directory), "stall": "bored", "evidence": 5}
    lines.append({"mono_ns": boot_ns(), "seq": 99, "event": E.StallJudged.NAME, "attrs": verdict})
    (liar / "events.000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = replay(tmp_path)
    assert len(again.workers) == 2
    assert all(one.engine.isprintable() for one in again.workers)
    assert (again.kernel, again.stores, again.locks) == (None, (), ())
    assert Exposition().render(again, "")
    assert from_json(to_json(again))
