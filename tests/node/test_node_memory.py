"""Memory of real processes: attribution by device and inode, the two ways of counting, and the budget."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from node_agents import until
from node_collectors import MAP, MAP_PRIVATE, MIB, NOBODY, PAGE, REPOSITORY, Child, children, key_of, make_artifact, make_store, seen

from diag.node import memory as module
from diag.node.artifact_files import ArtifactIndex
from diag.node.memory import MemoryCollector, MemoryOf, read_pss
from diag.node.memory_reading import begin_scan
from diag.node.snapshot import ArtifactUse
from hwr.errors import Unavailable
from hwr.outcomes import MemorySource, Operation
from hwr.procfs.smaps_rollup import SmapsRollup
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.state import OpenOperation, WorkerState

KEY = key_of(1)
BOTH = pytest.mark.parametrize("source", [MemorySource.SMAPS, MemorySource.PAGEMAP_SCAN])


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as starter:
        yield starter


class Place:
    """A store with one artifact, whose files are known."""

    def __init__(self, root: Path, size: int) -> None:
        self.root, self.index = make_store(root / "store"), ArtifactIndex()
        self.payload = make_artifact(self.root, KEY, size)
        self.index.find(KEY, self.root)

    def collector(self, *pids: int, source: MemorySource = MemorySource.SMAPS, leases: Sequence[str] = (KEY,)) -> MemoryCollector:
        return MemoryCollector(
            lambda: [seen(pid, rank=rank, leases=leases) for rank, pid in enumerate(pids)],
            self.index,
            periodic_smaps=source is MemorySource.SMAPS,
        )

    def look(self, *pids: int, source: MemorySource = MemorySource.SMAPS) -> dict[int, MemoryOf]:
        """Look with fresh eyes: a collector that goes on looks again after fifteen seconds only."""
        return self.collector(*pids, source=source).collect().value

    def use(self, pid: int, source: MemorySource = MemorySource.SMAPS) -> ArtifactUse:
        (use,) = self.look(pid, source=source)[pid].artifacts
        assert use.source is source
        return use


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, 8 * MIB)


def test_four_workers_on_one_artifact_are_its_size_once(place: Place, start: Callable[..., Child]) -> None:
    """Σ PSS of the artifact's mappings is its size within five per cent, RSS is four times that, and nothing is anonymous."""
    pids = [start(MAP, place.payload).pid for _ in range(4)]
    found = place.look(*pids)
    uses = [found[pid].artifacts[0] for pid in pids]
    assert all((use.key, use.mapped_bytes, use.rss_bytes, use.anonymous_bytes) == (KEY, 8 * MIB, 8 * MIB, 0) for use in uses)
    assert sum(use.pss_bytes or 0 for use in uses) == pytest.approx(8 * MIB, rel=0.05)
    for pid in pids:
        figures = found[pid].figures
        assert figures["pss"].source is figures["private"].source is MemorySource.SMAPS
        assert figures["rss_file"].source is MemorySource.STATUS
        assert figures["rss_file"].bytes >= 8 * MIB
        assert (figures["pss"].cost_seconds or 0) > 0
        assert figures["pss"].sampled_ns <= boot_ns()
        assert {"rss_anon", "rss_shmem", "locked"} <= figures.keys()


@BOTH
def test_one_page_that_is_dirtied_is_one_page_of_anonymous_memory(place: Place, start: Callable[..., Child], source: MemorySource) -> None:
    """The silent doubling, seen at its first page, by either way of counting."""
    child = start(MAP_PRIVATE, place.payload)
    before = place.use(child.pid, source)
    assert (before.anonymous_bytes, before.mapped_bytes) == (0, 8 * MIB)
    child.do("held[5 * 4096] = 1")
    assert place.use(child.pid, source).anonymous_bytes == PAGE
    child.do("held[7 * 4096] = 1; held[700 * 4096] = 1")
    assert place.use(child.pid, source).anonymous_bytes == 3 * PAGE


@BOTH
def test_a_name_that_imitates_an_artifact_is_not_taken_for_it(
    place: Place, start: Callable[..., Child], tmp_path: Path, source: MemorySource
) -> None:
    """The same name in another directory is another inode: text never attributes."""
    imitation = tmp_path / "artifacts" / KEY
    imitation.mkdir(parents=True)
    (imitation / "model.safetensors").write_bytes(bytes(8 * MIB))
    use = place.use(start(MAP_PRIVATE, imitation / "model.safetensors").pid, source)
    assert (use.mapped_bytes, use.anonymous_bytes) == (0, 0)


