"""Every worker of the scene is in the state that it stands for, as the kernel and its journal say; nobody's judgement is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_agents import DEADLINE_SECONDS, until
from scene import CHUNK_SECONDS, Scene

from hwr.errors import Unavailable
from hwr.outcomes import Operation, Stall
from hwr.procfs.locks import holders
from hwr.procfs.stat import Stat, read_stat
from hwr.procfs.threads import read_syscall
from hwr.telemetry.alive import Beat, is_held, read_beat
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.reader import read_state
from hwr.telemetry.rundir import worker_directories
from hwr.telemetry.state import WorkerState

ALL = range(8)
# A free lock lets a read of one byte through in microseconds; nothing else makes it wait for so long.
HOLD_SECONDS = 1.0
BLOCKED_SECONDS = HOLD_SECONDS / 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All eight, each in its state."""
    with Scene(tmp_path_factory.mktemp("scene"), hold_seconds=HOLD_SECONDS) as one:
        begun = boot_ns()
        one.cause_all()
        assert all(begun <= one.caused_ns[rank] <= boot_ns() for rank in ALL)
        yield one


def directory(scene: Scene, rank: int) -> Path:
    return next(worker.path for worker in worker_directories(scene.run_dir) if worker.rank == rank)


def state(scene: Scene, rank: int) -> WorkerState:
    return read_state(directory(scene, rank))


def beats(scene: Scene, rank: int) -> int:
    beat = read_beat(directory(scene, rank))
    assert isinstance(beat, Beat), beat
    return beat.count


def stat(scene: Scene, rank: int) -> Stat:
    found = read_stat(scene.workers[rank].pid)
    assert isinstance(found, Stat), found
    return found


def operation(scene: Scene, rank: int) -> str | None:
    current = state(scene, rank).current_operation()
    return None if current is None else current.operation


def blocked_seconds(pid: int) -> float:
    """Read one byte that the kernel gives out under the process's mmap lock; return how long that took."""
    begun = time.monotonic()
    with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        file.read(1)
    return time.monotonic() - begun


def holder_pids(path: Path) -> set[int | None]:
    found = holders(path)
    assert not isinstance(found, Unavailable), found
    return {lock.pid for lock in found}


def test_beats_tell_who_still_runs(scene: Scene) -> None:
    """While the healthy one beats three times, those that are stopped, dead or without their interpreter's lock do not once."""
    still = (0, 1, 3)
    before = {rank: beats(scene, rank) for rank in ALL}
    until(lambda: beats(scene, 7) >= before[7] + 3, "the healthy one beats")
    after = {rank: beats(scene, rank) for rank in ALL}
    assert {rank for rank in still if after[rank] != before[rank]} == set()
    assert {rank for rank in (4, 5, 6, 7) if after[rank] == before[rank]} == set()


def test_the_stopped_one_holds_the_lock(scene: Scene) -> None:
    """State T in the kernel, a holder of the store's lock in its table, alive by its own."""
    assert stat(scene, 0).state == "T"
    assert holder_pids(scene.lock) == {scene.workers[0].pid}
    assert is_held(directory(scene, 0)) is True


def test_the_holder_of_the_interpreters_lock_sleeps_in_a_call(scene: Scene) -> None:
    """It is alive and sleeps in the kernel, as a healthy one does; only that nothing of its interpreter runs tells them apart."""
    pid = scene.workers[1].pid
    assert stat(scene, 1).state == "S"
    call = read_syscall(pid, pid)
    assert not isinstance(call, Unavailable)
    assert call.number is not None
    assert is_held(directory(scene, 1)) is True


def test_the_mmap_lock_is_held_for_seconds_and_lock_free_files_answer(scene: Scene) -> None:
    """A read that needs it waits for most of a call; what needs none comes back meanwhile; the time is the kernel's."""
    pid, longest = scene.workers[2].pid, 0.0
    before = stat(scene, 2)
    begun = time.monotonic()
    deadline = begun + DEADLINE_SECONDS
    while longest < BLOCKED_SECONDS:
        assert time.monotonic() < deadline, longest
        took: list[float] = []
        reader = threading.Thread(target=lambda took=took: took.append(blocked_seconds(pid)), daemon=True)
        reader.start()
        looks = 0
        while reader.is_alive():
            stat(scene, 2)
            looks += 1
            reader.join(0.05)
        longest = max(longest, *took)
        assert looks > 1 or longest < BLOCKED_SECONDS
    after, seconds = stat(scene, 2), time.monotonic() - begun
    assert after.stime_s - before.stime_s > 0.2 * seconds, "it runs in the kernel"
    assert after.utime_s - before.utime_s < 0.1 * seconds
    assert blocked_seconds(scene.workers[7].pid) < BLOCKED_SECONDS / 3


def test_the_dead_one_was_in_the_middle_of_something(scene: Scene) -> None:
    """Nobody holds its alive file, it did not say goodbye, and its journal has the operation open."""
    assert scene.workers[3].process.returncode == -signal.SIGKILL
    assert is_held(directory(scene, 3)) is False
    told = state(scene, 3)
    assert not told.exited
    current = told.current_operation()
    assert current is not None
    assert (current.operation, current.planned_bytes, current.done_bytes) == (Operation.CHECKSUM, 1 << 30, 1 << 20)


