"""The memory control groups of the workers, split by what the memory is.

Owns which groups there are: those of living workers and every level above, each once with the workers in it. Promises that unevictable and
anonymous memory stand beside the usage, since page cache that can be dropped is part of that. Refuses figures that a version does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diag.node.collecting import Collected, joined_problem
from diag.node.runs import Seen
from diag.node.snapshot import CgroupFacts
from hwr.errors import Unavailable
from hwr.outcomes import Liveness
from hwr.procfs.cgroup import CGROUP_ROOT, MemoryGroup, read_memory_groups
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.telemetry.clock import boot_ns
from hwr.units import printable

MAX_GROUPS: Final = 64
_MAX_PATH: Final = 4096


@dataclass(slots=True)
class _Level:
    group: MemoryGroup
    workers: list[str] = field(default_factory=list)


class CgroupCollector:
    """Reads them; `names` says how views call a worker."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Seen]],
        names: Callable[[], Mapping[Path, str]] = dict,
        *,
        proc_root: Path = PROC_ROOT,
        cgroup_root: Path = CGROUP_ROOT,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._workers, self._names = workers, names
        self._proc_root, self._cgroup_root, self._clock = proc_root, cgroup_root, clock

    def collect(self) -> Collected[tuple[CgroupFacts, ...]]:
        """Read once: each group once, however many workers are in it."""
        names = self._names()
        members: dict[bytes, list[Seen]] = {}
        for worker in self._workers():
            if worker.liveness is Liveness.ALIVE and worker.pid is not None:
                text = read_text(self._proc_root / str(worker.pid) / "cgroup")
                if not isinstance(text, Unavailable):
                    members.setdefault(text, []).append(worker)
        levels: dict[str, _Level] = {}
        problems: list[str] = []
        for workers in members.values():
            pid = workers[0].pid
            groups = Unavailable("it has ended") if pid is None else read_memory_groups(pid, self._proc_root, self._cgroup_root)
            if isinstance(groups, Unavailable):
                problems.append(groups.reason)
                continue
            for group in groups:
                if isinstance(group, Unavailable):
                    problems.append(group.reason)
                    continue
                level = levels.setdefault(group.path, _Level(group))
                level.workers += [names.get(worker.directory, f"{worker.engine}/{worker.rank}") for worker in workers]
        now = self._clock()
        facts = tuple(_facts(level, now) for _, level in sorted(levels.items())[:MAX_GROUPS])
        return Collected(facts, joined_problem(problems))


def _facts(level: _Level, now: int) -> CgroupFacts:
    group = level.group
    return CgroupFacts(
        path=printable(group.path, _MAX_PATH),
        version=group.version,
        sampled_ns=now,
        usage_bytes=group.usage,
        limit_bytes=group.limit,
        anon_bytes=group.anon,
        file_bytes=group.file,
        shmem_bytes=group.shmem,
        unevictable_bytes=group.unevictable,
        workers=tuple(sorted(set(level.workers))),
    )
