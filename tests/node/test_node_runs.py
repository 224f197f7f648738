"""Who writes journals below a run directory, and who of them lives: real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_agents import PlainWorker, running, until
from node_directories import event, head, living, make_old, resource, seen, started_ns, worker

from diag.node.runs import RunsFound, RunWatch, Seen
from hwr.outcomes import Liveness, Role
from hwr.telemetry.alive import AliveFile
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.journal import segment_name

SECOND = 1_000_000_000
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# Look once, in another process, and say what was seen.
LOOK = """
import json, sys
from pathlib import Path
from diag.node.runs import RunWatch
found = RunWatch(Path(sys.argv[1])).collect()
workers = [[one.rank, one.liveness, one.pid, one.notes, one.engine] for one in found.workers]
print(json.dumps([found.directory.readable, found.directory.problem, workers]))
"""


@pytest.fixture
def started() -> Iterator[list[PlainWorker]]:
    """Workers that end with the test."""
    with running() as list_of:
        yield list_of  # type: ignore[misc]


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


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def plain(started: list[PlainWorker], run_dir: Path, **more: object) -> PlainWorker:
    started.append(PlainWorker(run_dir, **more))  # type: ignore[arg-type]
    return started[-1]


def by_rank(found: RunsFound, rank: int = 0) -> Seen:
    (one,) = (one for one in found.workers if one.rank == rank)
    return one


def look_as(prefix: list[str], run_dir: Path) -> tuple[bool, str | None, list[list[object]]]:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", LOOK, str(run_dir)], capture_output=True, text=True, check=False, cwd="/", env=environ
    )
    assert done.returncode == 0, done.stderr
    readable, problem, workers = json.loads(done.stdout)
    return readable, problem, workers


# living, stopped, dead -------------------------------------------------------------------------------------------


def test_a_living_worker_is_seen_with_what_its_journal_says(
    tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]
) -> None:
    """Identity, process, user, beat and state; and what it writes next is seen at the next look."""
    one = plain(started, tmp_path, rank=3, engine="llm", run_id="a-run")
    watching = watch()
    first = by_rank(watching.collect(), 3)
    assert (first.run_id, first.rank, first.role, first.engine) == ("a-run", 3, Role.WORKER, "llm")
    assert (first.pid, first.ns_pid, first.uid, first.liveness) == (one.pid, one.pid, os.geteuid(), Liveness.ALIVE)
    assert first.start_ns == started_ns(one.pid)
    assert first.heartbeat_ns is not None
    assert boot_ns() - first.heartbeat_ns < 5 * SECOND
    assert first.notes == ()
    one.do("telemetry.emit(E.PhaseChanged(phase=Phase.READY))")
    second = by_rank(watching.collect(), 3)
    assert (first.state.base_phase, second.state.base_phase) == ("starting", "ready")  # the first is a copy that nobody changed
    assert by_rank(watching.collect(), 3).state is second.state  # and nothing is copied while nothing is written


def test_a_killed_worker_is_dead_at_the_next_look(tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]) -> None:
    """With the time of its last sign of life."""
    one, watching = plain(started, tmp_path), watch()
    assert by_rank(watching.collect()).liveness is Liveness.ALIVE
    one.end(signal.SIGKILL)
    killed = boot_ns()
    dead = by_rank(watching.collect())
    assert (dead.liveness, dead.pid) == (Liveness.DEAD, None)
    assert dead.quiet_ns is not None
    assert -0.5 < (killed - dead.quiet_ns) / SECOND < 10
    assert all(by_rank(watching.collect()).liveness is Liveness.DEAD for _ in range(3))


def test_what_a_worker_wrote_last_is_read_after_its_death(
    tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]
) -> None:
    one, watching = plain(started, tmp_path), watch()
    watching.collect()
    one.do("telemetry.emit(E.PhaseChanged(phase=Phase.READY))")
    one.end(signal.SIGKILL)
    assert by_rank(watching.collect()).state.base_phase == "ready"


def test_what_is_found_after_the_first_look_at_the_dead_is_read_too(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """It may have written between our reading and its end: only who was gone before, and has no more to read, is let be."""
    directory, watching = worker(tmp_path), watch()
    with living(directory):
        watching.collect()
        assert by_rank(watching.collect()).liveness is Liveness.ALIVE
    assert by_rank(watching.collect()).liveness is Liveness.DEAD  # a look that had nothing to read
    with (directory / segment_name(1)).open("ab") as journal:
        journal.write(event(2))
    assert by_rank(watching.collect()).state.seq == 2
    watching.collect()
    assert by_rank(watching.collect()) is by_rank(watching.collect())  # and from then on nothing is asked


def test_a_worker_that_ended_in_order_has_exited(tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]) -> None:
    one, watching = plain(started, tmp_path), watch()
    one.end()
    assert by_rank(watching.collect()).liveness is Liveness.EXITED


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_the_gone_are_kept_for_ten_minutes(
    how: int | None, tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]
) -> None:
    """And then no longer, dead or exited; a living one that is stopped for hours stays."""
    ahead = [0]
    watching = watch(clock=lambda: boot_ns() + ahead[0])
    gone, stopped = plain(started, tmp_path, rank=0), plain(started, tmp_path, rank=1)
    stopped.process.send_signal(signal.SIGSTOP)
    gone.end(how)
    assert len(watching.collect().workers) == 2
    ahead[0] = 590 * SECOND
    assert len(watching.collect().workers) == 2
    ahead[0] = 7200 * SECOND
    (left,) = watching.collect().workers
    assert (left.rank, left.liveness) == (1, Liveness.ALIVE)
    assert len(watching.collect().workers) == 1


def test_a_worker_that_was_stopped_for_a_week_lives(tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]) -> None:
    """Its files are old and it does not beat: it holds its lock."""
    one = plain(started, tmp_path)
    one.process.send_signal(signal.SIGSTOP)
    (directory,) = tmp_path.glob("run/r0.*")
    make_old(directory, 7 * 86400)
    assert by_rank(watch().collect()).pid == one.pid


def test_the_long_dead_are_not_read(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """A journal of last week is judged by its time: reading it once would change the time of its last access."""
    directory = worker(tmp_path)
    make_old(directory, 3600)
    journal = directory / segment_name(1)
    before = journal.stat()
    os.utime(journal, ns=(1, before.st_mtime_ns))
    watching = watch()
    assert watching.collect().workers == ()
    assert journal.stat().st_atime_ns == 1
    make_old(directory, 3600)
    with living(directory):  # and whoever was taken for gone and holds its lock is followed after all
        assert by_rank(watching.collect()).liveness is Liveness.ALIVE


def test_a_forked_child_is_a_process_of_its_own(tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]) -> None:
    one, watching = plain(started, tmp_path), watch()
    one.do("if os.fork() == 0: telemetry.emit(E.PhaseChanged(phase=Phase.READY)); time.sleep(600)")
    found = until(lambda: len(both := watching.collect().workers) == 2 and both, "the child is seen")
    try:
        assert {each.liveness for each in found} == {Liveness.ALIVE}
        assert {each.pid for each in found} == {each.ns_pid for each in found}
        assert one.pid in {each.pid for each in found}
    finally:
        os.kill(max(each.pid for each in found if each.pid != one.pid), signal.SIGKILL)


def test_agents_and_tools_are_listed_as_such(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """With their role, and an agent is not counted as a worker."""
    for rank, role in enumerate(("worker", "tool", "agent", "novelty")):
        worker(tmp_path, rank=rank, res={"hwr.role": role}, run=f"run{rank}")
    found = watch().collect()
    assert [by_rank(found, rank).role for rank in range(4)] == [Role.WORKER, Role.TOOL, Role.AGENT, Role.WORKER]
    assert (found.directory.workers, found.directory.runs) == (3, 3)


def test_a_worker_that_is_just_starting_is_not_disturbed(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """Its lock is not asked for between the file's making and the lock's taking: the writer would find it taken, and go without."""
    directory = worker(tmp_path, lines=[])
    (directory / "alive").write_bytes(b"")
    watching = watch()
    one = by_rank(watching.collect())
    assert (one.liveness, one.notes[-1]) == (Liveness.UNKNOWN, "alive: no beat was written yet")
    stop = [False]

    def look() -> None:
        while not stop[0]:
            watching.collect()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for rank in range(1, 300):
            made = tmp_path / "run" / f"r{rank}.{os.getpid()}.{started_ns(os.getpid())}"
            made.mkdir()
            AliveFile(made).close()  # raises if the lock is taken
    finally:
        stop[0] = True
        looking.join()
    make_old(directory, 300)
    assert by_rank(watch().collect()).liveness is Liveness.DEAD  # it died right there


# namespaces and users --------------------------------------------------------------------------------------------


def test_a_worker_in_a_pid_namespace_below_ours(
    as_root: None, tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]
) -> None:
    """It calls itself 1 and is found by our number, also after a restart of the reader."""
    one = plain(started, tmp_path, prefix=NAMESPACE)
    found = by_rank(watch().collect())
    assert (found.ns_pid, found.liveness) == (1, Liveness.ALIVE)
    assert found.pid is not None
    assert found.pid != one.pid  # that is unshare's
    assert Path(f"/proc/{found.pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split() == [str(found.pid), "1"]


def test_a_worker_in_a_pid_namespace_beside_ours(as_root: None, tmp_path: Path, started: list[PlainWorker]) -> None:
    """The kernel's table does not list it: its lock tells that it lives, and the note says why nothing else is known."""
    one = plain(started, tmp_path)
    ((_, liveness, pid, notes, _),) = look_as(NAMESPACE, tmp_path)[2]
    assert (liveness, pid) == ("alive", None)
    assert "hostPID" in str(notes)
    one.end(signal.SIGKILL)
    assert look_as(NAMESPACE, tmp_path)[2][0][1] == "dead"