def test_the_waiter_waits_for_the_stopped_one(scene: Scene) -> None:
    """Its journal names the holder; it polls, so that the kernel's table has no waiter."""
    until(lambda: operation(scene, 4) == Operation.LOCK, "it waits")
    current = state(scene, 4).current_operation()
    assert current is not None
    assert current.attrs["holder_pid"] == scene.workers[0].pid
    assert current.deadline_ns is not None
    assert current.deadline_ns - boot_ns() > 3600 * 10**9
    found = holders(scene.lock)
    assert not isinstance(found, Unavailable)
    assert [lock.waiters for lock in found] == [()]


def test_the_registration_advances(scene: Scene) -> None:
    """Chunk after chunk is done, each as slow as it was told to be, and it is in the next one."""
    until(lambda: (state(scene, 5).registration_chunks_done or 0) >= 1, "a chunk")
    first = state(scene, 5).registration_chunks_done or 0
    begun = time.monotonic()
    until(lambda: (state(scene, 5).registration_chunks_done or 0) >= first + 2, "two more chunks")
    assert time.monotonic() - begun > CHUNK_SECONDS
    assert operation(scene, 5) == Operation.REGISTER_CHUNK


def test_one_rank_is_in_a_collective_that_the_other_has_not_entered(scene: Scene) -> None:
    """The waiting rank's sequence is one ahead; the missed one has none open, and serves."""
    until(lambda: operation(scene, 6) == Operation.COLLECTIVE, "it waits")
    waiting, missed = state(scene, 6).collectives["all_reduce"], state(scene, 7).collectives["all_reduce"]
    assert waiting["sequence"] == missed["sequence"] + 1
    assert waiting["begun_ns"] is not None
    assert missed["begun_ns"] is None
    assert waiting["world_size"] == missed["world_size"] == 2


def test_the_healthy_one_goes_on(scene: Scene) -> None:
    """It serves, and what it begins it ends."""
    ended = state(scene, 7).events["hwr.store.lookup.end"]
    until(lambda: state(scene, 7).events["hwr.store.lookup.end"] > ended + 1, "it looks things up")
    assert len(state(scene, 7).ops) <= 1


def test_what_was_caused_can_be_undone(scene: Scene) -> None:
    """Whoever was let go runs on; what is left of the states is the dead one. Ranks are taken in the order of who waits for whom."""
    for which in ("stopped", "gil_held"):
        rank = scene.rank(which)
        before = beats(scene, rank)
        scene.undo(which)
        until(lambda rank=rank, before=before: beats(scene, rank) > before, f"rank {rank} beats again")
    assert holder_pids(scene.lock) == {scene.workers[0].pid}, "it runs, and has not let go yet"
    assert operation(scene, 4) == Operation.LOCK
    scene.undo(Stall.LOCK_WAIT)
    assert holder_pids(scene.lock) == {scene.workers[4].pid}
    scene.undo("mmap_lock_held")
    assert max(blocked_seconds(scene.workers[2].pid) for _ in range(20)) < BLOCKED_SECONDS / 3
    scene.undo("pin_advancing")
    scene.undo("collective_wait")
    assert [operation(scene, rank) for rank in (0, 1, 2, 4, 5, 6)] == [None] * 6
    with pytest.raises(ValueError, match="rank 3"):
        scene.undo("dead")
    with pytest.raises(ValueError, match="rank 7"):
        scene.undo("none")


def test_a_state_can_be_caused_again(tmp_path: Path) -> None:
    """The stopped one stops again; the interpreter's lock is held by a call that burns a core, and let go of as well."""
    with Scene(tmp_path, ranks=(0, 1), spin=True) as scene:
        for _ in range(2):
            moments = [boot_ns(), scene.cause("stopped"), boot_ns()]
            assert moments == sorted(moments)
            assert stat(scene, 0).state == "T"
            scene.undo("stopped")
            assert stat(scene, 0).state != "T"
            scene.cause("gil_held")
            before, counted = stat(scene, 1), beats(scene, 1)
            until(lambda before=before: stat(scene, 1).utime_s > before.utime_s + 0.5, "it burns a core")
            assert beats(scene, 1) <= counted + 1
            scene.undo("gil_held")
            until(lambda counted=counted: beats(scene, 1) > counted + 1, "it beats again")


def test_nothing_is_left_of_a_scene(tmp_path: Path) -> None:
    """Stopped, spinning and holding ones have ended with it; nothing of it is in shared memory."""
    before = set(os.listdir("/dev/shm"))
    with Scene(tmp_path, ranks=(0, 1, 4, 5)) as scene:
        scene.cause_all()
        pids = [worker.pid for worker in scene.workers.values()]
    assert [pid for pid in pids if not gone(pid)] == []
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "scene" in name or "hwr" in name}


def test_workers_end_with_whoever_began_the_scene(tmp_path: Path) -> None:
    """Killed outright, nobody is left to end them: the one that is stopped and the one that hears nothing end all the same."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from scene import Path, Scene\n"
        "with Scene(Path(sys.argv[2]), ranks=(0, 1, 7)) as scene:\n"
        "    scene.cause_all(); print(*(worker.pid for worker in scene.workers.values()), flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
        process.wait(DEADLINE_SECONDS)
    until(lambda: all(gone(pid) for pid in pids), "they end")


def gone(pid: int) -> bool:
    """Whether a process has ended; an orphan may wait for whoever adopted it to look."""
    found = read_stat(pid)
    return isinstance(found, Unavailable) or found.state in "ZX"
