"""Watching a node: collectors on one side, snapshots on the other.

Owns which collectors there are, what each is told to look at, and the join of what they brought. Promises snapshots from memory: `look`
reads no file and waits for nobody. Refuses to keep anything beyond the last looks: journals do that.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from diag.node import assembly
from diag.node.artifact_files import ArtifactIndex
from diag.node.assembly import ArtifactJoin, Parts
from diag.node.cgroups import CgroupCollector
from diag.node.collecting import Collected, Collector, Running
from diag.node.engines import EngineNames
from diag.node.kernel import KernelCollector
from diag.node.locks import LockCollector
from diag.node.mappers import MapperCollector
from diag.node.memory import MemoryCollector
from diag.node.page_cache import PageCacheCollector
from diag.node.processes import ProcessCollector
from diag.node.run_listing import ABSENT
from diag.node.runs import RunsFound, RunWatch, Seen
from diag.node.snapshot import LockFacts, NodeSnapshot, ProcessFacts
from diag.node.stores import DEADLINE_SECONDS, EVERY_SECONDS, MAX_DOMAINS, Reporters, Roots, StoreCollector, StoreFound
from diag.node.verdicts import Judge
from hwr.errors import Unavailable
from hwr.outcomes import CollectorName, Role, View
from hwr.procfs.identity import read_boot_id
from hwr.procfs.reading import PROC_ROOT
from hwr.telemetry.clock import boot_ns, realtime_offset_ns
from hwr.units import NS_PER_S, printable

PLACES_NS: Final = 10 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is watched, and for whom.

    `run_dirs` gives the run directories, the same first one each time; more may come. `periodic_smaps` off: nothing reads a process's
    mappings unless somebody asks.
    """

    view: View
    run_dirs: Callable[[], tuple[Path, ...]]
    roots: tuple[Path, ...] = ()
    stall_after_seconds: float = 30.0
    periodic_smaps: bool = True