@BOTH
def test_a_deleted_artifact_is_still_what_it_was(place: Place, start: Callable[..., Child], source: MemorySource) -> None:
    """Its mapping lives on, and so does its name."""
    child = start(MAP, place.payload)
    place.payload.parent.chmod(0o700)
    place.payload.unlink()
    assert place.use(child.pid, source).mapped_bytes == 8 * MIB


def test_a_mapping_of_several_windows_is_counted_whole_and_in_pieces(tmp_path: Path, start: Callable[..., Child], monkeypatch) -> None:
    """Three windows, at most two at a time: the figure comes with the last, and is that of all."""
    place = Place(tmp_path, MIB)
    os.truncate(place.payload, 160 * MIB)
    child = start(MAP_PRIVATE.replace("sum(", "("), place.payload)
    for at in (0, 70 * MIB, 159 * MIB):
        child.do(f"held[{at}] = 1")
    monkeypatch.setattr(module, "WINDOWS_AT_ONCE", 2)
    collector = place.collector(child.pid, source=MemorySource.PAGEMAP_SCAN)
    assert collector.collect().value[child.pid].artifacts == ()
    (use,) = until(lambda: collector.collect().value[child.pid].artifacts, "the rest of the windows")
    assert (use.mapped_bytes, use.anonymous_bytes) == (160 * MIB, 3 * PAGE)
    assert (use.cost_seconds or 0) < 0.1


def test_addresses_that_went_to_others_are_not_told_as_the_artifacts(place: Place, start: Callable[..., Child]) -> None:
    """Unmapped while the scan was under way, and the place taken by anonymous memory: nothing is told of it."""
    child = start(
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\n"
        "file = os.open(sys.argv[1], os.O_RDONLY)\nsize = os.fstat(file).st_size\nat = libc.mmap(None, size, 1, 1, file, 0)",
        place.payload,
    )
    known = place.index.known(KEY)
    assert known is not None
    begun = begin_scan(child.pid, [known], Path("/proc")).scan
    assert begun is not None
    child.do("libc.mmap(at, size, 3, 0x32, -1, 0); ctypes.memset(at, 1, size)")
    told = begun.go_on(child.pid, 32, Path("/proc"), boot_ns)
    assert told.artifacts == ()
    assert told.scan is not None
    assert told.scan.mapped == {KEY: 0}


def test_a_large_process_is_not_read_as_a_whole(place: Place, start: Callable[..., Child], monkeypatch) -> None:
    """Above the estimate the anonymous pages are counted in windows, and there is no PSS."""
    child = start(MAP + "\nballast = bytearray(256 << 20)", place.payload)
    monkeypatch.setattr(module, "SMAPS_COST_SECONDS", 0.001)
    found = place.look(child.pid)[child.pid]
    assert "pss" not in found.figures
    assert [use.source for use in found.artifacts] == [MemorySource.PAGEMAP_SCAN]


def test_a_process_that_registers_is_left_alone(place: Place, start: Callable[..., Child]) -> None:
    """Neither smaps nor maps nor a window while the driver may need its mmap lock; status goes on; nor on demand."""
    child = start(MAP, place.payload)
    ops = {"op": OpenOperation(event="hwr.registration.chunk.begin", operation=Operation.REGISTER_CHUNK.value, begun_ns=boot_ns())}
    worker = seen(child.pid, leases=[KEY], ops=ops)
    collector = MemoryCollector(lambda: [worker], place.index)
    found = collector.collect().value[child.pid]
    assert found.artifacts == ()
    assert "pss" not in found.figures
    assert "rss_file" in found.figures
    refused = collector.read_pss(child.pid)
    assert isinstance(refused, Unavailable)
    assert "registers" in refused.reason


def test_pss_on_demand_is_read_by_a_child_with_a_deadline(place: Place, start: Callable[..., Child]) -> None:
    """The answer, the reasons of who has ended, and that a late child is killed and not waited for."""
    child = start(MAP, place.payload)
    collector = place.collector(child.pid)
    told = collector.read_pss(child.pid)
    assert isinstance(told, SmapsRollup)
    assert (told.amounts.pss or 0) >= 8 * MIB
    assert collector.read_pss(1) == Unavailable("no living worker of this node has this pid")
    late = read_pss(child.pid, deadline_seconds=0.0)
    assert isinstance(late, Unavailable)
    assert "no answer within" in late.reason
    child.end()
    assert isinstance(read_pss(child.pid, WorkerState()), Unavailable)


