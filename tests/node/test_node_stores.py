"""A store seen from outside: what lies in it, who reports it, and where a journal may not send the reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from node_collectors import NOBODY, PAGE, REPOSITORY, children, key_of, make_artifact, make_store, seen

from diag.node.artifact_files import ArtifactIndex
from diag.node.runs import Seen
from diag.node.stores import INVENTORY_EVERY_SECONDS, Reporters, Root, Roots, StoreCollector, StoreFound, enter
from hwr.errors import Unavailable
from hwr.outcomes import InventoryState, Liveness
from hwr.procfs.file_id import FileId
from hwr.store.inventory import Inventory, entries
from hwr.telemetry.events import InventoryBegun, InventoryEnded
from hwr.telemetry.recording import record


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


def look(collector: StoreCollector) -> StoreFound:
    found = collector.collect()
    assert not isinstance(found, Unavailable), found
    return found.value


def reader(root: Path, run_dir: Path | None = None, index: ArtifactIndex | None = None, workers: tuple[Seen, ...] = ()) -> StoreCollector:
    return StoreCollector(Root(str(root), configured=True), lambda: workers, index or ArtifactIndex(), Reporters(run_dir))


def test_every_state_is_counted_and_an_empty_one_is_zero(store: Path, tmp_path: Path) -> None:
    """Bytes and entries by state, the reason of a denial escaped, limits from the policy, room from the filesystem."""
    make_artifact(store, key_of(1))
    make_artifact(store, key_of(2))
    (store / "deny" / f"{key_of(2)}.json").write_text(json.dumps({"reason": "bad\x1b[31m"}))
    make_artifact(store, key_of(3), under="quarantine", name=f"{key_of(3)}.validation_failure.{'a' * 32}")
    (store / "domain-policy.json").write_text(json.dumps({"max_store_bytes": 123}))
    found = look(reader(store, tmp_path))
    assert found.store.reporting
    assert found.store.entries == {"ready": 1, "denied": 1, "quarantined": 1, "temporary": 0}
    assert found.store.bytes[InventoryState.READY] == PAGE + 4
    assert found.store.limit_bytes == 123
    assert (found.store.free_bytes or 0) > 0
    assert found.store.fstype
    assert [(one.key, one.state, one.reason) for one in found.artifacts] == [
        (key_of(2), "denied", "bad\\x1b[31m"),
        (key_of(3), "quarantined", "validation_failure"),
        (key_of(1), "ready", None),
    ]
    assert (tmp_path / f"reporter.{found.store.domain}.lock").stat().st_mode & 0o777 == 0o660 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_store_is_read_only_to_its_observer(store: Path, tmp_path: Path) -> None:
    """Nothing in it changes: no file, no time of a directory."""
    make_artifact(store, key_of(1))
    before = sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in store.rglob("*"))
    look(reader(store, tmp_path))
    assert sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in store.rglob("*")) == before


def test_one_of_two_agents_reports_and_the_other_takes_over(store: Path, tmp_path: Path) -> None:
    """The loser knows the root and the files of what its workers lease, and lists nothing; when the first has gone, it reports."""
    make_artifact(store, key_of(1))
    first, index = Reporters(tmp_path), ArtifactIndex()
    winner = StoreCollector(Root(str(store), True), tuple, ArtifactIndex(), first)
    loser = reader(store, tmp_path, index, (seen(os.getpid(), leases=[key_of(1)]),))
    assert look(winner).store.reporting
    lost = look(loser)
    assert (lost.store.reporting, lost.artifacts, lost.store.domain) == (False, (), look(winner).store.domain)
    assert index.known(key_of(1)) is not None
    assert index.known(key_of(2)) is None
    first.close()
    won = look(loser)
    assert won.store.reporting
    assert len(won.artifacts) == 1


def test_without_a_run_directory_to_agree_in_it_reports_with_a_note(store: Path) -> None:
    """An observer alone is better than none, and says that it may not be the only one."""
    told = look(StoreCollector(Root(str(store), True), tuple, ArtifactIndex(), Reporters(Path("/proc/nowhere"))))
    assert told.store.reporting
    assert "agree" in str(told.store.problem)


def test_two_names_of_one_directory_are_one_domain(store: Path, tmp_path: Path) -> None:
    """A link to the root is the same store: reported once, and the second name says under which."""
    (tmp_path / "link").symlink_to(store)
    reporters = Reporters(tmp_path)
    collectors = [StoreCollector(Root(str(path), True), tuple, ArtifactIndex(), reporters) for path in (store, tmp_path / "link")]
    one, other = (look(collector) for collector in collectors)
    assert one.store.domain == other.store.domain
    assert (one.store.reporting, other.store.reporting) == (True, False)
    assert str(store) in str(other.store.problem)


def test_a_scan_is_told_before_and_after(store: Path, tmp_path: Path) -> None:
    """The begin event stands before whatever may hang; between two inventories the same object is handed out."""
    make_artifact(store, key_of(1))
    collector = reader(store, tmp_path)
    with record() as recording:
        first = look(collector)
        assert look(collector) is first
    assert [event.root for event in recording.of(InventoryBegun)] == [str(store)]
    assert [(event.entries, event.bytes) for event in recording.of(InventoryEnded)] == [(1, PAGE + 4)]
    assert INVENTORY_EVERY_SECONDS >= 10


def test_a_root_that_is_no_store_or_is_gone_is_a_reason(tmp_path: Path) -> None:
    """Neither is an exception, and neither is an empty store."""
    assert reader(tmp_path).collect() == Unavailable("it holds no store")
    gone = reader(tmp_path / "gone").collect()
    assert isinstance(gone, Unavailable)
    assert "ENOENT" in gone.reason


def test_roots_are_those_given_then_those_that_journals_name() -> None:
    """Eight at most, the living before the dead, the newest first; what is no absolute path is not one."""
    living = seen(os.getpid(), roots=["/b", "/a/../c", "relative", "/nul\0", "/given"])
    dead = seen(None, rank=1, roots=["/d"], liveness=Liveness.DEAD)
    roots = Roots([Path("/given")])
    assert roots.find([dead, living]) == (Root("/given", True), Root("/c", False), Root("/b", False), Root("/d", False))
    many = Roots([], limit=2)
    assert [root.name for root in many.find([living])] == ["/given", "/c"]
    assert many.left_out == ("/b",)


def test_a_journal_sends_nobody_into_what_its_owner_does_not_have(store: Path, tmp_path: Path) -> None:
    """Somebody's journal that names a directory of another user is not followed, and the reason names both."""
    root = Root(str(store), configured=False)
    assert not isinstance(enter(root, [seen(os.getpid(), roots=[str(store)], uid=os.geteuid())]), Unavailable)
    refused = enter(root, [seen(os.getpid(), roots=[str(store)], uid=4711)])
    assert isinstance(refused, Unavailable)
    assert f"uid {os.geteuid()}" in refused.reason
    assert "uid 4711" in refused.reason
    assert isinstance(enter(root, []), Unavailable)