def test_workers_of_another_user_in_a_shared_directory(
    as_root: None, tmp_path: Path, started: list[PlainWorker], watch: Callable[..., RunWatch]
) -> None:
    """As in /run/hwr: sticky, of the group; each is seen with its user."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o3777)
    plain(started, shared, rank=0)
    plain(started, shared, rank=1, run_id="other", prefix=NOBODY)
    found = watch(shared).collect()
    assert [by_rank(found, rank).uid for rank in (0, 1)] == [0, 65534]
    assert [by_rank(found, rank).pid for rank in (0, 1)] == [one.pid for one in started]


def test_what_an_unprivileged_reader_may_not_read_is_named(as_root: None, tmp_path: Path, started: list[PlainWorker]) -> None:
    """A run and a worker of mode 000: the first is named as a problem, the second is unknown and says why; the others are all there."""
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    tmp_path.chmod(0o755)
    for rank, run in enumerate(("open", "closed", "half")):
        directory = worker(tmp_path, rank=rank, run=run)
        for path in (directory.parent, directory):
            path.chmod(0o755)
    closed, half = tmp_path / "closed", next((tmp_path / "half").iterdir())
    closed.chmod(0o000)
    half.chmod(0o000)
    readable, problem, workers = look_as(NOBODY, tmp_path)
    assert readable
    assert problem == "closed: EACCES (Permission denied)"
    states = {rank: (liveness, notes) for rank, liveness, _, notes, _ in workers}
    assert states.keys() == {0, 2}
    assert states[0] == ("dead", [])
    assert states[2][0] == "unknown"
    assert "EACCES" in str(states[2][1])
    tmp_path.chmod(0o000)
    assert look_as(NOBODY, tmp_path)[:2] == (False, "EACCES (Permission denied)")
    tmp_path.chmod(0o755)


# the directory itself --------------------------------------------------------------------------------------------


def test_a_directory_that_is_none(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """Missing, a file, a link into nothing: a reason each, and no raise."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    told = {name: watch(tmp_path / name).collect().directory for name in ("missing", "file", "link")}
    assert [one.readable for one in told.values()] == [False] * 3
    assert told["missing"].problem == told["link"].problem == "it does not exist"
    assert (told["file"].problem or "").startswith("it is no directory")