def test_one_whose_mmap_lock_is_held_costs_its_own_figures_only(
    place: Place, start: Callable[..., Child], tmp_path: Path, monkeypatch
) -> None:
    """Its mappings are a FIFO that nobody writes to: the other worker's figures are all there, and the problem names the pid."""
    child = start(MAP, place.payload)
    proc = tmp_path / "proc"
    for pid, name in ((child.pid, "stat"), (child.pid, "status"), (child.pid, "smaps"), (4_000_000, "status")):
        (proc / str(pid)).mkdir(parents=True, exist_ok=True)
        (proc / str(pid) / name).write_bytes(Path(f"/proc/{child.pid}/{name}").read_bytes())
    os.mkfifo(proc / "4000000" / "smaps")
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    workers = [seen(4_000_000, start_ns=1, leases=[KEY]), seen(child.pid, rank=1, leases=[KEY])]
    collector = MemoryCollector(lambda: workers, place.index, proc_root=proc)
    begun = time.monotonic()
    answer = collector.collect()
    assert time.monotonic() - begun < 5
    assert "4000000" in str(answer.problem)
    assert answer.value[4_000_000].artifacts == ()
    assert "rss_anon" in answer.value[4_000_000].figures
    assert [use.rss_bytes for use in answer.value[child.pid].artifacts] == [8 * MIB]
    with (proc / "4000000" / "smaps").open("wb") as late:
        late.write((proc / str(child.pid) / "smaps").read_bytes())
    until(lambda: collector.collect().value[4_000_000].artifacts, "the late answer is taken")


def test_nothing_is_read_twice_before_its_time_and_the_share_is_kept(place: Place, start: Callable[..., Child], monkeypatch) -> None:
    """Fifteen seconds between two looks; with the allowance spent nobody is looked at until it has grown back."""
    child = start(MAP, place.payload)
    now = boot_ns()
    clock = [now]
    collector = MemoryCollector(lambda: [seen(child.pid, leases=[KEY])], place.index, clock=lambda: clock[0])

    def pss_ns() -> int:
        return collector.collect().value[child.pid].figures["pss"].sampled_ns

    assert pss_ns() == now
    clock[0] = now + 14 * 10**9
    assert pss_ns() == now
    clock[0] = now + 16 * 10**9
    assert pss_ns() == clock[0]
    collector._allowance.spend(1.0)
    clock[0] += 20 * 10**9
    assert pss_ns() == now + 16 * 10**9
    clock[0] += int(1.1 / module.SHARE) * 10**9
    assert pss_ns() == clock[0]


def test_a_fresh_lease_is_looked_at_at_once(place: Place, start: Callable[..., Child]) -> None:
    """Not fifteen seconds after the last look, and what is leased no more is told no more."""
    child = start(MAP, place.payload)
    leases: list[str] = []
    collector = MemoryCollector(lambda: [seen(child.pid, leases=leases)], place.index)
    assert collector.collect().value[child.pid].artifacts == ()
    leases.append(KEY)
    assert [use.key for use in collector.collect().value[child.pid].artifacts] == [KEY]
    leases.clear()
    assert collector.collect().value[child.pid].artifacts == ()


def test_what_another_user_may_not_read_is_named_and_status_is_there(place: Place, start: Callable[..., Child]) -> None:
    """Unprivileged: sizes from status, no PSS, no artifacts, one sentence with the capability."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    child = start(MAP, place.payload)
    code = (
        "from node_collectors import seen\nfrom diag.node.artifact_files import ArtifactIndex\n"
        "from diag.node.memory import MemoryCollector\n"
        f"own = MemoryCollector(lambda: [seen({child.pid}, leases=['{KEY}'])], ArtifactIndex())\n"
        "found = own.collect().value\n"
        f"sys.stderr.write(repr((sorted(found[{child.pid}].figures), found[{child.pid}].artifacts, own.unreadable)))"
    )
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*NOBODY, sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, cwd="/", env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'rss_anon'" in done.stderr
    assert "pss" not in done.stderr
    assert "CAP_SYS_PTRACE" in done.stderr


def test_page_size_is_what_the_tests_assume() -> None:
    """The figures above are in pages of this size."""
    assert mmap.PAGESIZE == PAGE