class NodeWatch:
    """The collectors of this process, and the newest look at what they brought. `look` is for one thread."""

    def __init__(self, settings: WatchSettings, *, proc_root: Path = PROC_ROOT, clock: Callable[[], int] = boot_ns) -> None:
        self._settings, self._proc_root, self._clock = settings, proc_root, clock
        self._running = Running(clock=clock)
        self._engines = EngineNames()
        self._judge = Judge(settings.stall_after_seconds)
        self._index = ArtifactIndex(proc_root)
        self._roots = Roots(settings.roots)
        self._places = settings.run_dirs()
        self._places_ns = clock()
        self._reporters = Reporters(self._places[0] if settings.view is View.AGENT else None)
        self._artifacts = ArtifactJoin()
        self._started_ns = clock()
        boot = read_boot_id(proc_root)
        self._boot = None if isinstance(boot, Unavailable) else boot
        self._host, self._kernel = printable(socket.gethostname(), 255), platform.release()
        self._version = metadata.version("hwr-suite")
        self._names: Mapping[Path, str] = {}
        self._readers: list[Any] = []
        self._store_readers: dict[str, StoreCollector] = {}
        self._add_collectors()

    def start(self) -> None:
        """Start the collectors' threads."""
        self._running.start()

    def stop(self) -> None:
        """Let them end; one that hangs is not waited for."""
        self._running.stop()
        self._reporters.close()

    def once(self) -> NodeSnapshot:
        """Run every collector once, without threads that go on, and look."""
        self._running.run_once((CollectorName.RUNS,))
        self._follow_roots()
        self._running.run_once(tuple(name for name in CollectorName if name is not CollectorName.RUNS))
        return self.look()

    def look(self) -> NodeSnapshot:
        """Put together what the collectors brought last."""
        now = self._clock()
        self._follow_roots()
        parts = Parts(
            runs=self._values(CollectorName.RUNS),
            processes=self._value(CollectorName.PROCESSES, {}),
            memory=self._value(CollectorName.MEMORY, {}),
            page_cache=self._value(CollectorName.PAGE_CACHE, {}),
            locks=self._value(CollectorName.LOCKS, ()),
            kernel=self._value(CollectorName.KERNEL, None),
            cgroups=self._value(CollectorName.CGROUP, ()),
            stores=self._values(CollectorName.STORE),
            mappers=self._value(CollectorName.MAPPERS, {}),
        )
        seen = parts.seen()
        placed = self._engines.assign(seen)
        self._names = names = assembly.names_of(seen, placed)
        by_pid = {worker.pid: names[worker.directory] for worker in seen if worker.pid is not None and worker.role is not Role.AGENT}
        locks = assembly.named_locks(parts.locks, by_pid)
        verdicts = self._judge.judge(now, seen, names, parts.processes, parts.kernel, locks)
        return NodeSnapshot(
            view=self._settings.view,
            taken_ns=now,
            realtime_offset_ns=realtime_offset_ns(),
            host=self._host,
            boot_id=self._boot,
            kernel_release=self._kernel,
            program_version=self._version,
            pid=os.getpid(),
            started_ns=self._started_ns,
            run_directories=tuple(found.directory for found in parts.runs),
            workers=assembly.workers(parts, seen, placed, verdicts),
            artifacts=self._artifacts.join(parts, by_pid),
            stores=assembly.reported(parts.stores),
            locks=locks,
            kernel=parts.kernel,
            cgroups=tuple(parts.cgroups),
            collectors=self._running.health(),
            unreadable=self._unreadable(),
        )

    def _add_collectors(self) -> None:
        settings, index, workers = self._settings, self._index, self._living
        for path in self._places:
            self._follow_runs(path)
        processes = ProcessCollector(workers, self._suspects, proc_root=self._proc_root, clock=self._clock)
        memory = MemoryCollector(
            workers,
            index,
            blocked=processes.blocked,
            periodic_smaps=settings.periodic_smaps,
            proc_root=self._proc_root,
            clock=self._clock,
        )
        cache = PageCacheCollector(workers, self._stores, index, clock=self._clock)
        locks = LockCollector(workers, self._stores, index, proc_root=self._proc_root, clock=self._clock)
        kernel = KernelCollector(self._proc_root, self._clock)
        cgroups = CgroupCollector(workers, lambda: self._names, proc_root=self._proc_root, clock=self._clock)
        mappers = MapperCollector(workers, self._locks, index, proc_root=self._proc_root, clock=self._clock)
        self._readers = [processes, memory, cache, locks, kernel, cgroups, mappers]
        self._add(CollectorName.PROCESSES, processes.collect, interval=1.0, deadline=2.0)
        self._add(CollectorName.MEMORY, memory.collect, interval=5.0, deadline=30.0)
        self._add(CollectorName.PAGE_CACHE, cache.collect, interval=15.0, deadline=30.0)
        self._add(CollectorName.LOCKS, locks.collect, interval=1.0, deadline=2.0)
        self._add(CollectorName.KERNEL, kernel.collect, interval=1.0, deadline=2.0)
        self._add(CollectorName.CGROUP, cgroups.collect, interval=5.0, deadline=5.0)
        self._add(CollectorName.MAPPERS, mappers.collect, interval=5.0, deadline=15.0)

    def _follow_runs(self, path: Path) -> None:
        watch = RunWatch(path, proc_root=self._proc_root, clock=self._clock)

        def collect() -> Collected[RunsFound]:
            if path == self._places[0]:
                self._find_places()
            found = watch.collect()
            # A directory that does not exist is an answer; one of which a part may not be read is a failure.
            return Collected(found, None if found.directory.problem == ABSENT else found.directory.problem)

        self._add(CollectorName.RUNS, collect, target=str(path), interval=1.0, deadline=5.0)

    def _find_places(self) -> None:
        """Look for run directories that were not there before: a user's first worker makes that user's own."""
        if self._clock() - self._places_ns > PLACES_NS:
            self._places_ns = self._clock()
            for path in self._settings.run_dirs():
                if path not in self._places:
                    self._places = (*self._places, path)
                    self._follow_runs(path)

    def _add(
        self, name: CollectorName, collect: Callable[[], Any], *, target: str = "", interval: float = 1.0, deadline: float = 5.0
    ) -> None:
        self._running.add(Collector(name=name, target=target, collect=collect, interval_seconds=interval, deadline_seconds=deadline))

    def _follow_roots(self) -> None:
        """Look at the stores that are named now, and at no others."""
        roots = {root.name: root for root in self._roots.find(self._seen())}
        for name in [name for name in self._store_readers if name not in roots]:
            self._running.remove(CollectorName.STORE, name)
            self._reporters.forget(name)
            del self._store_readers[name]
        for name, root in roots.items():
            if name not in self._store_readers:
                reader = StoreCollector(root, self._seen, self._index, self._reporters, proc_root=self._proc_root, clock=self._clock)
                self._store_readers[name] = reader
                self._add(CollectorName.STORE, reader.collect, target=name, interval=2 * EVERY_SECONDS, deadline=DEADLINE_SECONDS)

    def _suspects(self, facts: Mapping[int, ProcessFacts]) -> Collection[int]:
        return self._judge.suspects(self._clock(), self._living(), facts)

    def _seen(self) -> tuple[Seen, ...]:
        return Parts(runs=self._values(CollectorName.RUNS)).seen()

    def _living(self) -> Sequence[Seen]:
        """The processes that can be looked at: alive, and visible from here."""
        return [worker for worker in self._seen() if worker.pid is not None and worker.role is not Role.AGENT]

    def _stores(self) -> Sequence[StoreFound]:
        return self._values(CollectorName.STORE)

    def _locks(self) -> Sequence[LockFacts]:
        found: Sequence[LockFacts] = self._value(CollectorName.LOCKS, ())
        return found

    def _values(self, name: CollectorName) -> tuple[Any, ...]:
        return tuple(reading.value for reading in self._running.latest(name))

    def _value(self, name: CollectorName, otherwise: Any) -> Any:
        readings = self._running.latest(name)
        return readings[0].value if readings else otherwise

    def _unreadable(self) -> tuple[str, ...]:
        found = [text for reader in self._readers for text in getattr(reader, "unreadable", ())]
        denied = [runs.directory.path for runs in self._values(CollectorName.RUNS) if "EACCES" in (runs.directory.problem or "")]
        found += [f"runs: journals of other users in {path}: needs their group, or CAP_DAC_READ_SEARCH" for path in denied]
        if self._roots.left_out:
            found.append(f"store: {len(self._roots.left_out)} roots beyond the first {MAX_DOMAINS}: {', '.join(self._roots.left_out[:3])}")
        return tuple(dict.fromkeys(found))
