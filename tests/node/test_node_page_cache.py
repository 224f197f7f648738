"""The page cache of artifacts, asked of their files: right to the page, in turns, and within a budget."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from node_agents import until
from node_collectors import MIB, NOBODY, PAGE, REPOSITORY, Child, children, key_of, make_artifact, make_store, seen

from diag.node import page_cache as module
from diag.node.artifact_files import ArtifactIndex
from diag.node.page_cache import CachedPages, PageCacheCollector
from diag.node.snapshot import Artifact, Store
from diag.node.stores import StoreFound
from hwr.outcomes import InventoryState, MemorySource
from hwr.telemetry.clock import boot_ns

MAP = """
import mmap
file = open(sys.argv[1], 'rb')
held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
def touch(): sum(held[at] for at in range(0, len(held), 4096))
touch()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as starter:
        yield starter


class Place:
    """A store of some artifacts; `leased` may be changed."""

    def __init__(self, root: Path, count: int, size: int = PAGE) -> None:
        self.root, self.index = make_store(root / "store"), ArtifactIndex()
        self.keys = [key_of(number) for number in range(count)]
        self.payloads = [make_artifact(self.root, key, size) for key in self.keys]
        for key in self.keys:
            self.index.find(key, self.root)
        self.leased: list[str] = []
        self.ns = boot_ns()
        artifacts = tuple(Artifact(key=key, state=InventoryState.READY) for key in self.keys)
        self.stores = (StoreFound(store=Store(domain="d", root="/r", reporting=True), artifacts=artifacts),)
        self.collector = PageCacheCollector(
            lambda: [seen(os.getpid(), leases=self.leased)], lambda: self.stores, self.index, clock=lambda: self.ns
        )

    def look(self, later_seconds: float = 0.0) -> dict[str, CachedPages]:
        self.ns += int(later_seconds * 1e9)
        return self.collector.collect().value


def fresh(place: Place, key: str) -> CachedPages:
    """What a collector without a past says."""
    collector = PageCacheCollector(lambda: [seen(os.getpid(), leases=[key])], tuple, place.index)
    return collector.collect().value[key]


def test_cached_pages_are_counted_and_their_loss_is_seen(tmp_path: Path, start: Callable[..., Child]) -> None:
    """All of a file that four workers mapped; after they let go of their pages and the cache is dropped, less."""
    place = Place(tmp_path, 1, 8 * MIB)
    (key,), (payload,) = place.keys, place.payloads
    with payload.open("rb") as file:
        os.fsync(file.fileno())
        workers = [start(MAP, payload) for _ in range(4)]
        full = fresh(place, key)
        assert (full.bytes, full.source) == (8 * MIB, MemorySource.CACHESTAT)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert fresh(place, key).bytes == 8 * MIB, "what is mapped is not evicted"
        for worker in workers:
            worker.do("held.madvise(mmap.MADV_DONTNEED)")

        def dropped() -> bool:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return fresh(place, key).bytes == 0

        until(dropped, "the cache falls")
        workers[0].do("held[0]")
        assert 0 < fresh(place, key).bytes <= 8 * MIB, "what is touched comes back, with what is read ahead"


def test_what_is_leased_is_asked_every_fifteen_seconds_and_the_rest_in_turns(tmp_path: Path) -> None:
    """Leased ones come first and keep their age below fifteen seconds; every other one's turn comes."""
    place = Place(tmp_path, 600)
    place.leased = [place.keys[599]]
    first = place.look()
    assert place.keys[599] in first
    assert len(first) <= module.AT_ONCE + 1
    begun = first[place.keys[599]].sampled_ns
    assert place.look(5)[place.keys[599]].sampled_ns == begun
    assert place.look(11)[place.keys[599]].sampled_ns == place.ns
    rounds = 0
    while len(found := place.look(5)) < 600:
        rounds += 1
        assert rounds < 200, len(found)
    oldest = min(pages.sampled_ns for pages in place.look().values())
    for _ in range(60):
        found = place.look(5)
    assert min(pages.sampled_ns for pages in found.values()) > oldest, "nobody starves"


