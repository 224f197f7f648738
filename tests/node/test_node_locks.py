"""Who holds and who waits: the kernel's table, the store's names, and what journals say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from node_agents import until
from node_collectors import Child, children, key_of, make_artifact, make_store, seen

from diag.node import locks as module
from diag.node.artifact_files import ArtifactIndex
from diag.node.locks import MAX_LOCKS, LockCollector
from diag.node.runs import Seen
from diag.node.snapshot import LockFacts
from diag.node.stores import Reporters, Root, StoreCollector, StoreFound
from hwr.errors import Unavailable
from hwr.outcomes import LockKind, Operation
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.state import OpenOperation

TAKE = "import fcntl\ndef take(path, how): file = os.open(path, os.O_RDWR | os.O_CREAT); fcntl.flock(file, how)\n"
EXCLUSIVE, SHARED = 2, 1


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as starter:
        yield starter


class Place:
    """A store with its collector's answer, and a lock collector over it."""

    def __init__(self, root: Path) -> None:
        self.root, self.index = make_store(root / "store"), ArtifactIndex()
        self.store = StoreCollector(Root(str(self.root), True), tuple, self.index, Reporters(root))
        self.workers: list[Seen] = []
        self.stores: list[StoreFound] = []
        self.collector = LockCollector(lambda: self.workers, lambda: self.stores, self.index)

    def known(self) -> Place:
        found = self.store.collect()
        assert not isinstance(found, Unavailable)
        self.stores = [found.value]
        return self

    def look(self) -> tuple[LockFacts, ...]:
        found = self.collector.collect()
        assert not isinstance(found, Unavailable)
        assert found.problem is None
        return found.value

    def lock(self, name: str) -> Path:
        return self.root / "locks" / name


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path).known()


def waiting(kind: LockKind, file: str, seconds: float = 5.0, **attrs: object) -> dict[str, OpenOperation]:
    begun = boot_ns() - int(seconds * 1e9)
    told = {"lock": kind.value, "file": file, "exclusive": True, **attrs}
    return {"op": OpenOperation(event="hwr.store.lock.begin", operation=Operation.LOCK.value, begun_ns=begun, attrs=told)}


def test_every_kind_of_lock_is_found_by_its_inode(place: Place, start: Callable[..., Child]) -> None:
    """Domain, admission, build and artifact locks, and the pin on a payload file: kind, file, key, domain and holder."""
    payload = make_artifact(place.root, key_of(1))
    place.store._due_ns = 0
    place.known()
    child = start(TAKE)
    names = ["domain-init.lock", "domain-build.lock", f"{key_of(1)}.build.lock", f"{key_of(1)}.artifact.lock"]
    for name in names:
        child.do(f"take({str(place.lock(name))!r}, {SHARED if 'artifact' in name else EXCLUSIVE})")
    child.do(f"file = os.open({str(payload)!r}, os.O_RDONLY); fcntl.flock(file, {EXCLUSIVE})")
    found = {lock.kind: lock for lock in place.look()}
    assert set(found) == set(LockKind)
    assert {kind: lock.key for kind, lock in found.items()} == {
        LockKind.DOMAIN_INIT: None,
        LockKind.ADMISSION: None,
        LockKind.BUILD: key_of(1),
        LockKind.ARTIFACT: key_of(1),
        LockKind.PIN: key_of(1),
    }
    assert {lock.file for lock in found.values()} == {*names, payload.name}
    assert all([holder.pid for holder in lock.holders] == [child.pid] for lock in found.values())
    assert [lock.holders[0].exclusive for lock in (found[LockKind.BUILD], found[LockKind.ARTIFACT])] == [True, False]
    assert found[LockKind.BUILD].domain == place.stores[0].store.domain
    child.end()
    assert place.look() == ()


def test_a_stopped_holder_is_called_stopped_and_a_waiter_in_the_kernel_is_there(place: Place, start: Callable[..., Child]) -> None:
    """The letter of the holder is T; who waits in flock(2) stands below it."""
    holder, waiter = start(TAKE), start(TAKE)
    path = str(place.lock(f"{key_of(7)}.build.lock"))
    holder.do(f"take({path!r}, {EXCLUSIVE})")
    waiter.begin(f"take({path!r}, {EXCLUSIVE})")
    holder.stop()
    lock = until(lambda: next((lock for lock in place.look() if lock.waiters), None), "the waiter is in the table")
    assert [(party.pid, party.state) for party in lock.holders] == [(holder.pid, "T")]
    assert [party.pid for party in lock.waiters] == [waiter.pid]


def test_a_wait_that_polls_is_known_from_the_journal(place: Place, start: Callable[..., Child]) -> None:
    """Since when, and for which lock; a lock that was just taken is not waited for; one without a holder in the table is there too."""
    holder = start(TAKE)
    name = f"{key_of(7)}.build.lock"
    holder.do(f"take({str(place.lock(name))!r}, {EXCLUSIVE})")
    place.workers = [
        seen(os.getpid(), ops=waiting(LockKind.BUILD, name), roots=[str(place.root)]),
        seen(holder.pid, rank=1, ops=waiting(LockKind.BUILD, name), roots=[str(place.root)]),
        seen(os.getppid(), rank=2, ops=waiting(LockKind.ADMISSION, "domain-build.lock"), roots=[str(place.root)]),
        seen(os.getppid(), rank=3, ops=waiting(LockKind.BUILD, f"{key_of(8)}.build.lock", seconds=0.0), roots=[str(place.root)]),
        seen(os.getppid(), rank=4, ops=waiting(LockKind.BUILD, "../../etc/passwd"), roots=[str(place.root)]),
    ]
    found = {lock.kind: lock for lock in place.look()}
    assert set(found) == {LockKind.BUILD, LockKind.ADMISSION}
    assert [party.pid for party in found[LockKind.BUILD].holders] == [holder.pid]
    assert [party.pid for party in found[LockKind.BUILD].waiters] == [os.getpid()]
    assert found[LockKind.BUILD].waiters[0].since_ns == place.workers[0].state.ops["op"].begun_ns
    assert found[LockKind.ADMISSION].holders == ()
    assert found[LockKind.ADMISSION].domain == place.stores[0].store.domain