def test_directories_of_a_store_that_are_links_are_not_entered(store: Path, tmp_path: Path) -> None:
    """A root belongs to its owner; what that owner links to may not."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / key_of(9)).mkdir()
    (store / "artifacts").rmdir()
    (store / "artifacts").symlink_to(elsewhere)
    collector = reader(store, tmp_path)
    assert isinstance(collector.collect(), Unavailable)
    (store / "artifacts").unlink()
    (store / "artifacts").mkdir()
    (store / "artifacts" / key_of(1)).symlink_to(elsewhere)
    assert [(one.state, one.bytes, one.files) for one in look(collector).artifacts] == [("temporary", 0, 0)]


def test_a_worker_with_mounts_of_its_own_is_followed_into_them(tmp_path: Path) -> None:
    """Its root is another directory than ours of that name: the way goes through /proc/PID/root, by the same rule of owners."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place = tmp_path / "mounted"
    place.mkdir()
    with children() as start:
        child = start(
            "import subprocess\nfrom pathlib import Path\nfrom node_collectors import make_store\n"
            "subprocess.run(['mount', '-t', 'tmpfs', 'none', sys.argv[1]], check=True)\nmake_store(Path(sys.argv[1]) / 's')",
            place,
            prefix=("unshare", "-m"),
            environ={"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}"},
        )
        name = str(place / "s")
        worker = seen(child.pid, roots=[name], uid=0)
        entered = enter(Root(name, False), [worker])
        assert not isinstance(entered, Unavailable), entered
        assert str(entered[0]).startswith(f"/proc/{child.pid}/root/")
        collector = StoreCollector(Root(name, False), lambda: [worker], ArtifactIndex(), Reporters(tmp_path))
        assert look(collector).store.reporting
        assert isinstance(enter(Root(name, False), [seen(child.pid, roots=[name], uid=1)]), Unavailable)


def test_ten_thousand_artifacts_are_cheap_to_look_at_again(tmp_path: Path) -> None:
    """All are there, with the figures of a whole listing; the second look costs a fraction of it and brings the same objects."""
    root = make_store(tmp_path / "big")
    (root / "locks" / "old.lock").touch()
    for number in range(10_000):
        directory = root / "artifacts" / key_of(number)
        os.mkdir(directory)
        os.close(os.open(directory / "READY.json", os.O_CREAT | os.O_WRONLY, 0o444))
        os.chmod(directory, 0o555)
    collector = reader(root, tmp_path)
    found = look(collector)
    assert found.store.entries[InventoryState.READY] == 10_000
    assert len(found.artifacts) == 10_000
    inventory = Inventory(root, 20_000)
    begun = time.thread_time()
    first = inventory.look()
    first_seconds = time.thread_time() - begun
    begun = time.thread_time()
    second = inventory.look()
    second_seconds = time.thread_time() - begun
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert second_seconds < first_seconds
    assert second_seconds < 0.5
    assert entries(root) == tuple(tree.entry for tree in first)
    few = Inventory(root, 100)
    assert len(few.look() or ()) == 100
    assert few.left_out == 9_900


