"""The budget: the smallest ceiling that is known, and the facts as this kernel and trees on disk tell them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hwr
from hwr.errors import HostRegistrationBudgetError, Unavailable
from hwr.outcomes import BudgetSource
from hwr.registration.budget import RESERVE_BYTES, Budget, Facts, budget, read_facts, reserve_of
from hwr.units import GIB, MIB

UNKNOWN = Unavailable("not here")
FREE = Facts(memlock_bytes=None, cgroup_headroom_bytes=None, available_bytes=100 * GIB, reserve_bytes=GIB)
QUIET = settings(deadline=None, database=None)

AMOUNTS = st.integers(0, 1 << 50)
PERHAPS = AMOUNTS | st.none() | st.just(UNKNOWN)
FACTS = st.builds(
    Facts,
    memlock_bytes=PERHAPS,
    cgroup_headroom_bytes=PERHAPS,
    available_bytes=AMOUNTS | st.just(UNKNOWN),
    reserve_bytes=st.integers(0, 2 * GIB),
)


def facts(
    *,
    memlock: int | Unavailable | None = None,
    cgroup: int | Unavailable | None = None,
    available: int | Unavailable = 100 * GIB,
    reserve: int = GIB,
) -> Facts:
    return Facts(memlock, cgroup, available, reserve)


@QUIET
@given(known=FACTS, limit=st.none() | st.integers(1, 1 << 50), applies=st.booleans())
def test_smallest_known_ceiling_wins_and_unknown_is_none(known: Facts, limit: int | None, applies: bool):
    found = budget(known, limit, memlock_applies=applies)
    ceilings = [limit, known.cgroup_headroom_bytes]
    ceilings += [known.memlock_bytes] if applies else []
    ceilings += [max(0, known.available_bytes - known.reserve_bytes)] if isinstance(known.available_bytes, int) else []
    assert found.bytes == min((c for c in ceilings if isinstance(c, int)), default=None)
    assert (found.source is None) == (found.bytes is None)
    assert found.source is None or found.candidates[found.source] == found.bytes
    assert not set(found.unknown) & set(found.candidates)
    if known.cgroup_headroom_bytes is UNKNOWN:
        assert found.unknown[BudgetSource.CGROUP] == "not here"


@pytest.mark.parametrize(
    ("known", "limit", "source", "amount"),
    [
        (facts(), 2 * GIB, BudgetSource.CONFIGURED, 2 * GIB),
        (facts(memlock=8 * MIB), 2 * GIB, BudgetSource.MEMLOCK, 8 * MIB),
        (facts(cgroup=GIB), 2 * GIB, BudgetSource.CGROUP, GIB),
        (facts(), None, BudgetSource.MEMINFO, 99 * GIB),
        (facts(cgroup=2 * GIB), 2 * GIB, BudgetSource.CONFIGURED, 2 * GIB),
        (facts(available=GIB // 2), None, BudgetSource.MEMINFO, 0),
        (facts(memlock=0), None, BudgetSource.MEMLOCK, 0),
    ],
)
def test_winner_is_named(known: Facts, limit: int | None, source: BudgetSource, amount: int):
    found = budget(known, limit, memlock_applies=True)
    assert (found.source, found.bytes) == (source, amount)


def test_memlock_counts_only_for_a_driver_that_is_subject_to_it():
    assert budget(facts(memlock=8 * MIB), None, memlock_applies=False).source is BudgetSource.MEMINFO


def test_nothing_known_is_no_ceiling_and_says_why():
    found = budget(facts(memlock=UNKNOWN, cgroup=UNKNOWN, available=UNKNOWN), None, memlock_applies=True)
    assert (found.bytes, found.source) == (None, None)
    assert set(found.unknown) == {BudgetSource.MEMLOCK, BudgetSource.CGROUP, BudgetSource.MEMINFO}
    found.check(1 << 60)


@pytest.mark.parametrize("limit", [0, -1])
def test_ceiling_of_nothing_is_refused_because_0_means_none_elsewhere(limit: int):
    with pytest.raises(ValueError, match="None is no ceiling"):
        budget(FREE, limit, memlock_applies=False)


@pytest.mark.parametrize("source", BudgetSource)
def test_refusal_names_what_is_needed_what_is_there_and_what_would_help(source: BudgetSource):
    found = Budget(GIB, source, {source: GIB})
    found.check(GIB)
    with pytest.raises(HostRegistrationBudgetError) as caught:
        found.check(GIB + 4096)
    assert caught.value.cause == f"{GIB + 4096} bytes are to be registered, and {source.value} leaves {GIB}."
    assert caught.value.reason == source
    assert len(caught.value.way_out) > 20
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "contradiction",
    [
        (1, None, {}),
        (None, BudgetSource.CGROUP, {}),
        (2, BudgetSource.CGROUP, {BudgetSource.CGROUP: 1}),
        (1, BudgetSource.MEMINFO, {BudgetSource.CGROUP: 1, BudgetSource.MEMINFO: 2}),
        (2, BudgetSource.MEMINFO, {BudgetSource.CGROUP: 1, BudgetSource.MEMINFO: 2}),
        (1, BudgetSource.CGROUP, {BudgetSource.CGROUP: 1}, {BudgetSource.CGROUP: "unknown"}),
    ],
)
def test_budget_that_contradicts_itself_cannot_be_made(contradiction: tuple[object, ...]):
    with pytest.raises(ValueError, match=r"ceiling|smallest"):
        Budget(*contradiction)  # type: ignore[arg-type]


def test_negative_facts_cannot_be_made():
    with pytest.raises(ValueError, match="negative"):
        facts(cgroup=-1)


def test_reserve_is_smaller_on_a_small_machine():
    assert reserve_of(503 * GIB) == RESERVE_BYTES == GIB
    assert reserve_of(2 * GIB) == 2 * GIB // 20
    assert reserve_of(0) == 0


# The facts, as this kernel tells them.


def test_facts_of_this_machine():
    found = read_facts()
    assert isinstance(found.available_bytes, int)
    assert 0 < found.reserve_bytes < found.available_bytes
    assert not isinstance(found.memlock_bytes, Unavailable)
    assert not isinstance(found.cgroup_headroom_bytes, Unavailable)


LOCK = """
import ctypes, mmap, sys
from hwr.registration.budget import read_facts
held, more = (mmap.mmap(-1, int(size)) for size in sys.argv[1:])
libc = ctypes.CDLL(None)
def lock(m): return libc.mlock(ctypes.byref(ctypes.c_char.from_buffer(m)), len(m))
assert lock(held) == 0
print(read_facts().memlock_bytes, lock(more))
"""


@pytest.fixture
def lock() -> Callable[[list[str], int, int], str]:
    """Below a command prefix: lock some memory, read what is left, lock some more; print both."""

    def run(prefix: list[str], held: int, more: int) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(hwr.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*prefix, sys.executable, "-c", LOCK, str(held), str(more)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def unprivileged(memlock: int) -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    return ["prlimit", f"--memlock={memlock}:{memlock}", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.mark.parametrize(("more", "result"), [(48 << 10, 0), (52 << 10, -1)])
def test_memlock_is_what_the_kernel_still_allows(lock, more: int, result: int):
    assert lock(unprivileged(65536 + 100), 16 << 10, more) == f"{48 << 10} {result}"


def test_capability_lifts_memlock(lock):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    assert lock(["prlimit", "--memlock=65536:65536"], 4096, 1 << 20) == "None 0"


def test_capability_of_a_user_namespace_does_not(lock):
    if subprocess.run(["unshare", "-U", "-r", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    assert lock(["prlimit", "--memlock=65536:65536", "unshare", "-U", "-r"], 4096, 1 << 20) == f"{60 << 10} -1"


# The facts, as trees on disk tell them.

STATUS = b"Name:\tpython\nState:\tR (running)\nPid:\t7\nPPid:\t1\nVmLck:\t      64 kB\nCapEff:\t0000000000000000\n"
LIMITS = b"Max locked memory         8388608              unlimited            bytes     \n"
MEMINFO = b"MemTotal:       527433728 kB\nMemAvailable:   400000000 kB\n"
MOUNTINFO = b"31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Facts]:
    """Read the facts of a container on a machine of 503 GiB, some of its files otherwise (None: absent)."""

    def write(**others: bytes | None) -> Facts:
        files = {
            "proc/self/status": STATUS,
            "proc/self/limits": LIMITS,
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": b"0::/pod/c\n",
            "proc/self/mountinfo": MOUNTINFO,
            "cgroup/pod/memory.max": b"75161927680\n",
            "cgroup/pod/memory.current": b"74680000000\n",
            "cgroup/pod/memory.stat": b"anon 700000000\ninactive_file 70000000000\nactive_file 3000000000\nunevictable 900000000\n",
            "cgroup/pod/c/memory.max": b"max\n",
            "cgroup/pod/c/memory.current": b"1000\n",
            "cgroup/pod/c/memory.stat": b"inactive_file 1\nactive_file 1\n",
        }
        files.update({name.replace("__", "/"): text for name, text in others.items()})  # type: ignore[arg-type]
        for name, text in files.items():
            if text is not None:
                path = tmp_path / name.replace("memory_", "memory.")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        return read_facts(tmp_path / "proc", tmp_path / "cgroup", page_bytes=4096)

    return write


def test_container_full_of_file_cache_has_room(read):
    """One that holds 69.5 of 70 GiB, 68 of them file cache: what counts is what cannot be dropped, and the reserve."""
    found = read()
    assert found.cgroup_headroom_bytes == 75161927680 - (74680000000 - 73000000000) - GIB
    assert found.memlock_bytes == 8388608 - 64 * 1024
    assert found.available_bytes == 400000000 * 1024
    assert found.reserve_bytes == GIB


def test_container_is_tighter_than_the_machine(read):
    assert budget(read(), None, memlock_applies=False).source is BudgetSource.CGROUP


def test_tightest_of_nested_groups_counts(read):
    assert read(cgroup__pod__c__memory_max=b"2147483648\n").cgroup_headroom_bytes == 2 * GIB - 998 - 2 * GIB // 20
    assert read(cgroup__pod__c__memory_max=b"99999997952\n").cgroup_headroom_bytes == 75161927680 - 1680000000 - GIB


def test_group_that_is_full_has_no_headroom_left(read):
    assert read(cgroup__pod__memory_stat=b"inactive_file 0\nactive_file 0\n").cgroup_headroom_bytes == 0


def test_known_limit_stands_beside_a_level_that_is_unknown(read):
    assert read(cgroup__pod__c__memory_stat=b"").cgroup_headroom_bytes == read().cgroup_headroom_bytes


def test_no_limit_beside_a_level_that_is_unknown_is_unknown(read):
    found = read(cgroup__pod__memory_max=b"max\n", cgroup__pod__c__memory_stat=b"")
    assert isinstance(found.cgroup_headroom_bytes, Unavailable)


def test_no_limit_at_any_level_is_none(read):
    assert read(cgroup__pod__memory_max=b"max\n").cgroup_headroom_bytes is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("proc__self__limits", None),
        ("proc__self__limits", b"Max open files            1                    1                    files     \n"),
        ("proc__self__status", None),
        ("proc__self__status", STATUS.replace(b"VmLck", b"VmLost")),
        ("proc__self__status", STATUS.replace(b"CapEff", b"CapLost")),
    ],
)
def test_memlock_that_cannot_be_read_is_unknown(read, name: str, text: bytes | None):
    assert isinstance(read(**{name: text}).memlock_bytes, Unavailable)


def test_unlimited_memlock_needs_no_status(read):
    unlimited = LIMITS.replace(b"8388608  ", b"unlimited")
    assert read(proc__self__limits=unlimited, proc__self__status=None).memlock_bytes is None


def test_more_locked_than_a_lowered_limit_is_nothing_left(read):
    assert read(proc__self__limits=LIMITS.replace(b"8388608", b"32768  ")).memlock_bytes == 0


@pytest.mark.parametrize("text", [None, b"", b"MemTotal:       527433728 kB\n"])
def test_memory_that_cannot_be_read_is_unknown_and_not_0(read, text: bytes | None):
    found = read(proc__meminfo=text)
    assert isinstance(found.available_bytes, Unavailable)
    assert BudgetSource.MEMINFO not in budget(found, None, memlock_applies=False).candidates


def test_nothing_readable_is_all_unknown(tmp_path: Path):
    found = read_facts(tmp_path, tmp_path)
    assert all(isinstance(f, Unavailable) for f in (found.memlock_bytes, found.cgroup_headroom_bytes, found.available_bytes))
