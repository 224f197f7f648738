"""Who uses an artifact: by its lock, by a journal's word, by a mapping; and who of them is nobody's worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_collectors import MAP, MIB, NOBODY, REPOSITORY, Child, children, key_of, make_artifact, make_store, seen

from diag.node.artifact_files import ArtifactIndex
from diag.node.mappers import SWEEP_SECONDS, MapperCollector
from diag.node.runs import Seen
from diag.node.snapshot import LockFacts, LockParty, Mapper
from hwr.outcomes import Liveness, LockKind
from hwr.telemetry.clock import boot_ns

KEY = key_of(1)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as starter:
        yield starter


class Place:
    """A store with one artifact."""

    def __init__(self, root: Path) -> None:
        self.root, self.index = make_store(root / "store"), ArtifactIndex()
        self.payload = make_artifact(self.root, KEY, 2 * MIB)
        self.index.find(KEY, self.root)
        self.workers: list[Seen] = []
        self.locks: list[LockFacts] = []
        self.ns = boot_ns()
        self.collector = MapperCollector(lambda: self.workers, lambda: self.locks, self.index, clock=lambda: self.ns)

    def look(self) -> dict[str, tuple[Mapper, ...]]:
        return self.collector.collect().value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_process_that_maps_an_artifact_without_a_journal_is_an_orphan(place: Place, start: Callable[..., Child]) -> None:
    """Found by device and inode, with its name; the worker beside it is none, and its own maps are not read."""
    worker, orphan = start(MAP, place.payload), start(MAP, place.payload)
    place.workers = [seen(worker.pid, leases=[KEY])]
    users = {user.pid: user for user in place.look()[KEY]}
    assert (users[worker.pid].how, users[worker.pid].orphan) == ("lease", False)
    assert (users[orphan.pid].how, users[orphan.pid].orphan) == ("mapping", True)
    assert "python" in users[orphan.pid].name


def test_a_mapping_outlives_its_artifact(place: Place, start: Callable[..., Child]) -> None:
    """Set aside or deleted, it is still held: whoever holds it is named."""
    orphan = start(MAP, place.payload)
    os.rename(place.payload.parent, place.root / "quarantine" / f"{KEY}.cleanup.{'a' * 32}")
    assert [user.pid for user in place.look()[KEY]] == [orphan.pid]


def test_a_sweep_is_made_once_a_minute(place: Place, start: Callable[..., Child]) -> None:
    """Between two sweeps /proc is left alone; who came meanwhile is found by the next."""
    assert place.look() == {}
    orphan = start(MAP, place.payload)
    place.ns += int((SWEEP_SECONDS - 1) * 1e9)
    assert place.look() == {}
    place.ns += int(60e9)
    assert [user.pid for user in place.look()[KEY]] == [orphan.pid]
    assert place.look() is place.look(), "what did not change is the same object"


def test_whoever_holds_the_lock_of_an_artifact_uses_it(place: Place, start: Callable[..., Child]) -> None:
    """A shared holder without a journal is an orphan; an exclusive one is at work on the store and uses nothing."""
    orphan = start("")
    parties = (LockParty(pid=orphan.pid, exclusive=False), LockParty(pid=1, exclusive=True), LockParty(pid=None, exclusive=False))
    place.locks = [LockFacts(kind=LockKind.ARTIFACT, file="x", key=KEY, holders=parties)]
    assert [(user.pid, user.how, user.orphan) for user in place.look()[KEY]] == [(orphan.pid, "lease", True)]


def test_a_dead_worker_accounts_for_nobody(place: Place, start: Callable[..., Child]) -> None:
    """What a journal said before its writer died is no use of today; who goes on mapping is an orphan."""
    child = start(MAP, place.payload)
    place.workers = [seen(child.pid, leases=[KEY], liveness=Liveness.DEAD)]
    assert [(user.how, user.orphan) for user in place.look()[KEY]] == [("mapping", True)]


def test_a_process_that_holds_its_mmap_lock_is_passed_by(place: Place, tmp_path: Path) -> None:
    """Its maps are a FIFO that nobody writes to: the sweep comes to an end, finds the others, and counts it as unread."""
    proc = tmp_path / "proc"
    for pid in ("10", "11"):
        (proc / pid).mkdir(parents=True)
        status = f"Name:\tp{pid}\x1b\nState:\tS (sleeping)\nPid:\t{pid}\nPPid:\t1\nRssFile:\t    2048 kB\n"
        (proc / pid / "status").write_text(status)
    os.mkfifo(proc / "10" / "maps")
    known = place.index.known(KEY)
    assert known is not None
    file = known.files[0].file
    (proc / "11" / "maps").write_text(f"7f0000000000-7f0000200000 r--s 00000000 {file.major:02x}:{file.minor:02x} {file.inode}   /x\n")
    collector = MapperCollector(tuple, tuple, place.index, proc_root=proc)
    begun = time.monotonic()
    answer = collector.collect()
    assert time.monotonic() - begun < 5
    assert [(user.pid, user.name) for user in answer.value[KEY]] == [(11, "p11\\x1b")]
    assert "1 processes" in str(answer.problem)
    with (proc / "10" / "maps").open("wb"):
        pass  # so that the reader's thread ends with the test


def test_what_another_user_may_not_read_is_named(place: Place, start: Callable[..., Child]) -> None:
    """Unprivileged, the maps of others stay closed: nobody is said to map nothing."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    start(MAP, place.payload)
    code = (
        "from diag.node.mappers import MapperCollector\nfrom diag.node.artifact_files import ArtifactIndex\n"
        "from hwr.procfs.file_id import FileId\n"
        "index = ArtifactIndex(); index._by_file[FileId(1, 2, 3)] = 'x'\n"
        "own = MapperCollector(tuple, tuple, index); print(own.collect(), own.unreadable)"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*NOBODY, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "could not be read" in done.stdout
    assert "CAP_SYS_PTRACE" in done.stdout
