"""Run directories are other people's: nothing in them blocks a reader that may be root, misleads it about others, or costs it much."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_agents import until
from node_directories import event, head, line, living, resource, started_ns, worker

from diag.node.runs import MAX_FOLLOWED, RunsFound, RunWatch, Seen
from hwr.outcomes import Liveness, Role
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.journal import segment_name

SECOND = 1_000_000_000
GOOD = 9  # the rank of a worker beside whatever is wrong


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., RunWatch]]:
    """Watches that are closed with the test."""
    made: list[RunWatch] = []

    def make(path: Path = tmp_path, **more: object) -> RunWatch:
        made.append(RunWatch(path, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def by_rank(found: RunsFound, rank: int = 0) -> Seen:
    (one,) = (one for one in found.workers if one.rank == rank)
    return one


def looks(watching: RunWatch, times: int = 2) -> RunsFound:
    """Look some times; none of them may take long, and the good worker is there, whole, each time."""
    for _ in range(times):
        begun = time.monotonic()
        found = watching.collect()
        assert time.monotonic() - begun < 5
        good = by_rank(found, GOOD)
        assert (good.liveness, good.pid, good.state.seq, good.notes) == (Liveness.ALIVE, os.getpid(), 1, ())
    return found


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Path]:
    """A living worker whose data is all there."""
    directory = worker(tmp_path, rank=GOOD, run="good")
    with living(directory):
        yield directory


# journals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trap", ["link", "fifo", "directory", "owner"])
def test_a_journal_that_is_no_file_of_its_owner(trap: str, tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """Not opened, not waited for; the worker is listed by its directory's name, and what is wrong is noted."""
    directory = worker(tmp_path)
    journal = directory / segment_name(1)
    text = journal.read_bytes().replace(b'"default"', b'"planted"')
    journal.unlink()
    if trap == "link":
        (tmp_path / "planted").write_bytes(text)
        journal.symlink_to(tmp_path / "planted")
    elif trap == "fifo":
        os.mkfifo(journal)
    elif trap == "directory":
        journal.mkdir()
    else:
        if os.geteuid() != 0:
            pytest.skip("needs root")
        journal.write_bytes(text)
        os.chown(journal, 65534, 65534)
    bad = by_rank(looks(watch()))
    assert (bad.engine, bad.state.res) == ("default", {})
    assert any(note.startswith("journal: ") for note in bad.notes)


