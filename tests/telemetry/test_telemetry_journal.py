"""J1, J2: whole lines in one write each, and segments that can be read alone."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from telemetry_samples import RES, play

from hwr import telemetry
from hwr.telemetry import events as E
from hwr.telemetry.hub import Hub
from hwr.telemetry.journal import SEGMENTS_KEPT, JournalWriter, segment_name, segment_numbers
from hwr.telemetry.reader import JournalReader, read_state


def journal(hub: Hub, directory: Path, **sizes: Any) -> JournalWriter:
    made: list[JournalWriter] = []

    def make(head: Callable[[int], bytes]) -> JournalWriter:
        made.append(JournalWriter(directory, head, **sizes))
        return made[0]

    hub.open_journal(make)
    return made[0]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_j1_one_write_a_line(python: Callable[..., str], tmp_path: Path) -> None:
    """J1: the kernel counts one write call for each event, neither more nor less."""
    code = """
import sys
from pathlib import Path
from hwr.telemetry import events as E
from hwr.telemetry.hub import Hub
from hwr.telemetry.journal import JournalWriter
def calls():
    text = Path("/proc/self/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["syscw"])
hub = Hub({}, realtime_offset_ns=0)
hub.open_journal(lambda head: JournalWriter(Path(sys.argv[1]), head))
before = calls()
for done in range(500):
    hub.emit(E.ChecksumProgress(done_bytes=done, planned_bytes=500), op="a")
hub.emit(E.BuffersIgnored(names=("x" * 1000,) * 1000))
print(calls() - before)
"""
    assert python(code, tmp_path) == "501\n"
    assert len(records(tmp_path / segment_name(1))) == 502


def test_j1_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    """J1: threads write at once, a reader follows meanwhile: each line is whole, the numbers have no gap."""
    hub = Hub(RES, realtime_offset_ns=0)
    journal(hub, tmp_path, segment_bytes=200_000, kept=100)
    reader = JournalReader(tmp_path, from_start=True)

    def emit() -> None:
        for count in range(300):
            hub.emit(E.EndpointFailed(address="a" * 200, port=count, problem="p" * (count * 7)))

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reader.poll()
    state = reader.poll()
    reader.close()
    assert (state.seq, state.seq_gaps, state.malformed) == (1200, 0, 0)
    assert state == hub.snapshot()
    assert len(segment_numbers(tmp_path)) > 3


@pytest.mark.parametrize("seed", range(8))
def test_j2_reading_may_begin_at_any_segment(seed: int, tmp_path: Path) -> None:
    """J2: whichever segments are left, the fold of them is the fold of all, and is what the writer has."""
    hub = Hub(RES, realtime_offset_ns=0)
    journal(hub, tmp_path, segment_bytes=20_000, kept=10_000)
    play(hub, 1200, random.Random(seed))
    expected = hub.snapshot()
    numbers = segment_numbers(tmp_path)
    assert len(numbers) > 5
    whole = JournalReader(tmp_path, from_start=True)
    assert whole.poll() == expected
    whole.close()
    assert read_state(tmp_path) == expected
    for number in numbers[:-1]:
        (tmp_path / segment_name(number)).unlink()
        rest = JournalReader(tmp_path, from_start=True)
        assert rest.poll() == expected
        rest.close()


def test_j2_a_segment_begins_with_resource_and_state(tmp_path: Path) -> None:
    """J2: the first line of each segment has `res` and the state; no other line has `res`."""
    hub = Hub(RES, realtime_offset_ns=0)
    journal(hub, tmp_path, segment_bytes=4000, kept=100)
    play(hub, 200, random.Random(1))
    before = 0
    for number in segment_numbers(tmp_path):
        first, *others = records(tmp_path / segment_name(number))
        assert first["event"] == E.SegmentOpened.NAME
        assert first["res"] == RES
        assert first["seq"] == before
        assert (first["attrs"]["state"] or {"seq": 0})["seq"] == before
        assert not any("res" in record for record in others)
        assert [record["seq"] for record in others] == list(range(before + 1, before + 1 + len(others)))
        before = others[-1]["seq"]


def test_the_newest_segments_are_kept(tmp_path: Path) -> None:
    """Eight segments stay, the newest, and the state still has everything."""
    hub = Hub(RES, realtime_offset_ns=0)
    journal(hub, tmp_path, segment_bytes=3000)
    play(hub, 1000, random.Random(2))
    numbers = segment_numbers(tmp_path)
    assert len(numbers) == SEGMENTS_KEPT
    assert numbers[0] > 10
    assert read_state(tmp_path) == hub.snapshot()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]


def test_j2_a_roll_that_was_cut_short_harms_nobody(tmp_path: Path) -> None:
    """J2: killed while a segment begins, the one before stays the newest; a copy that cut the last segment reads the one before."""
    hub = Hub(RES, realtime_offset_ns=0)
    writer = journal(hub, tmp_path, segment_bytes=20_000, kept=100)
    play(hub, 300, random.Random(3))
    newest = segment_numbers(tmp_path)[-1]
    (tmp_path / f".{segment_name(newest + 1)}.new").write_bytes(b'{"v":1,"ts":"2026')
    assert read_state(tmp_path) == hub.snapshot()
    writer._roll()
    hub.emit(E.WorkerStarted())
    assert read_state(tmp_path) == hub.snapshot()
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path, copied, ignore=shutil.ignore_patterns("copy"))
    for rest in (b"", b'{"v":1,"ts":"2026'):
        (copied / segment_name(newest + 2)).write_bytes(rest)
        assert read_state(copied).seq == hub.state.seq - (0 if newest + 1 in segment_numbers(copied) else 1)


def test_a_reader_follows(tmp_path: Path) -> None:
    """A reader that stays open sees what is appended, over rolls and over segments that went before it came."""
    hub = Hub(RES, realtime_offset_ns=0)
    journal(hub, tmp_path, segment_bytes=3000, kept=2)
    reader = JournalReader(tmp_path)
    chance = random.Random(4)
    for steps in (1, 0, 5, 3, 400, 2, 1):  # 400 of them: segments come and go unseen
        play(hub, steps, chance)
        told = reader.poll()
        assert (told.seq, told.events) == (hub.state.seq, hub.state.events)
    reader.close()
    assert told == hub.snapshot()


def test_a_partial_line_waits_and_a_bad_one_counts(tmp_path: Path) -> None:
    """The last line may be half written: it waits for its rest. A bad line between good ones is counted, and loses no other."""
    hub = Hub(RES, realtime_offset_ns=0)
    journal(hub, tmp_path)
    hub.emit(E.WorkerStarted())
    line = json.dumps({"v": 1, "mono_ns": 5, "seq": 2, "event": "hwr.worker.process.exit", "attrs": {}}).encode()
    path = tmp_path / segment_name(1)
    reader = JournalReader(tmp_path)
    with path.open("ab", buffering=0) as file:
        file.write(line[:20])
        assert (reader.poll().seq, reader.state.malformed) == (1, 0)
        file.write(line[20:])
        assert (reader.poll().seq, reader.state.malformed) == (1, 0)
        file.write(b"\n\n\x00\xff torn\n" + line.replace(b'"seq": 2', b'"seq": 3') + b"\n")
        assert (reader.poll().seq, reader.state.malformed, reader.state.seq_gaps) == (3, 1, 0)
    assert reader.state.exited
    reader.close()


def test_configuring_again_begins_anew(tmp_path: Path) -> None:
    """A process that configures twice writes a second segment; its state begins anew, for every reader."""
    first = telemetry.configure(run_dir=tmp_path)
    assert first is not None
    for _ in range(5):
        telemetry.emit(E.StepsEnded(steps=1))
    reader = JournalReader(first, from_start=True)
    assert reader.poll().events["hwr.runtime.steps.end"] == 5
    assert telemetry.configure(run_dir=tmp_path) == first
    telemetry.emit(E.StepsEnded(steps=1))
    own = telemetry.snapshot()
    assert own is not None
    assert own.events["hwr.runtime.steps.end"] == 1
    assert segment_numbers(first) == [1, 2]
    for state in (reader.poll(), read_state(first)):
        assert state.events == own.events
        assert state == own
    reader.close()
