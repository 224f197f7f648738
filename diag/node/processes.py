"""What the lock-free files of /proc say of each worker, once a second.

Owns the readings of stat, status, io, wchan and syscall, the threads of whoever is suspected of a stall, and the question whether its mmap
lock is held. Promises that nothing here blocks the collector or the process: the one read that may wait has a thread of its own, at most
one a worker. Refuses to take a reused pid for the worker, and to read a whole process list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from diag.node.collecting import Collected
from diag.node.runs import Seen
from diag.node.snapshot import ProcessFacts, ThreadFacts
from hwr.errors import Unavailable
from hwr.procfs.cgroup import read_frozen
from hwr.procfs.io import read_io
from hwr.procfs.reading import PROC_ROOT
from hwr.procfs.stat import Stat, read_stat
from hwr.procfs.status import Status, read_status
from hwr.procfs.threads import list_threads, read_syscall, read_thread_stat, read_wchan
from hwr.telemetry.clock import boot_ns
from hwr.units import NS_PER_S, printable

MAX_THREADS: Final = 64
# `status` is the longest text of these to parse, and what is taken from it hardly changes.
STATUS_NS: Final = 5 * NS_PER_S
_TICK_NS: Final = 10_000_000
# Between two looks while nobody is suspected of anything: a late beat or a long operation shows in the journals, once a second.
CALM_SECONDS: Final = 2.0
# What comes back within this is not held; the probe answers in microseconds on a free lock, in milliseconds on busy cores.
PROBE_SECONDS: Final = 0.05


class ProcessCollector:
    """Reads every live worker; `suspects` names the pids that are worth a closer look."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Seen]],
        suspects: Callable[[Mapping[int, ProcessFacts]], Collection[int]] = lambda facts: (),
        *,
        proc_root: Path = PROC_ROOT,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._workers, self._suspects, self._proc_root, self._clock = workers, suspects, proc_root, clock
        self._probes: dict[int, MmapProbe] = {}
        self._statuses: dict[int, tuple[int, int, Status | Unavailable]] = {}
        self.unreadable: tuple[str, ...] = ()

    def collect(self) -> Collected[dict[int, ProcessFacts]]:
        """Read once."""
        denied: set[str] = set()
        found: dict[int, ProcessFacts] = {}
        living = {worker.pid: worker for worker in self._workers() if worker.pid is not None}
        for pid in self._probes.keys() - living.keys():
            del self._probes[pid]
        for pid in self._statuses.keys() - living.keys():
            del self._statuses[pid]
        for pid, worker in living.items():
            facts = self._read(pid, worker, denied)
            if facts is not None:
                found[pid] = facts
        suspected = frozenset(self._suspects(found)) & found.keys()
        probes = {pid: self._probe(pid) for pid in suspected}
        for pid in suspected:
            frozen = read_frozen(pid, self._proc_root)
            threads = self._threads(pid, denied) or found[pid].threads
            found[pid] = replace(found[pid], threads=threads, frozen=None if isinstance(frozen, Unavailable) else frozen)
        for pid, probe in probes.items():
            found[pid] = replace(found[pid], mmap_lock_blocked_seconds=probe.blocked_seconds(self._clock()))
        self.unreadable = tuple(sorted(denied))
        return Collected(found, next_seconds=None if suspected else CALM_SECONDS)

    def blocked(self, pid: int) -> bool:
        """Say whether a read that needs this process's mmap lock waits just now."""
        probe = self._probes.get(pid)
        return probe is not None and probe.waiting

    def _read(self, pid: int, worker: Seen, denied: set[str]) -> ProcessFacts | None:
        stat = read_stat(pid, self._proc_root)
        if isinstance(stat, Unavailable) or abs(stat.start_ns - worker.start_ns) > _TICK_NS:
            return None
        status = self._status(pid, stat)
        io = read_io(pid, self._proc_root)
        if isinstance(io, Unavailable) and "CAP_" in io.reason:
            denied.add("processes: io of another user's workers: needs CAP_SYS_PTRACE")
        counted = None if isinstance(io, Unavailable) else io
        known = None if isinstance(status, Unavailable) else status
        return ProcessFacts(
            pid=pid,
            state=stat.state,
            sampled_ns=self._clock(),
            name=printable(stat.comm, 64),
            ppid=stat.ppid,
            uid=known.uids[1] if known and known.uids else None,
            tracer_pid=known.tracer_pid if known else None,
            thread_count=stat.threads,
            utime_s=stat.utime_s,
            stime_s=stat.stime_s,
            minflt=stat.minflt,
            majflt=stat.majflt,
            read_bytes=counted.read_bytes if counted else None,
            write_bytes=counted.write_bytes if counted else None,
            voluntary_switches=known.voluntary_switches if known else None,
            involuntary_switches=known.involuntary_switches if known else None,
            # The process's times, which are the main thread's with those of the others: nobody is judged by them here.
            threads=(self._thread(pid, pid, stat, denied),),
        )

    def _status(self, pid: int, stat: Stat) -> Status | Unavailable:
        """Return user, tracer and switches as of some seconds ago; of a stopped process, which a tracer may hold, as of now."""
        now = self._clock()
        start_ns, read_ns, known = self._statuses.get(pid, (0, 0, None))
        if known is None or stat.stopped or start_ns != stat.start_ns or now - read_ns >= STATUS_NS:
            known = read_status(pid, self._proc_root)
            self._statuses[pid] = (stat.start_ns, now, known)
        return known

    def _threads(self, pid: int, denied: set[str]) -> tuple[ThreadFacts, ...]:
        """Read the main thread and those that run or wait in the kernel, and of the others as many as there is room for."""
        listed = list_threads(pid, self._proc_root)
        ids = (pid,) if isinstance(listed, Unavailable) else listed
        stats: list[tuple[int, Stat]] = []
        for tid in ids:
            stat = read_thread_stat(pid, tid, self._proc_root)
            if not isinstance(stat, Unavailable):
                stats.append((tid, stat))
        stats.sort(key=lambda item: (item[0] != pid, item[1].state not in ("R", "D"), item[0]))
        return tuple(self._thread(pid, tid, stat, denied) for tid, stat in stats[:MAX_THREADS])

    def _thread(self, pid: int, tid: int, stat: Stat, denied: set[str]) -> ThreadFacts:
        wchan = read_wchan(pid, tid, self._proc_root)
        syscall = read_syscall(pid, tid, self._proc_root)
        if isinstance(syscall, Unavailable) and "CAP_" in syscall.reason:
            denied.add("processes: wchan and syscall of another user's workers: need CAP_SYS_PTRACE")
        told: str | None = None
        if not isinstance(syscall, Unavailable):
            told = "running" if syscall.running else None if syscall.number is None else str(syscall.number)
        return ThreadFacts(
            tid=tid,
            name=printable(stat.comm, 64),
            state=stat.state,
            wchan=None if isinstance(wchan, Unavailable) else wchan,
            syscall=told,
            utime_s=stat.utime_s,
            stime_s=stat.stime_s,
        )

    def _probe(self, pid: int) -> MmapProbe:
        probe = self._probes.get(pid)
        if probe is None or probe.told:
            probe = self._probes[pid] = MmapProbe(pid, self._proc_root, self._clock)
        return probe