def test_where_the_time_is_short_everybody_has_a_turn_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for one file a round, forty files: after forty rounds all are known."""
    monkeypatch.setattr(module, "BURST_SECONDS", 1e-6)
    place = Place(tmp_path, 40)
    assert len(place.look()) == 1
    for _ in range(60):
        found = place.look(5)
    assert len(found) == 40


def test_time_that_was_overspent_is_saved_before_anybody_is_asked_again(tmp_path: Path) -> None:
    """A store whose files are dear to ask is asked less often, not more slowly."""
    place = Place(tmp_path, 1)
    place.leased = place.keys
    first = place.look()[place.keys[0]].sampled_ns
    place.collector._allowance.spend(1.0)
    assert place.look(60)[place.keys[0]].sampled_ns == first
    assert place.look(1.1 / module.SHARE)[place.keys[0]].sampled_ns == place.ns


def test_a_file_that_was_replaced_is_not_counted_as_the_artifact(tmp_path: Path) -> None:
    """Another inode, a link, a FIFO: a reason and no figure, and nothing hangs."""
    place = Place(tmp_path, 3)
    place.leased = place.keys
    for payload in place.payloads:
        payload.parent.chmod(0o755)
        payload.unlink()
    place.payloads[0].write_bytes(bytes(PAGE + 1))  # it may even get the old one's inode
    place.payloads[1].symlink_to("/etc/passwd")
    os.mkfifo(place.payloads[2])
    answer = place.collector.collect()
    assert answer.value == {}
    assert "taken the place" in str(answer.problem)
    assert "ELOOP" in str(answer.problem)


def test_what_is_gone_from_the_store_and_not_leased_is_told_no_more(tmp_path: Path) -> None:
    """A figure of an artifact that nobody has would be a lie."""
    place = Place(tmp_path, 2)
    assert set(place.look()) == set(place.keys)
    place.stores = ()
    place.leased = [place.keys[1]]
    assert set(place.look(1)) == {place.keys[1]}


def test_a_store_that_hangs_costs_its_own_figures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other store's answers are there, the problem says for how long, and the late answer is taken later."""
    good, bad = Place(tmp_path / "good", 1), Place(tmp_path / "bad", 3)
    held, let_go = os.pipe()
    real = module._ask

    def ask(found: module.ArtifactFiles, clock: Callable[[], int]) -> object:
        if found.directory.is_relative_to(bad.root):
            os.read(held, 1)
        return real(found, clock)

    monkeypatch.setattr(module, "_ask", ask)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    keys: Sequence[str] = [bad.keys[2], good.keys[0]]
    index = ArtifactIndex()
    index.find(keys[0], bad.root)
    index.find(keys[1], good.root)
    collector = PageCacheCollector(lambda: [seen(os.getpid(), leases=keys)], tuple, index)
    answer = collector.collect()
    assert list(answer.value) == [good.keys[0]]
    assert "has not answered" in str(answer.problem)
    os.write(let_go, b"x")
    until(lambda: bad.keys[2] in collector.collect().value, "the late answer")
    os.close(held)
    os.close(let_go)


def test_what_the_kernel_denies_is_named_once_and_never_guessed(tmp_path: Path) -> None:
    """Another user's read-only files: no figure, one sentence (mincore would have said: all of it)."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    place = make_store(Path("/tmp") / f"hwr-node-page-cache-{os.getpid()}")
    try:
        for path in (place, place / "artifacts"):
            path.chmod(0o755)
        make_artifact(place, key_of(1))
        (place / "artifacts" / key_of(1) / "model.safetensors").chmod(0o444)
        code = (
            "import sys\nfrom pathlib import Path\nfrom node_collectors import seen, key_of\n"
            "from diag.node.page_cache import PageCacheCollector\nfrom diag.node.artifact_files import ArtifactIndex\n"
            "index = ArtifactIndex()\nassert index.find(key_of(1), Path(sys.argv[1]))\n"
            "own = PageCacheCollector(lambda: [seen(1, leases=[key_of(1)])], tuple, index)\n"
            "print(own.collect(), own.unreadable)"
        )
        environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*NOBODY, sys.executable, "-c", code, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environ, check=False)
    finally:
        subprocess.run(["rm", "-r", str(place)], check=True)
    assert done.returncode == 0, done.stderr
    assert "value={}" in done.stdout
    assert "problem=None" in done.stdout
    assert "CAP_FOWNER" in done.stdout
    assert mmap.PAGESIZE == PAGE
