"""Journals are somebody else's files: nothing in them blocks, misleads or exhausts a reader that may be privileged."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwr.errors import Unavailable
from hwr.telemetry import reader as reader_module
from hwr.telemetry.alive import AliveFile, Beat, is_held, read_beat
from hwr.telemetry.encode import MAX_LINE_BYTES
from hwr.telemetry.journal import segment_name
from hwr.telemetry.reader import JournalReader, read_state


def line(seq: int, event: str = "hwr.worker.process.start", **attrs: Any) -> bytes:
    return json.dumps({"v": 1, "mono_ns": seq, "seq": seq, "event": event, "attrs": attrs}).encode() + b"\n"


def problem_of(directory: Path) -> str:
    reader = JournalReader(directory)
    reader.poll()
    reader.close()
    assert isinstance(reader.problem, Unavailable)
    return reader.problem.reason


@pytest.mark.parametrize("trap", ["link", "fifo", "directory", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(trap: str, tmp_path: Path) -> None:
    """A link, a FIFO without a writer, a directory or a socket in a segment's place: a reason, and no waiting."""
    path = tmp_path / segment_name(2)
    (tmp_path / segment_name(1)).write_bytes(line(1))
    if trap == "link":
        path.symlink_to("/etc/hostname")
    elif trap == "fifo":
        os.mkfifo(path)
    elif trap == "directory":
        path.mkdir()
    else:
        import socket

        here = os.getcwd()
        os.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    assert problem_of(tmp_path)
    assert read_state(tmp_path).seq == 1  # and the segment before it is read


def test_a_file_of_another_owner_is_refused(tmp_path: Path) -> None:
    """A segment that does not belong to the owner of its directory was put there by somebody else."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path = tmp_path / segment_name(1)
    path.write_bytes(line(1))
    os.chown(path, 65534, 65534)
    assert problem_of(tmp_path) == "segment is not a regular file of its directory's owner"
    assert read_state(tmp_path).seq == 0


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """No directory, or one that goes away: a reason, not a raise."""
    assert problem_of(tmp_path / "gone").startswith("ENOENT")
    assert isinstance(read_beat(tmp_path / "gone"), Unavailable)
    assert isinstance(is_held(tmp_path / "gone"), Unavailable)


@pytest.mark.parametrize("trap", ["link", "fifo", "short", "directory"])
def test_an_alive_file_that_is_none(trap: str, tmp_path: Path) -> None:
    """The alive file is not trusted either, and nobody waits for it."""
    path = tmp_path / "alive"
    if trap == "link":
        path.symlink_to("/etc/hostname")
    elif trap == "fifo":
        os.mkfifo(path)
    elif trap == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"\0" * 15)
    assert isinstance(read_beat(tmp_path), Unavailable)
    assert is_held(tmp_path) is not True
    path.unlink() if trap != "directory" else path.rmdir()
    path.write_bytes((5).to_bytes(8, "little") + (7).to_bytes(8, "little"))
    assert read_beat(tmp_path) == Beat(mono_ns=5, count=7)


def test_a_link_to_a_living_workers_file_makes_nobody_alive(tmp_path: Path) -> None:
    """The kernel's table names files, and a link has that of what it points to."""
    (tmp_path / "other").mkdir()
    living = AliveFile(tmp_path / "other")
    assert is_held(tmp_path / "other") is True
    (tmp_path / "alive").symlink_to(tmp_path / "other" / "alive")
    assert isinstance(is_held(tmp_path), Unavailable)
    living.close()


def test_a_limit_counts_every_byte_and_the_rest_comes_next_time(tmp_path: Path) -> None:
    """Lines that are no records count too; reading in parts gives the same as reading at once."""
    for number in (1, 2):
        text = b"".join(line(seq) if seq % 3 else b"garbage\n" for seq in range(100 * number, 100 * number + 100))
        (tmp_path / segment_name(number)).write_bytes(text)
    whole = JournalReader(tmp_path, from_start=True)
    whole.poll()
    parts = JournalReader(tmp_path, from_start=True)
    taken = []
    while not taken or parts.behind:
        before = parts.taken_bytes
        parts.poll(700)
        taken.append(parts.taken_bytes - before)
    assert max(taken) <= 700
    assert len(taken) > 10
    assert (parts.state, parts.taken_bytes) == (whole.state, whole.taken_bytes)
    assert not whole.behind
    whole.close()
    parts.close()


def test_a_journal_that_was_deleted_has_vanished(tmp_path: Path) -> None:
    (tmp_path / segment_name(1)).write_bytes(line(1))
    reader = JournalReader(tmp_path)
    assert not reader.vanished
    reader.poll()
    assert not reader.vanished
    (tmp_path / segment_name(1)).unlink()
    assert reader.vanished
    reader.close()
    assert not reader.vanished


def test_a_line_without_an_end_costs_bounded_memory(tmp_path: Path) -> None:
    """64 MiB without a newline, then a good line: counted, passed over, and never held whole."""
    with (tmp_path / segment_name(1)).open("wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + line(1))
    tracemalloc.start()
    state = read_state(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * reader_module.MAX_LINE_BYTES
    assert state.seq == 1
    assert 0 < state.malformed < 20


def test_a_segment_without_an_end_is_left(tmp_path: Path) -> None:
    """A segment larger than any writer's (sparse, so that it costs nothing) is read to the limit, in bounded time, and said to be."""
    with (tmp_path / segment_name(1)).open("wb") as file:
        file.write(line(1))
        file.truncate(1 << 40)
    begun = time.monotonic()
    reason = problem_of(tmp_path)
    assert reason.startswith("segment 1 is larger than ")
    assert time.monotonic() - begun < 60


def test_a_long_line_that_is_no_checkpoint_is_malformed(tmp_path: Path) -> None:
    """Only a checkpoint may be longer than 64 KiB."""
    (tmp_path / segment_name(1)).write_bytes(line(1) + line(2, text="x" * MAX_LINE_BYTES) + line(3))
    state = read_state(tmp_path)
    assert (state.seq, state.malformed, state.seq_gaps) == (3, 1, 1)


def test_names_that_are_no_segments(tmp_path: Path) -> None:
    """Other names, digits of other scripts and absurd numbers are not opened."""
    for name in ("events.jsonl", "events.1.jsonl", "events.000001.jsonl~", "events.٠٠٠٠٠١.jsonl", "events.999999999999999999999.jsonl"):
        (tmp_path / name).write_bytes(line(9))
    (tmp_path / segment_name(1)).write_bytes(line(1))
    assert read_state(tmp_path).seq == 1


PARTS = st.lists(st.binary(max_size=300) | st.integers(1, 5).map(line) | st.just(b"\n"), max_size=8)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, from_start=st.booleans())
def test_segments_of_any_bytes(tmp_path: Path, parts: list[bytes], from_start: bool) -> None:
    """Whatever the files hold: no raise, and the good lines are all read."""
    for number, text in enumerate((b"".join(parts), b"\xff".join(parts)), 1):
        (tmp_path / segment_name(number)).write_bytes(text)
    reader = JournalReader(tmp_path, from_start=from_start)
    reader.poll()
    reader.poll()
    reader.close()
    assert not reader.state.res
