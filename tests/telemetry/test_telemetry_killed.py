"""J5 with real processes: what a killed, a stopped and a stuck worker say, read from another process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hwr.outcomes import Phase
from hwr.telemetry.alive import Beat, is_held, read_beat
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.reader import read_state
from hwr.telemetry.rundir import worker_directories

Until = Callable[[Callable[[], object]], None]
Start = Callable[..., "subprocess.Popen[str]"]

IN_A_CHECKSUM = """
from hwr import telemetry
from hwr.telemetry import events as E
telemetry.configure(run_dir=sys.argv[1], rank=3)
outer = telemetry.span(E.ResolutionBegun(mode="required", validation="full_checksum"), result="failed", mode="required")
outer.__enter__()
inner = telemetry.span(E.ChecksumBegun(key="ab" * 32, planned_bytes=2 << 30, files=1))
inner.__enter__()
inner.progress(E.ChecksumProgress(done_bytes=1 << 30, planned_bytes=2 << 30))
"""


def only_worker(run_dir: Path) -> Path:
    (worker,) = worker_directories(run_dir)
    assert worker.rank == 3
    return worker.path


def beats(directory: Path) -> int:
    beat = read_beat(directory)
    return beat.count if isinstance(beat, Beat) else 0


@pytest.mark.parametrize("copied", [False, True])
def test_j5_a_killed_worker_tells_where_it_was(copied: bool, start: Start, until: Until, tmp_path: Path) -> None:
    """J5: kill -9 in the middle of a checksum: phase, bytes done and age are there, in another process and in a copy."""
    process = start(IN_A_CHECKSUM, tmp_path / "run")
    directory = only_worker(tmp_path / "run")
    assert is_held(directory) is True
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: is_held(directory) is False)
    if copied:
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        shutil.rmtree(tmp_path / "run")
        directory = only_worker(tmp_path / "copy")
        assert is_held(directory) is False
    state = read_state(directory)
    assert state.phase() is Phase.VALIDATING
    assert not state.exited
    operation = state.current_operation()
    assert operation is not None
    assert (operation.operation, operation.planned_bytes, operation.done_bytes) == ("checksum", 2 << 30, 1 << 30)
    assert operation.parent in state.ops
    assert state.progress_ns == operation.progress_ns
    age_seconds = (boot_ns() - operation.begun_ns) / 1e9
    assert 0 < age_seconds < 60
    assert state.res["process.pid"] == process.pid
    assert abs(state.wall_seconds(operation.begun_ns) + age_seconds - (directory / "events.000001.jsonl").stat().st_mtime) < 60


def test_a_worker_that_ends_in_order_says_so(start: Start, tmp_path: Path) -> None:
    """An exit event, and nobody holds the lock: dead in order."""
    process = start(IN_A_CHECKSUM, tmp_path, after="")
    assert process.wait() == 0
    directory = only_worker(tmp_path)
    assert read_state(directory).phase() is Phase.EXITED
    assert is_held(directory) is False


def test_a_stopped_worker_lives_and_does_not_beat(start: Start, until: Until, tmp_path: Path) -> None:
    """SIGSTOP: the kernel still shows the lock, the beats stand still; SIGCONT: they go on."""
    process = start(IN_A_CHECKSUM, tmp_path)
    directory = only_worker(tmp_path)
    until(lambda: beats(directory) >= 2)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    held = beats(directory)
    frozen_at = boot_ns()
    until(lambda: boot_ns() - frozen_at > 2_500_000_000)
    assert beats(directory) == held
    assert is_held(directory) is True
    assert read_state(directory).phase() is Phase.VALIDATING
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: beats(directory) > held)


def test_a_held_interpreter_lives_and_does_not_beat(start: Start, until: Until, tmp_path: Path) -> None:
    """A C call that keeps the interpreter's lock (PyDLL): alive, no beat meanwhile, and the journal is read all the same."""
    hold = "import ctypes\nctypes.PyDLL(None).sleep(4)\nprint('awake', flush=True)\nsys.stdin.read()"
    process = start(IN_A_CHECKSUM, tmp_path, after=hold)
    directory = only_worker(tmp_path)
    until(lambda: isinstance(read_beat(directory), Beat))
    held, held_at = beats(directory), boot_ns()
    until(lambda: boot_ns() - held_at > 2_500_000_000)
    assert beats(directory) - held <= 1  # the one that may have come between `ready` and the call
    assert is_held(directory) is True
    assert read_state(directory).phase() is Phase.VALIDATING
    assert process.stdout is not None
    assert process.stdout.readline() == "awake\n"
    now = beats(directory)
    until(lambda: beats(directory) > now)


def test_a_beat_never_goes_to_somebody_elses_descriptor(tmp_path: Path) -> None:
    """A beat after the close is nothing: its descriptor may be another file by then."""
    from hwr.telemetry.alive import AliveFile

    alive = AliveFile(tmp_path)
    before = read_beat(tmp_path)
    assert isinstance(before, Beat)
    alive.close()
    with (tmp_path / "model").open("wb", buffering=0) as other:
        alive.beat()
        assert os.fstat(other.fileno()).st_size == 0
    assert read_beat(tmp_path) == before


def test_liveness_without_the_kernels_table(tmp_path: Path) -> None:
    """Where /proc/locks shows nothing (another PID namespace), a shared lock that is not waited for tells."""
    from hwr.telemetry.alive import AliveFile

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "locks").write_text("")
    assert not isinstance(is_held(tmp_path, tmp_path / "proc"), bool)
    alive = AliveFile(tmp_path)
    assert is_held(tmp_path, tmp_path / "proc") is True
    assert is_held(tmp_path) is True
    alive.close()
    assert is_held(tmp_path, tmp_path / "proc") is False
    assert is_held(tmp_path) is False
