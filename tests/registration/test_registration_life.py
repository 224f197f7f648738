"""Unregistering precedes unmapping: closed, dropped, thrown away by an exception, at the end of the interpreter, after a fork."""

from __future__ import annotations

import gc
import os
import pickle
import resource
from pathlib import Path

import pytest
from cuda_standin import REGISTER, UNREGISTER, Standin
from registration_aids import MIB, children, go, held_chunks, mapped, payload_file, run, state_of
from store_artifacts import NOBODY, Zeros, find, payload, put, store

from hwr import telemetry
from hwr.errors import ActiveLease
from hwr.outcomes import Outcome, TransportReason
from hwr.procfs.file_id import FileId
from hwr.procfs.smaps import file_use, read_smaps
from hwr.procfs.status import read_status
from hwr.registration.drivers.cuda import CudaDriver
from hwr.registration.drivers.mlock import MlockDriver
from hwr.registration.registered import Registered, exports_of, regions_of
from hwr.registration.registrar import Staged
from hwr.telemetry import events as E


def registered(standin: Standin, path: Path) -> Registered:
    outcome = go(CudaDriver(standin.path), path)
    assert isinstance(outcome, Registered)
    return outcome


def test_a_lease_is_not_unmapped_while_it_is_registered(standin: Standin, tmp_path: Path) -> None:
    """Closing it is refused; after the registration is closed the lease closes too."""
    domain = store(tmp_path / "root")
    put(domain, tensors=[Zeros("weight", 3 * MIB)])
    lease = find(domain).lease
    assert lease is not None
    facts = payload(domain).stat()
    (region,) = regions_of(lease)
    assert (region.device, region.inode, region.nbytes, region.writable) == (facts.st_dev, facts.st_ino, facts.st_size, False)
    exports = exports_of(lease)
    outcome = go(CudaDriver(standin.path), payload(domain), mapping=exports)
    assert isinstance(outcome, Registered)
    with pytest.raises(ActiveLease):
        lease.close()
    assert outcome.close() == ()
    lease.close()
    assert [call.perms for call in standin.calls(REGISTER)] == ["r--s"] * 4
    assert standin.lost() == 0


def test_a_staged_lease_can_be_closed(standin: Standin, tmp_path: Path) -> None:
    domain = store(tmp_path / "root")
    put(domain)
    lease = find(domain).lease
    assert lease is not None
    standin.configure("register 1 fail 2")
    exports = exports_of(lease)
    outcome = go(CudaDriver(standin.path), payload(domain), mapping=exports)
    assert isinstance(outcome, Staged)
    lease.close()


def test_dropped_by_garbage_collection_it_is_unregistered_first(standin: Standin, tmp_path: Path) -> None:
    held: list[object] = [registered(standin, payload_file(tmp_path / "payload", 2 * MIB))]
    held.append(held)  # a cycle: only the collector ends it
    with telemetry.record() as told:
        del held
        gc.collect()
    assert [one.cause for one in told.of(E.ReleaseBegun)] == ["dropped"]
    assert len(standin.calls(UNREGISTER)) == 2
    assert not held_chunks()
    assert standin.lost() == 0


def test_what_cannot_be_unregistered_stays_mapped(standin: Standin, tmp_path: Path) -> None:
    """Closed, it says why; dropped, the memory stays; asked once more, it goes."""
    standin.configure("unregister 1 fail 1", "unregister 3 fail 1", "unregister 4 fail 1")
    path = payload_file(tmp_path / "payload", 2 * MIB)
    outcome = registered(standin, path)
    with telemetry.record() as told:
        (problem,) = outcome.close()
    assert problem == "cudaErrorInvalidValue (1): invalid argument"
    (ended,) = told.of(E.ReleaseEnded)
    assert (ended.outcome, ended.bytes, ended.survivors) == (Outcome.FAILED, MIB, 1)
    assert not outcome.closed
    del outcome  # the finalizer tries again: refused
    gc.collect()
    assert path.name in Path("/proc/self/maps").read_text()
    (left,) = held_chunks()
    assert left.nbytes == MIB
    assert standin.lost() == 0
    from hwr.registration import registered as module

    module._at_exit()  # refused
    module._at_exit()
    assert not held_chunks()
    assert path.name not in Path("/proc/self/maps").read_text()


