"""The memory groups of workers: each once, split by what the memory is, in both versions."""

from __future__ import annotations

import os
from pathlib import Path

from node_collectors import seen

from diag.node.cgroups import CgroupCollector

V2 = b"31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
STAT = "anon 10\nfile 30\nshmem 12\ninactive_file 1\nactive_file 17\nunevictable 5\n"


def tree(root: Path, members: dict[int, str]) -> CgroupCollector:
    """Write a /proc and a version 2 hierarchy for these processes."""
    for pid, group in members.items():
        own = root / "proc" / str(pid)
        own.mkdir(parents=True)
        (own / "cgroup").write_text(f"0::{group}\n")
        (own / "mountinfo").write_bytes(V2)
        for level in (root / "cgroup" / group.lstrip("/"), (root / "cgroup" / group.lstrip("/")).parent):
            level.mkdir(parents=True, exist_ok=True)
            if level != root / "cgroup":
                for name, text in (("memory.max", "1000\n"), ("memory.current", "60\n"), ("memory.stat", STAT)):
                    (level / name).write_text(text)
    workers = [seen(pid, rank=rank, start_ns=1) for rank, pid in enumerate(members)]
    return CgroupCollector(lambda: workers, proc_root=root / "proc", cgroup_root=root / "cgroup")


def test_the_groups_of_this_machine_are_found() -> None:
    """Whatever version it has: this process's own group and those above, none twice."""
    found = CgroupCollector(lambda: [seen(os.getpid()), seen(os.getpid(), rank=1)]).collect()
    assert found.problem is None
    assert len({group.path for group in found.value}) == len(found.value)
    assert all(group.workers == ("default/0", "default/1") for group in found.value)
    assert all(group.version in (1, 2) and (group.usage_bytes or 0) >= 0 for group in found.value)


def test_a_group_is_told_once_with_the_workers_in_it_and_below(tmp_path: Path) -> None:
    """Two pods below one slice: three levels, the slice with everybody; anonymous, file, shmem and unevictable apart."""
    found = tree(tmp_path, {10: "/slice/a", 11: "/slice/a", 12: "/slice/b"}).collect()
    by_name = {Path(group.path).name: group for group in found.value}
    assert {name: group.workers for name, group in by_name.items()} == {
        "a": ("default/0", "default/1"),
        "b": ("default/2",),
        "slice": ("default/0", "default/1", "default/2"),
    }
    one = by_name["a"]
    assert (one.version, one.usage_bytes, one.limit_bytes) == (2, 60, 1000)
    assert (one.anon_bytes, one.file_bytes, one.shmem_bytes, one.unevictable_bytes) == (10, 18, 12, 5)


def test_a_group_that_is_not_whole_is_a_problem_and_the_others_stay(tmp_path: Path) -> None:
    """One torn file costs one level."""
    collector = tree(tmp_path, {10: "/slice/a", 12: "/slice/b"})
    (tmp_path / "cgroup/slice/a/memory.stat").write_text("torn")
    found = collector.collect()
    assert {Path(group.path).name for group in found.value} == {"b", "slice"}
    assert "memory.stat" in str(found.problem)


def test_a_worker_that_has_ended_is_no_problem(tmp_path: Path) -> None:
    """It has no group any more."""
    found = CgroupCollector(lambda: [seen(4_000_000, start_ns=1)], proc_root=tmp_path).collect()
    assert (found.value, found.problem) == ((), None)