def test_what_comes_and_goes_between_two_looks_is_seen(store: Path) -> None:
    """Published, denied, quarantined: each changes the next look, and an unchanged neighbour does not."""
    make_artifact(store, key_of(1))
    make_artifact(store, key_of(2))
    inventory = Inventory(store, 100)
    before = inventory.look()
    assert isinstance(before, tuple)
    (store / "deny" / f"{key_of(2)}.json").write_text('{"reason": "checksum"}')
    os.rename(store / "artifacts" / key_of(1), store / "quarantine" / f"{key_of(1)}.cleanup.{'b' * 32}")
    make_artifact(store, key_of(3))
    after = inventory.look()
    assert isinstance(after, tuple)
    assert [(tree.entry.key, tree.entry.state, tree.entry.reason) for tree in after] == [
        (key_of(2), "denied", "checksum"),
        (key_of(1), "quarantined", "cleanup"),
        (key_of(3), "ready", None),
    ]


def test_files_are_known_by_device_and_inode_also_when_they_have_gone(store: Path, tmp_path: Path) -> None:
    """The index answers without the disk, says what the kernel's tables say, and remembers what was set aside and deleted."""
    payload = make_artifact(store, key_of(1))
    index = ArtifactIndex()
    look(reader(store, tmp_path, index))
    known = index.known(key_of(1))
    assert known is not None
    told = FileId.in_tables(payload)
    assert [file.file for file in known.files] == [told]
    assert not isinstance(told, Unavailable)
    payload.parent.chmod(0o700)
    payload.unlink()
    assert index.by_file()[told] == key_of(1)
    new = make_artifact(store, key_of(2))
    assert index.find(key_of(2), store) is not None
    assert index.by_file()[FileId.in_tables(new)] == key_of(2)  # type: ignore[index]
    assert index.find("no key", store) is None
    assert index.find(key_of(3), store) is None


HANG = """
import ctypes, os, sys, threading, time
from pathlib import Path
from diag.node.artifact_files import ArtifactIndex
from diag.node.collecting import Collector, Running
from diag.node.stores import Reporters, Root, StoreCollector
from hwr.outcomes import CollectorName
from node_collectors import make_store, make_artifact, key_of
place = Path(sys.argv[1])
good, bad = make_store(place / "good"), place / "bad"
make_artifact(good, key_of(1))
bad.mkdir()
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
assert libc.mount(b"hang", str(bad).encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
running, index, reporters = Running(), ArtifactIndex(), Reporters(place)
for root in (bad, good):
    collect = StoreCollector(Root(str(root), True), tuple, index, reporters).collect
    running.add(Collector(name=CollectorName.STORE, target=str(root), collect=collect, interval_seconds=0.1, deadline_seconds=0.2))
running.start()
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    told = {health.target: health for health in running.health()}
    if told[str(good)].ok and "has not answered" in str(told[str(bad)].problem):
        break
    time.sleep(0.02)
print([reading.value.store.entries["ready"] for reading in running.latest(CollectorName.STORE)], told[str(bad)].problem, flush=True)
running.stop()
"""


def test_a_filesystem_that_never_answers_hangs_its_own_collector_only(tmp_path: Path) -> None:
    """The other store is all there, the hanging one is named, and the process ends."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(HANG), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1] has not answered for")


def test_an_unprivileged_reader_says_what_it_may_not_enter(store: Path, tmp_path: Path) -> None:
    """A private store of another user is a reason, no empty store."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    tmp_path.chmod(0o755)
    store.chmod(0o700)
    code = (
        "import sys; from diag.node.stores import *; from diag.node.artifact_files import ArtifactIndex\n"
        "print(StoreCollector(Root(sys.argv[1], True), tuple, ArtifactIndex(), Reporters(None)).collect())"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    place = Path("/tmp") / f"hwr-node-stores-{os.getpid()}"
    make_store(place)
    try:
        place.chmod(0o700)
        done = subprocess.run(
            [*NOBODY, sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=False, cwd="/", env=environ
        )
    finally:
        subprocess.run(["rm", "-r", str(place)], check=True)
    assert done.returncode == 0, done.stderr
    assert "Unavailable" in done.stdout
    assert "EACCES" in done.stdout
