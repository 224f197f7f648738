"""Which processes use an artifact, and which of them nobody accounts for.

Owns the join of three witnesses: shared locks on an artifact's lock file, leases that journals tell of, and mappings of its files. Promises
attribution by device and inode only, also of files that were set aside or deleted, and reads of foreign `maps` that are few (once a minute,
processes that hold file pages at all), bounded in time each, and never of a worker: journals say what those map. Refuses to guess: a
process whose maps may not be read is not said to map nothing, it is counted as unreadable.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from diag.node.artifact_files import ArtifactIndex
from diag.node.asides import Answer, Asides
from diag.node.collecting import Collected, Gaps
from diag.node.runs import Seen
from diag.node.snapshot import LockFacts, Mapper
from hwr.errors import Unavailable
from hwr.outcomes import Liveness, LockKind
from hwr.procfs.file_id import FileId
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, read_text
from hwr.procfs.stat import read_stat
from hwr.procfs.status import read_status
from hwr.procfs.text import hexadecimal, number
from hwr.telemetry.clock import boot_ns
from hwr.units import MIB, NS_PER_S, printable

SWEEP_SECONDS: Final = 60.0
# A sweep is made again after this many times its cost: a fifth of a hundredth of the time at most goes into it.
COST_SHARE: Final = 500
MIN_FILE_BYTES: Final = MIB
MAX_PROCESSES: Final = 512
MAX_USERS: Final = 64
# Reading maps needs the process's mmap lock: where that is held, the sweep goes on without it.
MAPS_SECONDS: Final = 0.05

_FILE: Final = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ .{4} [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+)", re.MULTILINE)


class MapperCollector:
    """Asks the three witnesses; the sweep over /proc when it is due."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Seen]],
        locks: Callable[[], Sequence[LockFacts]],
        index: ArtifactIndex,
        *,
        proc_root: Path = PROC_ROOT,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._workers, self._locks, self._index = workers, locks, index
        self._proc_root, self._clock = proc_root, clock
        self._asides = Asides("mappers", clock=clock)
        self._gaps = Gaps()
        self._due_ns = 0
        self._problem: str | None = None
        self._swept: dict[int, tuple[str, frozenset[str]]] = {}
        self._made_of: tuple[object, ...] = ()
        self._found: dict[str, tuple[Mapper, ...]] = {}

    @property
    def unreadable(self) -> tuple[str, ...]:
        """What may not be read, and what would open it."""
        return self._gaps.texts

    def collect(self) -> Collected[dict[str, tuple[Mapper, ...]]]:
        """Look once. The value is the same object as long as nothing changed."""
        workers = [worker for worker in self._workers() if worker.liveness is Liveness.ALIVE and worker.pid is not None]
        accounted = {worker.pid for worker in workers if worker.pid is not None}
        if self._clock() >= self._due_ns:
            self._sweep(accounted)
        leases = {
            worker.pid: frozenset(printable(str(lease.get("key")), 128) for lease in worker.state.leases.values())
            for worker in workers
            if worker.pid is not None
        }
        locks = self._locks()
        made_of = (accounted, self._swept, leases, locks)
        if made_of != self._made_of:
            self._made_of, self._found = made_of, self._joined(accounted, leases, locks)
        return Collected(self._found, self._problem)

    def _joined(
        self, accounted: set[int], leases: Mapping[int, frozenset[str]], locks: Sequence[LockFacts]
    ) -> dict[str, tuple[Mapper, ...]]:
        users: dict[str, dict[int, Mapper]] = {}
        for pid, (command, keys) in self._swept.items():
            for mapped in keys:
                users.setdefault(mapped, {})[pid] = Mapper(pid=pid, how="mapping", name=command, orphan=pid not in accounted)
        for pid, leased in leases.items():
            for key in leased:
                users.setdefault(key, {})[pid] = Mapper(pid=pid, how="lease")
        for lock in locks:
            if lock.kind is LockKind.ARTIFACT and lock.key is not None:
                for holder in lock.holders:
                    if holder.pid is not None and not holder.exclusive:
                        by_number = users.setdefault(lock.key, {})
                        met = by_number.get(holder.pid)
                        named = self._name(holder.pid, accounted) if met is None else met.name
                        by_number[holder.pid] = Mapper(pid=holder.pid, how="lease", name=named, orphan=holder.pid not in accounted)
        return {key: tuple(by_pid[pid] for pid in sorted(by_pid)[:MAX_USERS]) for key, by_pid in users.items()}

    def _sweep(self, accounted: set[int]) -> None:
        begun, cpu = time.perf_counter(), time.thread_time()
        wanted = self._index.by_file()
        self._swept, unread = self._mapping(accounted, wanted) if wanted else ({}, 0)
        cost = max(time.thread_time() - cpu, 0.1 * (time.perf_counter() - begun))
        self._due_ns = self._clock() + int(max(SWEEP_SECONDS if wanted else 0.0, cost * COST_SHARE) * NS_PER_S)
        self._problem = f"the mappings of {unread} processes could not be read" if unread else None

    def _mapping(self, accounted: set[int], wanted: Mapping[FileId, str]) -> tuple[dict[int, tuple[str, frozenset[str]]], int]:
        found: dict[int, tuple[str, frozenset[str]]] = {}
        unread = 0
        looked_at = 0
        for pid in self._pids():
            if pid in accounted:
                continue
            status = read_status(pid, self._proc_root)
            if isinstance(status, Unavailable) or (status.rss_file or 0) + (status.rss_shmem or 0) < MIN_FILE_BYTES:
                continue
            looked_at += 1
            if looked_at > MAX_PROCESSES:
                unread += 1
                continue
            answer = self._asides.ask(pid, functools.partial(_files_of, pid, self._proc_root), MAPS_SECONDS)
            files = answer.value if isinstance(answer, Answer) else answer
            if isinstance(files, frozenset):
                keys = frozenset(wanted[file] for file in files if file in wanted)
                if keys:
                    found[pid] = (printable(status.name, 64), keys)
                continue
            unread += 1
            if isinstance(files, Unavailable) and CAP_SYS_PTRACE in files.reason:
                self._gaps.note("mappers: maps of other users' processes", CAP_SYS_PTRACE)
        self._asides.forget(())
        return found, unread

    def _pids(self) -> list[int]:
        if self._proc_root == PROC_ROOT:
            return psutil.pids()
        return sorted(int(path.name) for path in self._proc_root.iterdir() if path.name.isdecimal())

    def _name(self, pid: int, accounted: set[int]) -> str:
        """Name a holder that no sweep has met yet; those of workers are said by their journals."""
        stat = Unavailable("") if pid in accounted else read_stat(pid, self._proc_root)
        return "" if isinstance(stat, Unavailable) else printable(stat.comm, 64)


def _files_of(pid: int, proc_root: Path) -> frozenset[FileId] | Unavailable:
    text = read_text(proc_root / str(pid) / "maps", capability=CAP_SYS_PTRACE)
    if isinstance(text, Unavailable):
        return text
    found: set[FileId] = set()
    for major, minor, inode in set(_FILE.findall(text)):
        numbers = (hexadecimal(major), hexadecimal(minor), number(inode))
        if None not in numbers and inode != b"0":
            found.add(FileId(*(value for value in numbers if value is not None)))
    return frozenset(found)
