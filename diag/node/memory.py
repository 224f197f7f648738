"""The memory of each worker, read so that it does not hurt.

Owns which file of /proc is read when. Promises (N5): `status` always, it is free; the whole of `smaps` only where its estimated cost to the
target is at most five milliseconds; above that the anonymous pages of artifact mappings by PAGEMAP_SCAN, a window of 64 MiB at a time with
pauses between; a share of the time that all of it may take; a source, a time and a cost with every figure; and that a worker which holds
its mmap lock costs its own figures only. Refuses to read the mappings of a process that registers, or whose mmap lock is held.

PSS of a large process is read only when somebody asks (`read_pss`): by a child that is killed at its deadline.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diag.node.artifact_files import ArtifactIndex
from diag.node.asides import Answer, Asides, Waiting
from diag.node.collecting import Allowance, Collected, Gaps, joined_problem
from diag.node.memory_reading import Looked, Scan, begin_scan, look_at_all
from diag.node.runs import Seen
from diag.node.snapshot import ArtifactUse, MemoryFigure
from hwr.errors import Unavailable, errno_text
from hwr.outcomes import MemorySource, Operation
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT
from hwr.procfs.smaps_rollup import SmapsRollup, parse_smaps_rollup
from hwr.procfs.status import Status, read_status
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.state import WorkerState
from hwr.units import GIB, NS_PER_S, one_line

# What the target may be made to wait, each time.
SMAPS_COST_SECONDS: Final = 0.005
# 24-33 ms a GiB of 4 KiB pages on tmpfs, 7-11 with large folios, were measured; the first estimate is the worst.
FIRST_SECONDS_PER_GIB: Final = 0.030
# A process that measured dear once (a busy machine) is given the first estimate again after this.
ESTIMATE_SECONDS: Final = 300.0
EVERY_SECONDS: Final = 15.0
# Files of a fresh lease are found by the store's own collector within its next looks.
UNKNOWN_SECONDS: Final = 2.0
MAPS_EVERY_SECONDS: Final = 300.0
# Of the agent's whole time, for all workers together; the burst serves the first look at eight of them.
SHARE: Final = 0.002
BURST_SECONDS: Final = 0.06
# Of one worker, before the next one's turn: with the pauses some tenths of a second.
STEP_SECONDS: Final = 0.02
WINDOWS_AT_ONCE: Final = 1024
LOOKS_AT_ONCE: Final = 2  # of one worker: the addresses, then their first windows
# How long one worker is waited for; its answer may come later.
PATIENCE_SECONDS: Final = 0.5
PSS_DEADLINE_SECONDS: Final = 5.0
_REGISTERING: Final = frozenset({Operation.REGISTER.value, Operation.REGISTER_CHUNK.value})


@dataclass(frozen=True, slots=True)
class MemoryOf:
    """The figures of one process, and of the artifacts that it maps."""

    figures: dict[str, MemoryFigure] = field(default_factory=dict)
    artifacts: tuple[ArtifactUse, ...] = ()


@dataclass(slots=True)
class _Target:
    """What is known of one process, and when it is looked at again."""

    start_ns: int
    figures: dict[str, MemoryFigure] = field(default_factory=dict)
    artifacts: dict[str, ArtifactUse] = field(default_factory=dict)
    seconds_per_gib: float = FIRST_SECONDS_PER_GIB
    measured_ns: int = 0
    due_ns: int = 0
    mapped_ns: int = 0  # when its maps were read
    keys: frozenset[str] = frozenset()
    scan: Scan | None = None


class MemoryCollector:
    """Reads every live worker, each when its turn has come; `blocked` says whose mmap lock is held."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Seen]],
        index: ArtifactIndex,
        *,
        blocked: Callable[[int], bool] = lambda pid: False,
        periodic_smaps: bool = True,
        proc_root: Path = PROC_ROOT,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._workers, self._index, self._blocked = workers, index, blocked
        self._periodic_smaps, self._proc_root, self._clock = periodic_smaps, proc_root, clock
        self._asides = Asides("memory", clock=clock)
        self._allowance = Allowance(SHARE, BURST_SECONDS, clock=clock)
        self._gaps = Gaps()
        self._targets: dict[int, _Target] = {}

    @property
    def unreadable(self) -> tuple[str, ...]:
        """What of memory may not be read, and what would open it."""
        return self._gaps.texts

    def collect(self) -> Collected[dict[int, MemoryOf]]:
        """Read what is due, the longest overdue first."""
        living = {worker.pid: worker for worker in self._workers() if worker.pid is not None}
        self._targets = {pid: target for pid, target in self._targets.items() if pid in living}
        self._asides.forget({(pid, target.start_ns) for pid, target in self._targets.items()})
        for pid, worker in living.items():
            known = self._targets.get(pid)
            if known is None or known.start_ns != worker.start_ns:
                self._targets[pid] = _Target(worker.start_ns)
        problems: list[str] = []
        for pid, target in sorted(self._targets.items(), key=lambda item: item[1].due_ns):
            status = self._status(pid, target)
            if status is not None and status.rss is not None:
                waits = self._closer(pid, living[pid], target, status.rss)
                if waits is not None:
                    problems.append(f"mappings of pid {pid}: no answer for {waits.seconds:.0f} s: its mmap lock is held")
        found = {
            pid: MemoryOf(dict(target.figures), tuple(target.artifacts[key] for key in sorted(target.artifacts)))
            for pid, target in self._targets.items()
        }
        return Collected(found, joined_problem(problems))

    def read_pss(self, pid: int, *, deadline_seconds: float = PSS_DEADLINE_SECONDS) -> SmapsRollup | Unavailable:
        """Read a worker's rollup because somebody asked, from any thread."""
        worker = next((worker for worker in self._workers() if worker.pid == pid), None)
        if worker is None:
            return Unavailable("no living worker of this node has this pid")
        if self._blocked(pid):
            return Unavailable("its mmap lock is held")
        return read_pss(pid, worker.state, deadline_seconds=deadline_seconds, proc_root=self._proc_root)

    def _status(self, pid: int, target: _Target) -> Status | None:
        begun = time.perf_counter()
        status = read_status(pid, self._proc_root)
        cost = time.perf_counter() - begun
        if isinstance(status, Unavailable):
            return None
        told = {
            "rss_anon": status.rss_anon,
            "rss_file": status.rss_file,
            "rss_shmem": status.rss_shmem,
            "locked": status.locked,
            "hugetlb": status.hugetlb,
        }
        now = self._clock()
        for name, size in told.items():
            if size is not None:
                target.figures[name] = MemoryFigure(bytes=size, source=MemorySource.STATUS, sampled_ns=now, cost_seconds=cost)
        return status

    def _closer(self, pid: int, worker: Seen, target: _Target, rss: int) -> Waiting | None:
        """Look at the mappings if it is time, or take what an earlier look brought; say so while one waits."""
        key = (pid, target.start_ns)
        earlier = self._asides.fetch(key, 0.0)
        if earlier is not None:
            return self._take(target, earlier, rss)
        keys = frozenset(str(lease.get("key")) for lease in worker.state.leases.values())
        if keys != target.keys:
            target.keys, target.scan, target.due_ns, target.mapped_ns = keys, None, 0, 0
            target.artifacts = {key: use for key, use in target.artifacts.items() if key in keys}
        for _ in range(LOOKS_AT_ONCE):
            now, left = self._clock(), self._allowance.left()
            if left <= 0 or now < target.due_ns or registers(worker.state) or self._blocked(pid):
                return None
            look = self._next_look(pid, target, rss, left, now)
            if look is None or self._asides.begin(key, look) is not None:
                return None
            answer = self._asides.fetch(key, PATIENCE_SECONDS)
            waits = None if answer is None else self._take(target, answer, rss)
            if waits is not None:
                return waits
        return None

    def _next_look(self, pid: int, target: _Target, rss: int, left: float, now: int) -> Callable[[], Looked] | None:
        if now - target.measured_ns > ESTIMATE_SECONDS * NS_PER_S:
            target.seconds_per_gib = FIRST_SECONDS_PER_GIB
        files = [found for key in sorted(target.keys) if (found := self._index.known(key)) is not None]
        if self._periodic_smaps and target.seconds_per_gib * rss / GIB <= SMAPS_COST_SECONDS:
            every = UNKNOWN_SECONDS if len(files) < len(target.keys) else EVERY_SECONDS
            target.due_ns = now + int(every * NS_PER_S)
            return lambda: look_at_all(pid, files, self._proc_root, self._clock)
        if not files:  # nothing is leased, or the files of what is are not known yet
            target.due_ns = now + int((UNKNOWN_SECONDS if target.keys else EVERY_SECONDS) * NS_PER_S)
            return None
        scan = target.scan
        if scan is None or scan.done:
            if scan is not None and now - target.mapped_ns < MAPS_EVERY_SECONDS * NS_PER_S and len(files) == scan.artifacts:
                scan = target.scan = scan.again()
            else:
                target.mapped_ns = now
                return lambda: begin_scan(pid, files, self._proc_root)
        windows = max(1, min(WINDOWS_AT_ONCE, int(min(left, STEP_SECONDS) / scan.window_seconds)))
        return lambda: scan.go_on(pid, windows, self._proc_root, self._clock)

    def _take(self, target: _Target, answer: Answer[Looked] | Waiting, rss: int) -> Waiting | None:
        if isinstance(answer, Waiting):
            return answer
        looked = answer.value
        self._allowance.spend(looked.spent_seconds)
        if looked.problem is not None:
            target.scan, target.due_ns = None, self._clock() + int(EVERY_SECONDS * NS_PER_S)
            if CAP_SYS_PTRACE in looked.problem.reason:
                self._gaps.note("memory: smaps, maps and pagemap of other users' workers", CAP_SYS_PTRACE)
            return None
        target.figures.update(looked.figures)
        target.artifacts.update({use.key: use for use in looked.artifacts if use.key in target.keys})
        if looked.walked_seconds is not None and rss >= GIB // 64:  # of a small process the overhead would count as cost by size
            target.seconds_per_gib, target.measured_ns = looked.walked_seconds / (rss / GIB), self._clock()
        if looked.scan is not None:
            target.scan = looked.scan
            target.due_ns = self._clock() + int(EVERY_SECONDS * NS_PER_S) if looked.scan.done else 0
        return None


def registers(state: WorkerState) -> bool:
    """Say whether a worker is inside of a registration, where nothing may hold up its mmap lock."""
    return any(operation.operation in _REGISTERING for operation in state.ops.values())


def read_pss(
    pid: int, state: WorkerState | None = None, *, deadline_seconds: float = PSS_DEADLINE_SECONDS, proc_root: Path = PROC_ROOT
) -> SmapsRollup | Unavailable:
    """Read a process's rollup because somebody asked: its mmap lock is held for 5 to 30 ms a GiB. A child reads; a late one is killed."""
    if state is not None and registers(state):
        return Unavailable("it registers memory: reading its mappings now would hold that up")
    code = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    path = proc_root / str(pid) / "smaps_rollup"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, str(path)], capture_output=True, timeout=deadline_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Unavailable(f"{path}: no answer within {deadline_seconds:g} s: its mmap lock is held")
    except OSError as error:
        return Unavailable(errno_text(error))
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Unavailable(f"{path}: {one_line(last) or 'it has ended'}")
    return parse_smaps_rollup(done.stdout)
