"""The memory limits of the control groups that a process is in, version 1 and 2.

Owns /proc/PID/cgroup, the way from there to a directory, and the memory files in it. Promises one `MemoryGroup` a level, from
the process's own group up to the topmost that shows here: a limit anywhere above binds as well. Refuses what lies above the
mount (a container sees its own part of the tree), except that version 1 says its tightest limit: hierarchical_memory_limit.

On a hybrid machine the memory controller is on one side only: version 1 where a hierarchy names it, else version 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.mountinfo import Mount, read_mountinfo
from hwr.procfs.reading import PROC_ROOT, Pid, read_text
from hwr.procfs.text import complete_lines, name_text, number

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")

# Version 1 writes "no limit" as the most pages that a page counter holds, in bytes (mm/memcontrol.c, PAGE_COUNTER_MAX):
# 2^63 - 1 rounded down to a page of 4 KiB (9223372036854771712) up to 64 KiB, and not rounded before Linux 4.
_UNLIMITED_V1: Final = (1 << 63) - (1 << 16)
_LARGEST: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Membership:
    """One line of /proc/PID/cgroup: hierarchy 0 is version 2, which names no controllers."""

    hierarchy: int
    controllers: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class _Words:
    """What a version calls its files and counters."""

    version: int
    usage: str
    limits: tuple[str, ...]
    file_pages: tuple[str, str]
    anon: str
    cache: str  # with shmem, in both versions
    shmem: str
    unevictable: str


# Of version 1 the plain names count this group alone, the total_ ones what is below it too, as the limit does.
_V1: Final = _Words(
    version=1,
    usage="memory.usage_in_bytes",
    limits=("memory.limit_in_bytes",),
    file_pages=("total_inactive_file", "total_active_file"),
    anon="total_rss",
    cache="total_cache",
    shmem="total_shmem",
    unevictable="total_unevictable",
)
# Above `high` each allocation is throttled until something is reclaimed, and pinned pages never are.
_V2: Final = _Words(
    version=2,
    usage="memory.current",
    limits=("memory.max", "memory.high"),
    file_pages=("inactive_file", "active_file"),
    anon="anon",
    cache="file",
    shmem="shmem",
    unevictable="unevictable",
)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One level: bytes charged to it and below, how many of them are file pages that can be dropped, and its limit.

    The parts by kind are disjoint but for `unevictable`; None is what this kernel does not tell.
    """

    path: str
    usage: int
    reclaimable: int
    limit: int | None
    version: int = 2
    anon: int | None = None
    file: int | None = None  # page cache of files, without what is in `shmem`
    shmem: int | None = None  # tmpfs and shared anonymous memory
    unevictable: int | None = None  # mlocked, or otherwise not reclaimable

    @property
    def headroom(self) -> int | None:
        """What can still be charged once file cache has given way; None without a limit."""
        # The counters are summed over the CPUs at different moments: their difference may fall below zero.
        return None if self.limit is None else max(0, self.limit - max(0, self.usage - self.reclaimable))


def parse_cgroup(text: bytes) -> tuple[Membership, ...]:
    """Parse the lines in their own order; those that are not whole are skipped."""
    found: list[Membership] = []
    for line in complete_lines(text):
        fields = line.split(b":", 2)  # a path may hold colons
        hierarchy = number(fields[0])
        if len(fields) == 3 and hierarchy is not None and fields[2].startswith(b"/"):
            found.append(Membership(hierarchy, tuple(name_text(word) for word in fields[1].split(b",") if word), name_text(fields[2])))
    return tuple(found)


def parse_memory_stat(text: bytes) -> dict[str, int]:
    """Parse the `name number` lines of memory.stat; others are skipped."""
    found: dict[str, int] = {}
    for line in complete_lines(text):
        name, _, word = line.partition(b" ")
        value = number(word)
        if name and value is not None:
            found.setdefault(name_text(name), value)
    return found


def parse_limit(text: bytes) -> int | Unavailable | None:
    """Parse a limit of either version: `max` and version 1's largest values are none."""
    if text == b"max\n":
        return None
    value = _amount(text)
    if value is None or value > _LARGEST:
        return Unavailable("not a whole limit")
    return None if value >= _UNLIMITED_V1 else value


def read_memory_groups(
    pid: Pid = "self", proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT
) -> tuple[MemoryGroup | Unavailable, ...] | Unavailable:
    """Read the levels that charge a process's memory, its own first; none where no controller limits it.

    `cgroup_root` stands for /sys/fs/cgroup in the paths of the mount table.
    """
    text = read_text(proc_root / str(pid) / "cgroup")
    mounts = read_mountinfo(pid, proc_root)
    if isinstance(text, Unavailable):
        return text
    if isinstance(mounts, Unavailable):
        return mounts
    memberships = parse_cgroup(text)
    of_v1 = next((found for found in memberships if "memory" in found.controllers), None)
    own = of_v1 or next((found for found in memberships if found.hierarchy == 0), None)
    if own is None:
        return Unavailable("cgroup: no whole line of version 2 or of version 1's memory controller")
    hierarchy = [m for m in mounts if (m.fstype == "cgroup" and "memory" in m.super_options if of_v1 else m.fstype == "cgroup2")]
    place = _place(own.path, hierarchy)
    if isinstance(place, Unavailable):
        return place
    mount, below = place
    top = _rooted(mount.mount_point, cgroup_root)
    if _absent(top / below):
        return Unavailable(f"{top / below}: the group's directory does not show here")
    levels = [top / below, *(top / parent for parent in below.parents)]
    read = _read_v1 if of_v1 else _read_v2
    return tuple(group for group in map(read, levels) if group is not None)


