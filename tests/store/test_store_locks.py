"""Locks: L1 (every wait ends), L2 (a forked child never unlocks), L3 (a lock file that was swept is locked again)."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest
from store_artifacts import FULL, artifact, find, hits, key_of, left_in, put, run, running, store, until, when

from hwr import telemetry
from hwr.errors import EXIT_TIMEOUT, DomainInitTimeout, LockTimeout
from hwr.outcomes import FailureCode, LockKind, Outcome, StoreStatus
from hwr.procfs.locks import holders
from hwr.procfs.stat import read_stat
from hwr.store.domain import Domain
from hwr.store.locks import HeldLock, acquire
from hwr.telemetry import events as E

_HOLDS = """
import time
from hwr.outcomes import LockKind
from hwr.store.locks import acquire
from pathlib import Path
held = acquire(Path(sys.argv[1]), LockKind(sys.argv[2]), exclusive=True, deadline=time.monotonic() + 30)
"""
BUDGET_SECONDS = 0.3


def stopped(pid: int) -> bool:
    return getattr(read_stat(pid), "state", None) == "T"


def take(path: Path, *, exclusive: bool = True, seconds: float = BUDGET_SECONDS) -> HeldLock:
    return acquire(path, LockKind.BUILD, exclusive=exclusive, deadline=time.monotonic() + seconds)


@pytest.mark.parametrize("kind", [LockKind.DOMAIN_INIT, LockKind.BUILD, LockKind.ARTIFACT])
def test_a_stopped_owner_stops_nobody(stored: Domain, kind: LockKind) -> None:
    """L1: typed within the budget, named in the begin event, untouched; a later attempt succeeds."""
    path = stored.layout.lock(kind, key_of())

    def attempt(seconds: float) -> object:
        if kind is LockKind.DOMAIN_INIT:
            return store(stored.root, timeout=seconds)
        if kind is LockKind.ARTIFACT:
            found = find(stored, timeout=seconds)
            return found.failure or found.lease
        with acquire(path, kind, exclusive=True, deadline=time.monotonic() + seconds):
            return None

    with running(_HOLDS, path, kind) as owner:
        os.kill(owner.pid, signal.SIGSTOP)
        until(lambda: stopped(owner.pid), "the owner stops")
        before = path.stat()
        begun = time.monotonic()
        with telemetry.record() as told:
            try:
                failure = attempt(BUDGET_SECONDS)
            except LockTimeout as error:
                failure = error
        assert BUDGET_SECONDS <= time.monotonic() - begun < 5 * BUDGET_SECONDS
        assert isinstance(failure, DomainInitTimeout if kind is LockKind.DOMAIN_INIT else LockTimeout)
        assert failure.retryable
        assert failure.exit_code == EXIT_TIMEOUT
        assert f"pid {owner.pid} (state T)" in failure.cause
        waiting = next(event for event in told.of(E.LockWaiting) if event.lock is kind)
        assert (waiting.holder_pid, waiting.holder_state) == (owner.pid, "T")
        assert waiting.deadline_seconds == pytest.approx(BUDGET_SECONDS, abs=0.1)
        assert next(event for event in told.of(E.LockEnded) if event.lock is kind).outcome is Outcome.TIMEOUT
        held = holders(path)
        assert isinstance(held, tuple)
        assert [lock.pid for lock in held] == [owner.pid]
        assert path.stat() == before
        owner.kill()  # and SIGKILL frees it
        owner.wait()
        assert not isinstance(attempt(30), LockTimeout)


def test_a_lookup_that_times_out_says_so(stored: Domain) -> None:
    with running(_HOLDS, stored.layout.lock(LockKind.ARTIFACT, key_of()), LockKind.ARTIFACT):
        found = find(stored, timeout=0.01)
    assert found.status is StoreStatus.TIMEOUT
    assert found.failure is not None
    assert found.failure.code is FailureCode.ACTIVE_BUILD_TIMEOUT


def test_a_wait_that_goes_on_tells_so_meanwhile(stored: Domain) -> None:
    path = stored.layout.lock(LockKind.BUILD, key_of())
    with running(_HOLDS, path, LockKind.BUILD) as owner, telemetry.record() as told, when(E.LockStillWaiting, lambda _: owner.kill()):
        take(path, seconds=30).release()
    (progress, *_) = told.of(E.LockStillWaiting)
    assert progress.holder_pid == owner.pid
    assert progress.waited_seconds >= 2


def test_a_held_build_lock_holds_up_no_hit(stored: Domain) -> None:
    with running(_HOLDS, stored.layout.lock(LockKind.BUILD, key_of()), LockKind.BUILD):
        assert hits(stored)


def test_readers_share(stored: Domain) -> None:
    first, second = find(stored).lease, find(stored, level=FULL).lease
    assert first is not None
    assert second is not None
    first.close()
    second.close()


def test_a_forked_child_closes_and_does_not_unlock(tmp_path: Path) -> None:
    """L2: the child lets go of what it inherited; the parent still has the lock."""
    path = tmp_path / "x.lock"
    held = take(path)
    child = os.fork()
    if not child:
        held.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(LockTimeout):
        take(path, seconds=0)
    held.release()
    take(path, seconds=0).release()


def test_a_lock_file_that_is_swept_while_it_is_locked_is_locked_again(tmp_path: Path) -> None:
    """L3: whoever locks the deleted file would share the section with whoever made the new one."""
    path = tmp_path / "x.lock"
    old = take(path)

    def sweep(_: object) -> None:
        path.unlink()
        path.touch(0o600)
        old.release()

    with telemetry.record() as told, when(E.LockWaiting, sweep):
        mine = take(path, seconds=30)
    (replaced,) = told.of(E.LockReplaced)
    assert replaced.file == path.name
    with pytest.raises(LockTimeout):
        take(path, seconds=0)
    mine.release()


def test_a_swept_lock_file_is_made_again(stored: Domain) -> None:
    for path in stored.layout.locks.iterdir():
        path.unlink()
    assert hits(stored)
    assert f"{key_of()}.artifact.lock" in left_in(stored.layout.locks)


def test_lock_files_are_private_and_survive_exec_of_nobody(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with take(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        inherited = run("import os\nprint([os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]])")
        assert str(path) not in inherited


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(stored: Domain) -> None:
    path = stored.layout.lock(LockKind.ARTIFACT, key_of())
    path.unlink()
    path.symlink_to(stored.root / "made elsewhere")
    found = find(stored)
    assert found.failure is not None
    assert found.failure.code is FailureCode.STORE_IO
    assert not (stored.root / "made elsewhere").exists()
    assert artifact(stored).exists()


def test_a_publisher_waits_for_no_reader(stored: Domain) -> None:
    """A lease lives for days; a rebuild of a denied artifact must not wait for it."""
    lease = find(stored).lease
    assert lease is not None
    stored.layout.deny_marker(key_of()).write_text("{}")
    put(stored)
    assert bytes(lease.view("bias")) == b"\1\2\3\4" * 3  # of the tree that is in quarantine now
    lease.close()
    assert hits(stored, level=FULL)