def test_a_sparse_journal_of_ten_gigabytes(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """It is read in parts and to the limit, in bounded memory, and said to be too large; it is not a second's work."""
    directory = worker(tmp_path)
    with (directory / segment_name(1)).open("ab") as file:
        file.truncate(10 << 30)
    watching = watch()
    assert "a long journal is still being read" in by_rank(looks(watching, 1)).notes
    bad = until(lambda: "still" not in str((one := by_rank(watching.collect())).notes) and one, "it is read to its limit")
    assert "larger than" in str(bad.notes)
    assert "malformed" in str(bad.notes)
    assert bad.state.seq == 1


@pytest.mark.parametrize(
    "text", [os.urandom(1 << 20), b"\n" * 100_000, b"{}\n" * 1000, b"[" * 100_000 + b"\n", b'{"event": 1}\n', b"\x00\xff"]
)
def test_a_journal_of_garbage(text: bytes, tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """Malformed lines are counted, and the lines around them are read."""
    worker(tmp_path, lines=[head(resource(0, os.getpid(), "run")), text, b"\n", event(1)])
    bad = by_rank(looks(watch()))
    assert bad.state.seq == 1
    assert ("malformed" in str(bad.notes)) == bool(text.strip(b"\n"))


def test_a_journal_of_a_later_version(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """What is known is read, unknown events are counted, and nothing is called malformed."""
    later = [line({"v": 2, "seq": seq, "event": f"hwr.later.{seq}", "novelty": [1]}) for seq in (1, 2)]
    worker(tmp_path, lines=[head(resource(0, os.getpid(), "run", novelty={"a": 1})), *later, event(3)])
    later_one = by_rank(looks(watch()))
    assert (later_one.state.unknown_events, later_one.state.seq, later_one.notes) == (2, 3, ())


def test_names_in_a_journal_reach_nobody_raw(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """Control characters are escaped and 64 KiB are cut, in the engine and in what a note repeats."""
    told = {"hwr.engine": "a\x1b[31m\n" + "x" * 65536, "hwr.run_id": "b\x1b]0;owned\x07", "hwr.rank": "\u202e7"}
    worker(tmp_path, res=told, run="na\x1bme")
    bad = by_rank(looks(watch()))
    assert bad.engine.startswith(r"a\x1b[31m\x0a")
    assert len(bad.engine) < 100
    for text in (bad.engine, bad.run_id, *bad.notes):
        assert text.isprintable()
    assert all(len(note) < 400 for note in bad.notes)


@pytest.mark.parametrize("engine", [7, None, ["a"], {"a": 1}, True])
@pytest.mark.parametrize("key", ["hwr.engine", "hwr.role", "pid_ns", "hwr.rank"])
def test_facts_of_another_kind(key: str, engine: object, tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """A number for a name, a list for a role: taken for what was not said."""
    worker(tmp_path, res={key: engine})
    bad = by_rank(looks(watch(), 1))
    assert (bad.engine, bad.role, bad.rank) == ("default", Role.WORKER, 0)


def test_a_journal_that_claims_another_rank(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """The directory's name counts, and each contradiction is noted."""
    worker(tmp_path, rank=3, res={"hwr.rank": GOOD, "hwr.run_id": "good", "process.pid": 1})
    bad = by_rank(looks(watch()), 3)
    assert (bad.rank, bad.run_id, bad.ns_pid) == (3, "run", os.getpid())
    assert len([note for note in bad.notes if note.startswith("its journal says")]) == 3


PARTS = st.lists(
    st.binary(max_size=300) | st.integers(1, 5).map(event) | st.just(b"\n") | st.dictionaries(st.text(max_size=9), st.none()).map(head),
    max_size=8,
)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, alive=st.binary(max_size=20))
def test_files_of_any_bytes(tmp_path: Path, parts: list[bytes], alive: bytes) -> None:
    """Whatever the files hold: no raise, and one worker."""
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    directory = worker(tmp_path, lines=parts)
    (directory / "alive").write_bytes(alive)
    watching = RunWatch(tmp_path, keep_dead_seconds=1e9)
    for _ in range(3):
        assert len(watching.collect().workers) == 1
    watching.close()


# alive files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trap", ["link", "fifo", "directory", "owner", "missing"])
def test_an_alive_file_that_is_none(trap: str, tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """A link to a living worker's file makes nobody alive, and nobody waits for a FIFO."""
    directory = worker(tmp_path)
    alive = directory / "alive"
    alive.unlink()
    if trap == "link":
        alive.symlink_to(good / "alive")
    elif trap == "fifo":
        os.mkfifo(alive)
    elif trap == "directory":
        alive.mkdir()
    elif trap == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        alive.write_bytes(struct.pack("<QQ", boot_ns(), 1))
        os.chown(alive, 65534, 65534)
    bad = by_rank(looks(watch()))
    assert (bad.liveness, bad.pid) == (Liveness.UNKNOWN, None)
    assert any(note.startswith("alive: ") for note in bad.notes)


def test_a_directory_that_names_another_process(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """Its maker holds its lock, and lives; it does not become the process whose numbers it took."""
    init = started_ns(1)
    directory = worker(tmp_path, pid=1, start=init)
    with living(directory):
        bad = by_rank(looks(watch()))
    assert (bad.liveness, bad.pid) == (Liveness.ALIVE, None)
    assert "not by the process that its directory names" in str(bad.notes)


# names -----------------------------------------------------------------------------------------------------------


def test_strangers_are_counted_and_not_opened(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """Files, links and absurd names are no workers; what an agent puts there is none of them."""
    start = started_ns(os.getpid())
    for name in ("agent.json", "agent.lock", "reporter.x.lock", ".agent.json.7"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "linked-run").symlink_to(good.parent)
    for name in ("r0", f"r0.{1 << 23}.{start}", f"r0.1.{1 << 63}", f"r{10**12}.1.1", "r-1.2.3", "r0.1.2.3", "r٣.1.1", "x\x1b[31m"):
        (good.parent / name).mkdir()
    (good.parent / f"r4.{os.getpid()}.{start}").symlink_to(good)
    found = looks(watch())
    assert [one.rank for one in found.workers] == [GOOD]
    assert found.directory.strangers == 3 + 9


def test_names_that_are_no_text(tmp_path: Path, good: Path, watch: Callable[..., RunWatch]) -> None:
    """A run's name of any bytes is shown escaped."""
    odd = os.fsencode(tmp_path) + b"/\xff\n\x1b"
    os.mkdir(odd)
    os.mkdir(odd + b"/r0.1.1")
    one = by_rank(looks(watch()))
    assert one.run_id.isprintable()


# many ------------------------------------------------------------------------------------------------------------


def test_five_thousand_directories(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """All of them are looked into within ten looks; what waits is named, the living is found, and the newest of the dead are kept."""
    start = started_ns(os.getpid())
    lives = worker(tmp_path, rank=1)
    for number in range(5000):
        directory = tmp_path / f"crash{number % 50}" / f"r0.{number + 2}.{start + number + 1}"
        directory.mkdir(parents=True)
        (directory / "alive").write_bytes(struct.pack("<QQ", boot_ns(), 1))
    with living(lives):
        watching = watch()
        first = watching.collect()
        assert first.directory.problem == f"{5001 - MAX_FOLLOWED} more workers' directories are not looked into yet"
        begun = time.process_time()
        for _ in range(10):
            found = watching.collect()
        spent = (time.process_time() - begun) / 10
        assert [one.rank for one in found.workers if one.liveness is Liveness.ALIVE] == [1]
        assert len(found.workers) == MAX_FOLLOWED
        assert found.directory.problem == f"{5001 - MAX_FOLLOWED} more workers than the {MAX_FOLLOWED} that are followed"
        assert {one.start_ns for one in found.workers if one.rank == 0} == {start + number + 1 for number in range(5000 - 511, 5000)}
        assert spent < 2
        begun = time.process_time()
        watching.collect()
        assert time.process_time() - begun < 0.2  # and a look at all who are known costs little


def test_more_living_workers_than_are_followed(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """The newest are followed, and whoever was too many comes when there is room."""
    start = started_ns(os.getpid())
    directories = [worker(tmp_path, rank=rank, start=start - rank * SECOND // 1000, lines=[]) for rank in range(MAX_FOLLOWED + 1)]
    watching = watch()
    with living(*directories[1:]):
        with living(directories[0]):
            watching.collect()
            found = watching.collect()
            assert len(found.workers) == MAX_FOLLOWED
            assert max(one.rank for one in found.workers) == MAX_FOLLOWED - 1
            assert found.directory.problem == "1 more workers than the 512 that are followed"
        shutil.rmtree(directories[0])
        watching.collect()
        watching.collect()
        found = watching.collect()
        assert (len(found.workers), found.directory.problem) == (MAX_FOLLOWED, None)
        assert max(one.rank for one in found.workers) == MAX_FOLLOWED


def test_a_long_journal_is_read_in_parts(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """A hundred MiB in a look would hold up everybody else: who has more says so and goes on, the others are complete at once."""
    filler = event(1, "hwr.worker.process.start", text="x" * 60_000)
    count = (72 << 20) // len(filler)
    long = worker(tmp_path, rank=0, lines=[])
    with (long / segment_name(1)).open("wb") as file:
        file.write(head(resource(0, os.getpid(), "run")))
        file.writelines(filler.replace(b'"seq": 1,', b'"seq": %d,' % (number + 1)) for number in range(count))
    short = worker(tmp_path, rank=1)
    watching = watch()
    with living(long, short):
        first = watching.collect()
        assert by_rank(first, 1).state.seq == 1
        assert "a long journal is still being read" in by_rank(first, 0).notes
        assert 0 < by_rank(first, 0).state.seq < count
        until(lambda: by_rank(watching.collect(), 0).state.seq == count, "the long journal is read", 60)
        assert by_rank(watching.collect(), 0).notes == ()


def test_an_idle_look_is_cheap(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """Eight living workers and two hundred dead ones beside: far below a hundredth of a core."""
    directories = [worker(tmp_path, rank=rank) for rank in range(8)]
    for number in range(200):
        worker(tmp_path, rank=number, pid=2, run="dead")
    watching = watch()
    with living(*directories):
        for _ in range(3):
            assert len(watching.collect().workers) == 208
        begun = time.process_time()
        for _ in range(20):
            watching.collect()
        spent = (time.process_time() - begun) / 20
    assert spent < 0.02  # 3 ms on an idle machine