def read_frozen(pid: Pid, proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> bool | Unavailable:
    """Ask whether the group of a process is frozen, itself or by one above it: then none of its threads runs, in whichever state they show.

    Version 1 says so in freezer.state, version 2 in cgroup.events.
    """
    text = read_text(proc_root / str(pid) / "cgroup")
    mounts = read_mountinfo(pid, proc_root)
    if isinstance(text, Unavailable):
        return text
    if isinstance(mounts, Unavailable):
        return mounts
    answer: bool | Unavailable = Unavailable("cgroup: no freezer shows here")
    for membership in parse_cgroup(text):
        if membership.hierarchy == 0:
            hierarchy, name, word = [mount for mount in mounts if mount.fstype == "cgroup2"], "cgroup.events", b"frozen 1"
        elif "freezer" in membership.controllers:
            hierarchy = [mount for mount in mounts if mount.fstype == "cgroup" and "freezer" in mount.super_options]
            name, word = "freezer.state", b"FROZEN"
        else:
            continue
        place = _place(membership.path, hierarchy)
        if isinstance(place, Unavailable):
            continue
        file = _rooted(place[0].mount_point, cgroup_root) / place[1] / name
        told = read_text(file)
        if not isinstance(told, Unavailable):
            if word in complete_lines(told):
                return True
            answer = False
        elif _absent(file) and not _absent(file.parent):  # the root has no such file: it cannot be frozen
            answer = False
    return answer


def _place(path: str, hierarchy: Sequence[Mount]) -> tuple[Mount, PurePosixPath] | Unavailable:
    """Find the mount that shows a group with the most levels above it, and the group's path below that mount."""
    wanted = PurePosixPath(path)
    showing = [mount for mount in hierarchy if ".." not in wanted.parts and wanted.is_relative_to(mount.root)]
    if not showing:
        roots = ", ".join(mount.root for mount in hierarchy) or "none"
        return Unavailable(f"cgroup: {path} shows in no mounted hierarchy (mounted: {roots})")
    mount = min(showing, key=lambda mount: len(PurePosixPath(mount.root).parts))
    return mount, wanted.relative_to(mount.root)


def _rooted(mount_point: str, cgroup_root: Path) -> Path:
    point = Path(mount_point)
    return cgroup_root / point.relative_to(CGROUP_ROOT) if point.is_relative_to(CGROUP_ROOT) else point


def _read_v2(group: Path) -> MemoryGroup | Unavailable | None:
    if _absent(group / "memory.max"):
        return None  # the root, or the parent does not hand the controller down: nothing is limited here
    words = replace(_V2, limits=("memory.max",)) if _absent(group / "memory.high") else _V2
    return _group(group, words)


def _read_v1(group: Path) -> MemoryGroup | Unavailable | None:
    return _group(group, _V1)


def _group(group: Path, words: _Words) -> MemoryGroup | Unavailable:
    limits: list[int] = []
    for name in words.limits:
        text = read_text(group / name)
        limit = text if isinstance(text, Unavailable) else parse_limit(text)
        if isinstance(limit, Unavailable):
            return limit if isinstance(text, Unavailable) else Unavailable(f"{group / name}: {limit.reason}")
        if limit is not None:
            limits.append(limit)
    usage_text, stat_text = read_text(group / words.usage), read_text(group / "memory.stat")
    if isinstance(usage_text, Unavailable):
        return usage_text
    if isinstance(stat_text, Unavailable):
        return stat_text
    usage, stat = _amount(usage_text), parse_memory_stat(stat_text)
    inactive, active = (stat.get(name) for name in words.file_pages)
    if usage is None or inactive is None or active is None:
        return Unavailable(f"{group}: {words.usage} or memory.stat is not whole")
    above = stat.get("hierarchical_memory_limit", _UNLIMITED_V1)
    if above < _UNLIMITED_V1:
        limits.append(above)
    cache, shmem = stat.get(words.cache), stat.get(words.shmem)
    return MemoryGroup(
        path=str(group),
        usage=usage,
        reclaimable=inactive + active,
        limit=min(limits, default=None),
        version=words.version,
        anon=stat.get(words.anon),
        file=None if cache is None or shmem is None else max(0, cache - shmem),
        shmem=shmem,
        unevictable=stat.get(words.unevictable),
    )


def _amount(text: bytes) -> int | None:
    lines = complete_lines(text)
    return number(lines[0]) if len(lines) == 1 else None


def _absent(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in a name that was made up
        return True
    except OSError:
        return False  # there, or not to be known: reading it will say
    return False
