"""One process at a time registers a file, in one order, with a deadline; who waits is seen waiting."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_standin import REGISTER, Standin
from registration_aids import MIB, children, go, in_operation, payload_file, run, state_of, until

from hwr import telemetry
from hwr.errors import EXIT_TIMEOUT, PinAdmissionTimeout, StoreIoError
from hwr.outcomes import LockKind, Operation, Outcome, Phase, TransportReason
from hwr.procfs.locks import holders
from hwr.registration.admission import admitted, in_order
from hwr.registration.drivers.cuda import CudaDriver
from hwr.registration.registered import Registered
from hwr.registration.registrar import Staged
from hwr.telemetry import events as E

RANKS = 4
REGISTERS = """
outcome = rank_of_a_group(*sys.argv[1:])
print(type(outcome).__name__, getattr(outcome, "nbytes", ""), flush=True)
sys.stdin.read()
"""
HOLDS = """
from hwr.registration.admission import admitted
with admitted([Path(sys.argv[1])], deadline=time.monotonic() + 30, seconds=30):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """Another process has its turn with this file."""
    with children() as start:
        process = start(HOLDS, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid


def test_four_processes_register_one_file_in_turn(standin: Standin, tmp_path: Path) -> None:
    """Never two inside the call at once; every one reaches its plan; those whose turn has not come are seen waiting for it."""
    standin.configure("register 1 hold")
    path = payload_file(tmp_path / "payload", 3 * MIB)
    runs = tmp_path / "run"
    with children() as start:
        ranks = [
            start(REGISTERS, standin.path, path, rank, 1, 20, HWR_RUN_DIR=str(runs), HWR_RUN_ID="one", HWR_RANK=str(rank))
            for rank in range(RANKS)
        ]
        until(lambda: [in_operation(runs, rank, "lock") for rank in range(RANKS)].count(None) == 1, "three ranks wait")
        (inside,) = standin.inside(REGISTER)
        waiting = [rank for rank in range(RANKS) if in_operation(runs, rank, "lock")]
        for rank in waiting:
            state = state_of(runs, rank)
            operation = state.current_operation()
            assert operation is not None
            assert (operation.attrs["lock"], operation.attrs["holder_pid"]) == ("pin", inside.pid)
            assert state.phase() is Phase.WAITING_LOCK
            assert {one.operation for one in state.ops.values()} == {Operation.REGISTER, Operation.ADMISSION, Operation.LOCK}
        (busy,) = set(range(RANKS)) - set(waiting)
        assert state_of(runs, busy).phase() is Phase.REGISTERING
        standin.release()
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == f"Registered {3 * MIB}\n"
    assert len(standin.calls(REGISTER)) == 3 * RANKS
    assert standin.most_inside(REGISTER) == 1
    turns = [call.pid for call in standin.calls(REGISTER)]
    assert all(len(set(turns[at : at + 3])) == 1 for at in range(0, len(turns), 3))


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_turn_that_does_not_come_is_staged_with_the_holder_named(standin: Standin, payload: Path, stopped: bool) -> None:
    with held(payload) as pid, telemetry.record() as told:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED)
        begun = time.monotonic()
        outcome = go(CudaDriver(standin.path), payload, deadline_seconds=0.3)
        assert 0.3 <= time.monotonic() - begun < 3
    assert isinstance(outcome, Staged)
    assert outcome.reason is TransportReason.ADMISSION_TIMEOUT
    assert isinstance(outcome.failure, PinAdmissionTimeout)
    assert outcome.failure.exit_code == EXIT_TIMEOUT
    assert f"pid {pid}" in outcome.failure.cause
    assert ("(state T)" in outcome.failure.cause) == stopped
    assert not standin.calls(REGISTER)
    assert [one.outcome for one in told.of(E.AdmissionEnded)] == [Outcome.TIMEOUT]
    assert [one.lock for one in told.of(E.LockWaiting)] == [LockKind.PIN]
    assert go(CudaDriver(standin.path), payload, deadline_seconds=30) is not None


def test_the_turn_is_over_before_the_memory_is(standin: Standin, payload: Path) -> None:
    """What is registered holds no lock: the next process may register the same file."""
    outcome = go(CudaDriver(standin.path), payload)
    assert isinstance(outcome, Registered)
    assert holders(payload) == ()
    second = go(CudaDriver(standin.path), payload)
    assert isinstance(second, Registered)


def test_several_files_are_locked_in_one_order_and_each_once(tmp_path: Path) -> None:
    """By name, not by directory: two processes with the same files in another order cannot block each other; two names are one lock."""
    for directory in ("x", "y"):
        (tmp_path / directory).mkdir()
    first, second = payload_file(tmp_path / "y" / "a", 1), payload_file(tmp_path / "x" / "b", 1)
    (tmp_path / "x" / "a2").hardlink_to(first)
    assert in_order([second, first]) == in_order([first, second]) == [first, second]
    with admitted([second, first, tmp_path / "x" / "a2"], deadline=time.monotonic() + 1, seconds=1):
        assert all(holders(path) for path in (first, second))
    assert holders(first) == holders(second) == ()


def test_a_payload_is_opened_for_reading_and_never_made(tmp_path: Path, as_root: None) -> None:
    missing, link = tmp_path / "missing", tmp_path / "link"
    link.symlink_to(payload_file(tmp_path / "there", 1))
    for path in (missing, link):
        with pytest.raises(StoreIoError), admitted([path], deadline=time.monotonic() + 1, seconds=1):
            pass
    assert not missing.exists()
    path = payload_file(tmp_path / "read-only", 1)
    code = """
from hwr.registration.admission import admitted
with admitted([Path(sys.argv[1])], deadline=time.monotonic() + 1, seconds=1):
    [fd] = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == sys.argv[1]]
    print(Path(f"/proc/self/fdinfo/{fd}").read_text())
"""
    flags = int(run(code, path).partition("flags:")[2].split()[0], 8)
    assert flags & os.O_ACCMODE == os.O_RDONLY


def test_a_forked_child_never_unlocks(payload: Path) -> None:
    with admitted([payload], deadline=time.monotonic() + 5, seconds=5):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        assert holders(payload)
        with pytest.raises(PinAdmissionTimeout), admitted([payload], deadline=time.monotonic(), seconds=0):
            pass


def test_a_file_that_is_gone_is_staged(standin: Standin, payload: Path) -> None:
    """The mapping is fine; without a lock it is not registered."""
    from registration_aids import mapped

    mapping = mapped(payload)
    payload.unlink()
    outcome = go(CudaDriver(standin.path), payload, mapping=mapping)
    assert isinstance(outcome, Staged)
    assert outcome.reason is TransportReason.PLATFORM
    assert not standin.calls(REGISTER)