class MmapProbe:
    """One byte of a process's command line, which the kernel reads under that process's mmap lock, asked for by a thread of its own."""

    def __init__(self, pid: int, proc_root: Path, clock: Callable[[], int]) -> None:
        self._path = proc_root / str(pid) / "cmdline"
        self._clock, self._begun_ns = clock, clock()
        self._waited_ns = 0
        self.told = False  # an answer that came between two looks is told by the next: the lock was held meanwhile
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, name="hwr-mmap-probe", daemon=True)
        self._thread.start()

    def blocked_seconds(self, now: int) -> float:
        """How long the read has been waiting, or had been when it came back; 0.0 if that was at once."""
        if not self._done.wait(max(0.0, PROBE_SECONDS - (now - self._begun_ns) / NS_PER_S)):
            return max(0.001, (now - self._begun_ns) / NS_PER_S)
        self.told = True
        waited = self._waited_ns / NS_PER_S
        return waited if waited > PROBE_SECONDS else 0.0

    @property
    def waiting(self) -> bool:
        """Whether the read waits just now."""
        return not self._done.is_set()

    def _read(self) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.read(1)
        except OSError:
            pass  # it has ended: nobody holds its lock
        finally:
            self._waited_ns = self._clock() - self._begun_ns
            self._done.set()