def test_a_link_in_its_place_is_followed_if_it_is_ours(as_root: None, tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """An operator's link is; one that another user put there is not."""
    worker(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(watch(tmp_path / "link").collect().workers) == 1
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    directory = watch(tmp_path / "link").collect().directory
    assert (directory.readable, directory.problem) == (False, "it is no directory: a link that belongs to another user")


def test_a_run_or_a_worker_may_be_given(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """As `hwr` does elsewhere: the same worker is found from each of the three."""
    directory = worker(tmp_path)
    for path in (tmp_path, directory.parent, directory):
        found = watch(path).collect()
        assert [one.directory for one in found.workers] == [directory]
        assert [one.run_id for one in found.workers] == ["run"]
        assert found.directory.strangers == 0


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_directory_that_vanishes_and_comes_back(how: str, tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """It is said to be missing meanwhile; afterwards everybody is there again, with what is written now."""
    place = tmp_path / "runs"
    directory = worker(place)
    watching = watch(place)
    assert by_rank(watching.collect()).engine == "default"
    if how == "moved":
        place.rename(tmp_path / "away")
    else:
        shutil.rmtree(place)
    gone = watching.collect()
    assert (gone.workers, gone.directory.problem) == ((), "it does not exist")
    if how == "moved":
        (tmp_path / "away").rename(place)
    else:
        worker(place, res={"hwr.engine": "second"})
    assert by_rank(watching.collect()).directory == directory
    assert by_rank(watching.collect()).engine == ("default" if how == "moved" else "second")


def test_a_directory_that_is_replaced_between_two_looks(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """The same names, other files: what was open is let go of."""
    worker(tmp_path / "runs")
    watching = watch(tmp_path / "runs")
    watching.collect()
    shutil.rmtree(tmp_path / "runs")
    worker(tmp_path / "runs", res={"hwr.engine": "second"})
    assert by_rank(watching.collect()).engine == "second"


def test_a_journal_that_is_replaced_is_read_anew(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """The directory is the same: what is open was deleted, and another lies in its place."""
    directory = worker(tmp_path)
    with living(directory):
        watching = watch()
        assert by_rank(watching.collect()).engine == "default"
        (directory / segment_name(1)).unlink()
        (directory / segment_name(1)).write_bytes(head(resource(0, os.getpid(), "run", **{"hwr.engine": "second"})))
        assert by_rank(watching.collect()).engine == "second"


def test_a_run_that_changes_within_a_tick_of_the_clock_is_listed_again(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """Its time of change is the same before and after: a second worker came in the same few milliseconds."""
    worker(tmp_path, rank=0)
    watching, run = watch(), tmp_path / "run"
    before = run.stat()
    assert len(watching.collect().workers) == 1
    worker(tmp_path, rank=1)
    os.utime(run, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(watching.collect().workers) == 2


def test_a_worker_that_joins_an_old_run_is_found(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """Runs in which nobody lives are looked at in turns: with three hundred of them, within three looks."""
    for number in range(300):
        make_old(worker(tmp_path, run=f"run{number:03}"), 3600)
        os.utime(tmp_path / f"run{number:03}", (1, 1))
    watching = watch()
    assert watching.collect().workers == ()
    worker(tmp_path, run="run150", rank=7)
    seen_at = [index for index in range(3) if watching.collect().workers]
    assert seen_at


def test_a_second_worker_of_a_living_run_is_found_at_once(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    with living(worker(tmp_path, rank=0)):
        watching = watch()
        watching.collect()
        worker(tmp_path, rank=1)
        assert len(watching.collect().workers) == 2


# another boot ----------------------------------------------------------------------------------------------------


def test_a_directory_of_another_boot_is_not_shown(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """Its times mean nothing here, and nobody of it lives, though somebody may hold its lock."""
    other = worker(tmp_path, rank=0, res={"boot_id": "0b1f3a52-0000-4000-8000-000000000000"})
    future = worker(tmp_path, rank=1, start=boot_ns() + 3600 * SECOND)
    before = worker(tmp_path, rank=2, lines=[], beat_ns=0)
    make_old(before, boot_ns() / SECOND + 3600)
    ours = worker(tmp_path, rank=3)
    with living(other, future):
        watching = watch(keep_dead_seconds=1e9)
        for _ in range(3):
            assert [one.directory for one in watching.collect().workers] == [ours]


def test_a_beat_of_the_future_is_none(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    worker(tmp_path, beat_ns=(1 << 64) - 1)
    one = by_rank(watch().collect())
    assert one.heartbeat_ns is None
    assert one.quiet_ns is not None
    assert abs(boot_ns() - one.quiet_ns) < 60 * SECOND


def test_a_builder_of_these_tests_says_what_a_watch_says(tmp_path: Path, watch: Callable[..., RunWatch]) -> None:
    """The hand-made `seen` of the other tests has the fields of a real one."""
    worker(tmp_path)
    (real,) = watch().collect().workers
    made = seen(7)
    assert {name: type(getattr(made, name)) for name in ("run_id", "rank", "role", "engine", "state", "notes")} == {
        name: type(getattr(real, name)) for name in ("run_id", "rank", "role", "engine", "state", "notes")
    }