ENDINGS = {
    "in order": "",
    "by an exception": "raise SystemExit(0)",
    "held by a cycle": "loop = [outcome]\nloop.append(loop)",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_at_the_end_of_the_interpreter_it_is_unregistered_first(standin: Standin, tmp_path: Path, ending: str) -> None:
    path = payload_file(tmp_path / "payload", 2 * MIB)
    code = "outcome = go(CudaDriver(Path(sys.argv[1])), Path(sys.argv[2]))\nassert isinstance(outcome, Registered)\n"
    run(code + ending, standin.path, path)
    assert len(standin.calls(UNREGISTER)) == 2
    (end,) = standin.ends().values()
    assert (end.registered, end.lost) == (0, 0)


def test_at_the_end_of_the_interpreter_all_of_several_are_unregistered(standin: Standin, tmp_path: Path) -> None:
    paths = [payload_file(tmp_path / f"payload-{number}", 2 * MIB) for number in range(4)]
    code = "held = [go(CudaDriver(Path(sys.argv[1])), Path(path)) for path in sys.argv[2:]]\n"
    run(code + "assert all(isinstance(one, Registered) for one in held)", standin.path, *paths)
    assert len(standin.calls(REGISTER)) == len(standin.calls(UNREGISTER)) == 8
    (end,) = standin.ends().values()
    assert (end.registered, end.lost) == (0, 0)
    assert standin.lost() == 0


def test_the_journal_tells_of_the_release_at_the_end(standin: Standin, tmp_path: Path) -> None:
    """The release comes before the exit event, which closes the journal."""
    path = payload_file(tmp_path / "payload", 2 * MIB)
    code = "import logging, weakref\nfrom hwr import telemetry\nweakref.finalize(go, int)\ntelemetry.configure(run_dir=sys.argv[3])\n"
    run(code + "outcome = go(CudaDriver(Path(sys.argv[1])), Path(sys.argv[2]))", standin.path, path, tmp_path / "run")
    state = state_of(tmp_path / "run", 0)
    assert state.events["hwr.registration.release.end"] == 1
    assert (state.registered_bytes, state.exited) == (0, True)


def test_an_exception_through_the_owner_unregisters(standin: Standin, tmp_path: Path) -> None:
    path = payload_file(tmp_path / "payload", 2 * MIB)
    code = "def owner():\n    outcome = go(CudaDriver(Path(sys.argv[1])), Path(sys.argv[2]))\n    raise ValueError\ntry:\n    owner()\n"
    code += "except ValueError:\n    pass\nassert not held_chunks()"
    run(code, standin.path, path)
    assert standin.ends().popitem()[1].lost == 0


def test_a_call_in_progress_at_the_end_of_the_interpreter_is_left_alone(standin: Standin, tmp_path: Path) -> None:
    """A thread stuck in the driver: the process ends, nothing is unregistered under it, and the memory was mapped to the end."""
    standin.configure("register 2 hang")
    path = payload_file(tmp_path / "payload", 2 * MIB)
    code = """
import threading
threading.Thread(target=go, args=(CudaDriver(Path(sys.argv[1])), Path(sys.argv[2])), daemon=True).start()
log = Path(sys.argv[1]).with_name("calls")
until(lambda: log.exists() and log.read_text().count("cudaHostRegister") == 3)
"""
    run(code, standin.path, path)
    assert not standin.calls(UNREGISTER)
    assert standin.lost() == 0


def test_a_forked_child_only_forgets(standin: Standin, tmp_path: Path) -> None:
    outcome = registered(standin, payload_file(tmp_path / "payload", 2 * MIB))
    child = os.fork()
    if not child:
        closed = outcome.close()
        os._exit(0 if closed == () and outcome.closed and not held_chunks() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not standin.calls(UNREGISTER)
    assert outcome.nbytes == 2 * MIB
    assert outcome.close() == ()
    with pytest.raises(TypeError):
        pickle.dumps(outcome)


def test_copies_are_split_at_the_seams(standin: Standin, tmp_path: Path) -> None:
    outcome = registered(standin, payload_file(tmp_path / "payload", 2 * MIB))
    begin = outcome.plan.ranges[0].begin
    assert outcome.split(begin + MIB - 10, 20) == [(begin + MIB - 10, 10), (begin + MIB, 10)]
    outcome.close()


def locked() -> int:
    status = read_status(os.getpid())
    return getattr(status, "locked", None) or 0


def test_mlock_locks_what_was_planned(tmp_path: Path) -> None:
    """VmLck equals the plan; closed, it is as before."""
    before = locked()
    outcome = go(MlockDriver(), payload_file(tmp_path / "a", 2 * MIB + 1), payload_file(tmp_path / "b", MIB))
    assert isinstance(outcome, Registered), outcome
    assert locked() - before == outcome.plan.nbytes == 3 * MIB + 4096
    outcome.close()
    assert locked() == before


LOCKS = """
from hwr.registration.drivers.mlock import MlockDriver
outcome = go(MlockDriver(), Path(sys.argv[1]))
print(type(outcome).__name__, flush=True)
sys.stdin.read()
"""


def test_processes_that_lock_one_file_lock_it_once(tmp_path: Path) -> None:
    """VmLck is the plan in each process; `Locked` of smaps is proportional: over all processes it is the file, once."""
    path = payload_file(tmp_path / "payload", 4 * MIB)
    facts = path.stat()
    file = FileId(os.major(facts.st_dev), os.minor(facts.st_dev), facts.st_ino)
    with children() as start:
        processes = [start(LOCKS, path) for _ in range(4)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "Registered\n"
        statuses = [read_status(process.pid) for process in processes]
        assert [getattr(status, "locked", None) for status in statuses] == [4 * MIB] * 4
        amounts = []
        for process in processes:
            vmas = read_smaps(process.pid)
            assert isinstance(vmas, tuple)
            amounts.append(file_use(vmas, file).amounts)
    assert sum(one.locked or 0 for one in amounts) == 4 * MIB
    assert [one.locked for one in amounts] == [MIB] * 4
    assert [one.anonymous for one in amounts] == [0] * 4


def test_a_memory_lock_limit_is_named_and_the_driver_never_called(as_root: None, standin: Standin, tmp_path: Path) -> None:
    """uid 65534 with 64 KiB: staged, for this reason, before any call."""
    path = payload_file(tmp_path / "payload", MIB)
    for directory in (path.parent, *path.parents):
        if directory.is_relative_to("/tmp") and directory != Path("/tmp"):
            directory.chmod(0o755)
    code = """
from hwr.registration.budget import read_facts
from hwr.registration.drivers.mlock import MlockDriver
class Watched(MlockDriver):
    def register(self, address, nbytes):
        raise AssertionError("called")
outcome = go(Watched(), Path(sys.argv[1]), facts=read_facts)
print(outcome.reason, outcome.failure.cause, outcome.failure.way_out)
"""
    told = run(code, path, prefix=("prlimit", "--memlock=65536:65536", *NOBODY))
    assert told.startswith(f"{TransportReason.MEMLOCK} 1048576 bytes are to be registered, and memlock leaves 65536")
    assert "ulimit -l" in told
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != 65536


def test_exports_end_with_release_only(tmp_path: Path) -> None:
    """A dropped export keeps its memory: that is what a registration that cannot be undone needs."""
    path = payload_file(tmp_path / "payload", MIB)
    exports = mapped(path)
    exports.release()
    exports.release()
    assert path.name not in Path("/proc/self/maps").read_text()
    code = "mapped(Path(sys.argv[1]))\nimport gc\ngc.collect()\nassert sys.argv[1] in Path('/proc/self/maps').read_text()"
    run(code, path)
