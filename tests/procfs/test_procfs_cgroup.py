"""Memory limits of control groups: this kernel's, and trees on disk for machines of other kinds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.cgroup import Membership, MemoryGroup, parse_cgroup, parse_limit, parse_memory_stat, read_frozen, read_memory_groups

NO_LIMIT_V1 = 9223372036854771712
PLAIN_V2 = b"31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    b"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    b"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    b"41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


class Machine:
    """A /proc and a /sys/fs/cgroup on disk."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def process(self, cgroup: bytes, mountinfo: bytes) -> None:
        (self.proc / "self/cgroup").write_bytes(cgroup)
        (self.proc / "self/mountinfo").write_bytes(mountinfo)

    def v2(self, path: str, limit: object, usage: int, *, inactive: int = 0, active: int = 0, high: object = None) -> Path:
        stat = f"anon 1\nfile {inactive + active}\ninactive_file {inactive}\nactive_file {active}\nunevictable 0\n"
        self._write(path, {"memory.max": limit, "memory.current": usage, "memory.high": high, "memory.stat": stat})
        return self.cgroup / path

    def v1(self, path: str, limit: int, usage: int, *, file: int = 0, above: int = NO_LIMIT_V1) -> None:
        # The plain names count this group alone and must not be taken.
        stat = f"inactive_file 1\nactive_file 1\nhierarchical_memory_limit {above}\ntotal_inactive_file {file}\ntotal_active_file 0\n"
        self._write("memory/" + path, {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat})

    def _write(self, path: str, files: dict[str, object]) -> None:
        (self.cgroup / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if content is not None:
                text = str(content)
                (self.cgroup / path / name).write_text(text if text.endswith("\n") else text + "\n")

    def groups(self) -> tuple[MemoryGroup | Unavailable, ...] | Unavailable:
        return read_memory_groups("self", self.proc, self.cgroup)

    def headrooms(self) -> list[int | None]:
        found = self.groups()
        assert isinstance(found, tuple), found
        assert all(isinstance(group, MemoryGroup) for group in found), found
        return [group.headroom for group in found if isinstance(group, MemoryGroup)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_our_own_groups_are_readable():
    found = read_memory_groups()
    assert isinstance(found, tuple), found
    assert all(isinstance(group, MemoryGroup) for group in found), found
    assert all(group.usage >= group.reclaimable // 2 for group in found if isinstance(group, MemoryGroup))


@pytest.fixture
def limited(as_root: None) -> Iterator[Callable[[int, int], Path]]:
    """Make a group below our own with another below it, and the first limited; version 1, as far as this machine has it."""
    found = read_memory_groups()
    assert isinstance(found, tuple)
    own = found[0] if found else None
    if not isinstance(own, MemoryGroup) or not (Path(own.path) / "memory.limit_in_bytes").exists():
        pytest.skip("needs version 1's memory controller")
    outer = Path(own.path) / f"hwr-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cannot make a group: {error}")
    try:

        def enter(pid: int, limit: int) -> Path:
            (outer / "memory.limit_in_bytes").write_text(str(limit))
            (inner / "cgroup.procs").write_text(str(pid))
            return inner

        yield enter
    finally:
        for process in (inner / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError, OSError):
                (Path(own.path) / "cgroup.procs").write_text(process)
        inner.rmdir()
        outer.rmdir()


def test_limit_of_a_real_group_binds_the_one_below(start, limited):
    child = start("sys.stdin.readline()\nheld = b'x' * (8 << 20)\nprint('held', flush=True)", ready=False)
    inner = limited(child.pid, 64 << 20)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "held\n"
    found = read_memory_groups(child.pid)
    assert isinstance(found, tuple), found
    own, outer = found[:2]
    assert isinstance(own, MemoryGroup)
    assert isinstance(outer, MemoryGroup)
    assert Path(own.path) == inner
    assert own.limit == outer.limit == 64 << 20  # of the inner one by hierarchical_memory_limit
    assert outer.headroom is not None
    assert 32 << 20 < outer.headroom < 57 << 20  # 8 MiB are held


def test_version_2_without_a_limit(machine: Machine):
    machine.process(b"0::/system.slice/a.service\n", PLAIN_V2)
    machine.v2("system.slice/a.service", "max", 5 << 20, high="max")
    machine.v2("system.slice", "max", 9 << 20)
    assert machine.headrooms() == [None, None]  # the root has no memory.max: it limits nothing


def test_version_2_limit_less_what_cannot_be_reclaimed(machine: Machine):
    machine.process(b"0::/pod\n", PLAIN_V2)
    machine.v2("pod", 70 << 30, 69 << 30, inactive=40 << 30, active=28 << 30)
    assert machine.headrooms() == [69 << 30]


def test_nested_limits_are_one_level_each(machine: Machine):
    machine.process(b"0::/a/b/c\n", PLAIN_V2)
    machine.v2("a", 100, 60, inactive=10)
    machine.v2("a/b", 40, 10)
    machine.v2("a/b/c", "max", 5)
    assert machine.headrooms() == [None, 30, 50]


def test_group_whose_parent_keeps_the_controller_has_no_level(machine: Machine):
    machine.process(b"0::/a/b\n", PLAIN_V2)
    machine.v2("a", 100, 60)
    (machine.cgroup / "a/b").mkdir()
    assert machine.headrooms() == [40]


def test_throttle_binds_like_a_limit(machine: Machine):
    machine.process(b"0::/a\n", PLAIN_V2)
    machine.v2("a", 100, 60, high=70)
    assert machine.headrooms() == [10]


def test_counters_that_disagree_are_no_negative_headroom(machine: Machine):
    machine.process(b"0::/a/b\n", PLAIN_V2)
    machine.v2("a", 50, 60)  # a limit set below the usage
    machine.v2("a/b", 50, 10, inactive=11)
    assert machine.headrooms() == [50, 0]


def test_version_1_sentinel_is_no_limit(machine: Machine):
    machine.process(b"4:memory:/docker/x\n1:cpu:/\n0::/\n", HYBRID)
    for path in ("docker/x", "docker", ""):
        machine.v1(path, NO_LIMIT_V1, 100)
    assert machine.headrooms() == [None, None, None]


def test_version_1_counts_what_is_below_too(machine: Machine):
    machine.process(b"4:memory:/docker/x\n0::/\n", HYBRID)
    machine.v1("docker/x", NO_LIMIT_V1, 10)
    machine.v1("docker", 1000, 700, file=300)
    machine.v1("", NO_LIMIT_V1, 5000)
    assert machine.headrooms() == [None, 600, None]


def test_version_1_limit_above_the_mount_counts(machine: Machine):
    machine.process(b"4:memory:/docker/x\n0::/\n", b"35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    machine.v1("", NO_LIMIT_V1, 100, file=40, above=500)
    assert machine.headrooms() == [440]


def test_container_without_a_namespace_sees_its_own_part(machine: Machine):
    machine.process(b"0::/docker/x/inner\n", b"31 23 0:28 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
    machine.v2("inner", "max", 1)
    machine.v2("", 100, 30)
    assert machine.headrooms() == [None, 70]


def test_of_two_mounts_the_one_that_shows_more(machine: Machine):
    machine.process(b"0::/docker/x\n", b"40 23 0:28 /docker/x /sys/fs/cgroup/part rw - cgroup2 none rw\n" + PLAIN_V2)
    machine.v2("docker/x", "max", 1)
    machine.v2("docker", 100, 30)
    machine.v2("part", 7, 0)
    assert machine.headrooms() == [None, 70]


@pytest.mark.parametrize("path", [b"/docker/y", b"/../x", b"/docker/xy"])
def test_group_outside_of_what_is_mounted_is_unknown(machine: Machine, path: bytes):
    machine.process(b"0::" + path + b"\n", b"31 23 0:28 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
    machine.v2("", 100, 30)
    found = machine.groups()
    assert isinstance(found, Unavailable)
    assert "shows in no mounted hierarchy (mounted: /docker/x)" in found.reason


def test_deleted_group_is_unknown(machine: Machine):
    machine.process(b"0::/a (deleted)\n", PLAIN_V2)
    assert isinstance(machine.groups(), Unavailable)


def test_no_mounted_hierarchy_is_unknown(machine: Machine):
    machine.process(b"0::/\n", b"27 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    found = machine.groups()
    assert isinstance(found, Unavailable)
    assert "none" in found.reason


def test_process_without_a_memory_controller_is_unknown(machine: Machine):
    machine.process(b"1:cpu:/\n", HYBRID)
    assert isinstance(machine.groups(), Unavailable)


@pytest.mark.parametrize("name", ["memory.max", "memory.high", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [b"", b"12", b"many\n", b"1\n2\n", b"-1\n", b"\xff\n"])
def test_level_that_is_not_whole_is_unknown_and_the_others_stay(machine: Machine, name: str, text: bytes):
    machine.process(b"0::/a/b\n", PLAIN_V2)
    machine.v2("a", 100, 60)
    (machine.v2("a/b", 90, 10, high=80) / name).write_bytes(text)
    found = machine.groups()
    assert isinstance(found, tuple)
    assert isinstance(found[0], Unavailable)
    assert str(machine.cgroup / "a/b") in found[0].reason
    assert found[1] == MemoryGroup(str(machine.cgroup / "a"), usage=60, reclaimable=0, limit=100, anon=1, unevictable=0)


def test_both_versions_tell_what_the_memory_is(machine: Machine):
    """Page cache and shmem are told apart: both versions count shmem as page cache too."""
    machine.process(b"0::/a\n", PLAIN_V2)
    group = machine.v2("a", "max", 60)
    (group / "memory.stat").write_text("anon 10\nfile 30\nshmem 12\ninactive_file 1\nactive_file 17\nunevictable 5\n")
    of_v2 = machine.groups()
    assert isinstance(of_v2, tuple)
    assert of_v2[0] == MemoryGroup(str(group), 60, 18, None, version=2, anon=10, file=18, shmem=12, unevictable=5)
    stat = "rss 1\ntotal_rss 10\ntotal_cache 30\ntotal_shmem 12\ntotal_unevictable 5\ntotal_inactive_file 1\ntotal_active_file 17\n"
    machine.process(b"4:memory:/b\n", HYBRID)
    machine.v1("b", NO_LIMIT_V1, 60)
    (machine.cgroup / "memory/b/memory.stat").write_text(stat)
    of_v1 = machine.groups()
    assert isinstance(of_v1, tuple)
    assert of_v1[0] == MemoryGroup(str(machine.cgroup / "memory/b"), 60, 18, None, version=1, anon=10, file=18, shmem=12, unevictable=5)


def test_process_that_has_ended_is_unknown(tmp_path: Path):
    found = read_memory_groups(4194305, tmp_path)
    assert isinstance(found, Unavailable)
    assert "ENOENT" in found.reason


@pytest.mark.parametrize(
    ("text", "limit"),
    [(b"max\n", None), (b"9223372036854771712\n", None), (b"9223372036854710272\n", None), (b"0\n", 0), (b"4096\n", 4096)],
)
def test_limits_of_both_versions(text: bytes, limit: int | None):
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", [b"", b"max", b"maximum\n", b"9223372036854775808\n", b"4096"])
def test_what_is_no_limit_is_unknown(text: bytes):
    assert isinstance(parse_limit(text), Unavailable)


def test_lines_of_membership():
    assert parse_cgroup(b"4:memory,x:/a:b\n0::/\nz::/\n2:cpu\n3:cpu:rel\n1:name=systemd:/cut") == (
        Membership(4, ("memory", "x"), "/a:b"),
        Membership(0, (), "/"),
    )


def test_lines_of_memory_stat():
    assert parse_memory_stat(b"a 1\nb x\nc 2 3\nd 4\ne 5") == {"a": 1, "d": 4}


@pytest.mark.parametrize(("events", "frozen"), [("populated 1\nfrozen 1\n", True), ("populated 1\nfrozen 0\n", False)])
def test_a_group_of_version_2_says_whether_it_is_frozen(tmp_path: Path, events: str, frozen: bool) -> None:
    """cgroup.events of the process's own group, which says it for those above too."""
    machine = Machine(tmp_path)
    machine.process(b"0::/pod/worker\n", PLAIN_V2)
    group = machine.cgroup / "pod/worker"
    group.mkdir(parents=True)
    (group / "cgroup.events").write_text(events)
    assert read_frozen("self", machine.proc, machine.cgroup) is frozen


def test_the_root_of_a_freezer_cannot_be_frozen(tmp_path: Path) -> None:
    """It has no file that could say so; without any freezer nothing is known."""
    machine = Machine(tmp_path)
    machine.process(b"6:freezer:/\n", b"37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n")
    (machine.cgroup / "freezer").mkdir()
    assert read_frozen("self", machine.proc, machine.cgroup) is False
    machine.process(b"6:cpu:/\n", b"37 31 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
    assert isinstance(read_frozen("self", machine.proc, machine.cgroup), Unavailable)