def test_a_wait_for_a_pin_meets_the_file_that_is_held(place: Place, start: Callable[..., Child]) -> None:
    """Payload files have the same name in every artifact: the one that somebody holds is meant."""
    for number in (1, 2):
        make_artifact(place.root, key_of(number))
    place.store._due_ns = 0
    place.known()
    holder = start("import fcntl")
    payload = place.root / "artifacts" / key_of(2) / "model.safetensors"
    holder.do(f"file = os.open({str(payload)!r}, os.O_RDONLY); fcntl.flock(file, {EXCLUSIVE})")
    place.workers = [seen(os.getpid(), ops=waiting(LockKind.PIN, "model.safetensors"), roots=[str(place.root)])]
    (lock,) = place.look()
    assert (lock.kind, lock.key, [party.pid for party in lock.waiters]) == (LockKind.PIN, key_of(2), [os.getpid()])


def test_ten_thousand_old_lock_files_cost_nothing(place: Place, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are asked for when the table changes and holds an unknown inode; afterwards neither listed nor looked at."""
    for number in range(10_000):
        os.close(os.open(place.lock(f"{key_of(number)}.artifact.lock"), os.O_CREAT | os.O_WRONLY, 0o600))
    os.utime(place.root / "locks", (1, 1))  # they are old
    listed: list[Path] = []
    real = module._listed

    def counting(directory: Path, names: module._Names) -> module._Names:
        listed.append(directory)
        return real(directory, names)

    monkeypatch.setattr(module, "_listed", counting)
    child = start(TAKE)
    child.do(f"take({str(place.lock(f'{key_of(5000)}.artifact.lock'))!r}, {SHARED})")
    assert [lock.key for lock in until(place.look, "it is found")] == [key_of(5000)]
    begun = time.thread_time()
    for _ in range(50):
        first = place.look()
    assert (time.thread_time() - begun) / 50 < 0.005
    assert first is place.look(), "what did not change is the same object"
    asked = len(listed)
    for _ in range(50):
        place.look()
    assert len(listed) == asked <= 2


def test_a_lock_file_that_is_made_later_is_found(place: Place, start: Callable[..., Child]) -> None:
    """The names are listed again when the directory changed."""
    child = start(TAKE)
    made: set[str | None] = set()
    for number in range(3):
        child.do(f"take({str(place.lock(f'{key_of(number)}.build.lock'))!r}, {EXCLUSIVE})")
        made.add(key_of(number))
        until(lambda: {lock.key for lock in place.look()} == made, f"lock {number} is found")


def test_locks_of_others_on_the_same_device_are_not_ours(place: Place, start: Callable[..., Child], tmp_path: Path) -> None:
    """Another program's flock, and a file in `locks/` that is no lock of the store."""
    child = start(TAKE)
    for path in (tmp_path / "other.lock", place.lock("strange.lock")):
        child.do(f"take({str(path)!r}, {EXCLUSIVE})")
    assert place.look() == ()


def test_a_table_without_bounds_is_cut_where_it_matters_least(tmp_path: Path) -> None:
    """Of a thousand leases and one wait, the wait stays; a tree on disk stands for the kernel's table."""
    own = Place(tmp_path).known()
    device = own.stores[0].device
    assert device is not None
    lines: Sequence[str] = []
    for number in range(MAX_LOCKS + 100):
        path = own.lock(f"{key_of(number)}.artifact.lock")
        path.touch()
        lines = [*lines, f"{number}: FLOCK  ADVISORY  READ 77 {device[0]:02x}:{device[1]:02x}:{path.stat().st_ino} 0 EOF"]
    path = own.lock(f"{key_of(1)}.build.lock")
    path.touch()
    word = f"{device[0]:02x}:{device[1]:02x}:{path.stat().st_ino} 0 EOF"
    lines = [*lines, f"9999: FLOCK  ADVISORY  WRITE 78 {word}", f"9999: -> FLOCK  ADVISORY  WRITE 79 {word}"]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/locks").write_text("\n".join(lines) + "\n")
    own.collector = LockCollector(lambda: own.workers, lambda: own.stores, own.index, proc_root=tmp_path / "proc")
    found = until(own.look, "names are listed")
    assert len(found) == MAX_LOCKS
    assert found[0].kind is LockKind.BUILD
    assert [party.pid for party in found[0].waiters] == [79]
    assert found[0].holders[0].state is None, "a process that is not there has no letter"


def test_a_table_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    """No locks is another answer than no table."""
    own = Place(tmp_path).known()
    assert isinstance(LockCollector(tuple, tuple, own.index, proc_root=tmp_path / "nowhere").collect(), Unavailable)
