"""Verdicts on the workers of a node, from one look to the next.

Owns the samples: how journals, /proc, locks and counters become the figures that `diag.analysis.stall` judges. Promises that a verdict
keeps its beginning while its class stays, and to name at each look whom a closer reading of /proc is worth. Refuses to read anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from diag.analysis.stall import Verdict, judge
from diag.analysis.stall_samples import Holder, InCollective, NodeSample, Open, Thread, Wait, WorkerSample
from diag.node.runs import Seen
from diag.node.snapshot import KernelFacts, LockFacts, LockParty, ProcessFacts
from hwr.outcomes import Liveness, Operation, Role, Stall
from hwr.store.layout import KEY
from hwr.telemetry.state import OpenOperation
from hwr.units import NS_PER_S, printable, short_key

# Who is worth the listing of threads and the question for the mmap lock: a late beat, a long operation, work in the kernel.
SUSPECT_BEAT_NS: Final = 3 * NS_PER_S // 2
SUSPECT_OPERATION_NS: Final = NS_PER_S
# Between two readings, whichever of its threads it was: a server spends hundredths of that.
SUSPECT_KERNEL_SECONDS: Final = 0.1
_LOCKING: Final = frozenset({Operation.LOCK.value, Operation.ADMISSION.value})
HOLDS_APART_NS: Final = 5 * NS_PER_S // 2
# Of a chain of waits; longer ones than the ranks of a node do not exist.
MAX_CHAIN: Final = 16
# The count of a rank that was in no collective yet; whether others count from 0 or 1 does not matter then.
NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is remembered of a worker between two looks; `earlier` is the last sample with another reading of /proc."""

    sample: WorkerSample
    earlier: WorkerSample | None
    verdict: Verdict
    seen_ns: int


class Judge:
    """Judges all workers of a node; one thread calls `judge`, another may call `suspects`."""

    def __init__(self, stall_after_seconds: float = 30.0) -> None:
        self._stall_after = stall_after_seconds
        self._kept: dict[Path, _Kept] = {}
        self._node: NodeSample | None = None
        self._newest: NodeSample | None = None
        self._kernel_seconds: dict[int, float] = {}
        self._waiting_since: dict[tuple[int, str], int] = {}
        self._by_pid: dict[int | None, str] = {}
        self._waits_for: dict[str, tuple[str, ...]] = {}

    def judge(
        self,
        taken_ns: int,
        workers: Sequence[Seen],
        names: Mapping[Path, str],
        processes: Mapping[int, ProcessFacts],
        kernel: KernelFacts | None,
        locks: Sequence[LockFacts],
    ) -> dict[Path, Verdict]:
        """Return a verdict on each worker."""
        node = self._node_sample(kernel)
        # The same reading twice would look like counters that stand still.
        same = node is not None and self._newest is not None and node.taken_ns == self._newest.taken_ns
        node_before = self._node if same else self._newest
        waits = self._dated(taken_ns, _waits(locks))
        peers = _sequences(workers, names)
        # A writer in another PID namespace calls its peers by other numbers: then the number alone is shown.
        self._by_pid = {
            worker.pid: names[worker.directory] for worker in workers if worker.pid == worker.ns_pid and worker.directory in names
        }
        self._waits_for = self._told_waits(workers, names, waits)
        found: dict[Path, Verdict] = {}
        kept: dict[Path, _Kept] = {}
        for worker in workers:
            if worker.role is Role.AGENT:
                continue
            process = None if worker.pid is None else processes.get(worker.pid)
            sample = self._sample(taken_ns, worker, names, process, waits, peers)
            before = self._kept.get(worker.directory)
            stale = before is not None and sample.read_ns is not None and before.sample.read_ns == sample.read_ns
            earlier = None if before is None else before.earlier if stale else before.sample
            verdict = judge(earlier, sample, node_before, node)
            seen_ns = taken_ns
            if before is not None and _between_two_holds(before, verdict, taken_ns):
                verdict, seen_ns = before.verdict, before.seen_ns
            if before is not None and before.verdict.stall is verdict.stall and before.verdict.since_ns is not None:
                verdict = replace(verdict, since_ns=min(before.verdict.since_ns, verdict.since_ns or before.verdict.since_ns))
            elif verdict.stall is not Stall.NONE and verdict.since_ns is None:
                verdict = replace(verdict, since_ns=taken_ns)
            kept[worker.directory] = _Kept(sample, earlier, verdict, seen_ns)
            found[worker.directory] = verdict
        self._kept = kept
        if self._newest is None or node is None or node.taken_ns != self._newest.taken_ns:
            self._node, self._newest = self._newest, node
        return found

    def _node_sample(self, kernel: KernelFacts | None) -> NodeSample | None:
        """Take the node's counters, and remember when pages were last seen to be pinned: one quiet second is no stuck driver."""
        if kernel is None:
            return None
        node, newest = _node_sample(kernel), self._newest
        if newest is None or _grew(newest.pinned_bytes, node.pinned_bytes) or _grew(newest.mlocked_bytes, node.mlocked_bytes):
            return replace(node, pins_moved_ns=node.taken_ns)
        return replace(node, pins_moved_ns=newest.pins_moved_ns)

    def _told_waits(
        self, workers: Sequence[Seen], names: Mapping[Path, str], listed: Mapping[int, tuple[Wait, ...]]
    ) -> dict[str, tuple[str, ...]]:
        """Return by worker the holders of the locks that it waits for."""
        found: dict[str, tuple[str, ...]] = {}
        for worker in workers:
            told = [self._lock_wait(operation) for operation in worker.state.ops.values() if operation.operation in _LOCKING]
            waits = _joined(told, listed.get(worker.pid, ()) if worker.pid is not None else ())
            holders = tuple(dict.fromkeys(holder.name for wait in waits for holder in wait.holders))
            if holders and worker.liveness is Liveness.ALIVE and worker.directory in names:
                found[names[worker.directory]] = holders
        return found

    def _dated(self, taken_ns: int, waits: Mapping[int, tuple[Wait, ...]]) -> dict[int, tuple[Wait, ...]]:
        """Give a wait that only the kernel's table shows the time at which it was first seen there."""
        seen = {(pid, wait.file) for pid, found in waits.items() for wait in found}
        self._waiting_since = {place: self._waiting_since.get(place, taken_ns) for place in seen}
        return {
            pid: tuple(wait if wait.since_ns else replace(wait, since_ns=self._waiting_since[pid, wait.file]) for wait in found)
            for pid, found in waits.items()
        }

    def suspects(self, now_ns: int, workers: Sequence[Seen], processes: Mapping[int, ProcessFacts]) -> frozenset[int]:
        """Return the pids that deserve a closer look."""
        found: set[int] = set()
        seconds: dict[int, float] = {}
        for worker in workers:
            pid = worker.pid
            if pid is None:
                continue
            late = worker.heartbeat_ns is not None and now_ns - worker.heartbeat_ns > SUSPECT_BEAT_NS
            long = any(now_ns - operation.begun_ns > SUSPECT_OPERATION_NS for operation in worker.state.ops.values())
            process = processes.get(pid)
            in_kernel = False
            if process is not None:
                seconds[pid] = process.stime_s or 0.0
                grew = seconds[pid] - self._kernel_seconds.get(pid, seconds[pid])
                in_kernel = grew >= SUSPECT_KERNEL_SECONDS
                if process.mmap_lock_blocked_seconds:
                    in_kernel = True
            if late or long or in_kernel:
                found.add(pid)
        self._kernel_seconds = seconds
        return frozenset(found)

    def _chained(self, wait: Wait) -> Wait:
        """Say of each holder whom it waits for in turn, as far as journals and the kernel's table tell."""
        return replace(wait, holders=tuple(self._followed(holder) for holder in wait.holders))

    def _followed(self, holder: Holder) -> Holder:
        waits_for = holder.waits_for or self._waits_for.get(holder.name, ())
        met, beyond, step = {holder.name, *waits_for}, list[str](), waits_for
        while step and len(beyond) < MAX_CHAIN:
            step = tuple(dict.fromkeys(name for one in step for name in self._waits_for.get(one, ()) if name not in met))
            met.update(step)
            beyond += step
        return replace(holder, waits_for=waits_for, beyond=tuple(beyond[:MAX_CHAIN]))

    def _lock_wait(self, operation: OpenOperation) -> Wait:
        """Take a wait as its journal tells it; the holder is the one that the waiter saw as it began, or looked again."""
        attrs = operation.attrs
        pid = attrs.get("holder_pid")
        known = isinstance(pid, int)
        holder = Holder(name=self._by_pid.get(pid, f"pid {pid}"), state=str(attrs.get("holder_state") or "") or None) if known else None
        return Wait(
            lock=printable(str(attrs.get("lock") or ("pin" if operation.operation == Operation.ADMISSION else "unknown")), 40),
            file=_short(Path(str(attrs.get("file", "?"))).name),
            since_ns=operation.begun_ns,
            deadline_ns=operation.deadline_ns,
            holders=() if holder is None else (holder,),
        )

    def _sample(
        self,
        taken_ns: int,
        worker: Seen,
        names: Mapping[Path, str],
        process: ProcessFacts | None,
        waits: Mapping[int, tuple[Wait, ...]],
        peers: Mapping[tuple[str, str], Mapping[int, tuple[str, int]]],
    ) -> WorkerSample:
        state = worker.state
        operations = [operation for operation in state.ops.values() if operation.operation is not None]
        told = [self._lock_wait(operation) for operation in operations if operation.operation in _LOCKING]
        listed = waits.get(worker.pid, ()) if worker.pid is not None else ()
        return WorkerSample(
            taken_ns=taken_ns,
            name=names.get(worker.directory, ""),
            read_ns=None if process is None else process.sampled_ns,
            liveness=worker.liveness,
            heartbeat_ns=worker.heartbeat_ns,
            quiet_ns=worker.quiet_ns,
            state=None if process is None else process.state,
            tracer_pid=None if process is None else process.tracer_pid,
            frozen=process is not None and process.frozen is True,
            utime_s=None if process is None else process.utime_s,
            stime_s=None if process is None else process.stime_s,
            minflt=None if process is None else process.minflt,
            majflt=None if process is None else process.majflt,
            read_bytes=None if process is None else process.read_bytes,
            threads=() if process is None else tuple(_thread(one) for one in process.threads),
            mmap_lock_blocked_seconds=None if process is None else process.mmap_lock_blocked_seconds,
            registered_bytes=state.registered_bytes,
            chunks_done=state.registration_chunks_done,
            progress_ns=state.progress_ns,
            operations=tuple(_open(operation, around) for operation, around in _nested(state.ops)),
            waits=tuple(self._chained(wait) for wait in _joined(told, listed)),
            collectives=_collectives(worker, names, peers),
            stall_after_seconds=state.stall_after_seconds or self._stall_after,
        )


def _node_sample(kernel: KernelFacts) -> NodeSample:
    counters = kernel.vmstat

    def some(resource: str) -> float | None:
        line = kernel.pressure.get(resource, {}).get("some")
        return None if line is None else line.total_seconds

    def total(*prefixes: str) -> int | None:
        found = [count for name, count in counters.items() if name.startswith(prefixes)]
        return sum(found) if found else None

    return NodeSample(
        taken_ns=kernel.sampled_ns,
        pinned_bytes=kernel.pinned_bytes,
        mlocked_bytes=kernel.mlocked_bytes,
        compactions=total("compact_stall", "compact_fail"),
        reclaims=total("allocstall_"),
        memory_some_s=some("memory"),
        io_some_s=some("io"),
        cpu_some_s=some("cpu"),
    )


def _between_two_holds(before: _Kept, verdict: Verdict, taken_ns: int) -> bool:
    """Whether a look fell between two holds of a lock that is taken again and again: a probe must have waited a while to tell."""
    return before.verdict.stall is Stall.MMAP_LOCK_HELD and verdict.stall is Stall.NONE and taken_ns - before.seen_ns <= HOLDS_APART_NS


def _grew(before: int | None, now: int | None) -> bool:
    """Whether a counter grew; one that was not known before is watched from now on."""
    return now is not None and (before is None or now > before)


def _thread(one: Any) -> Thread:
    return Thread(tid=one.tid, name=one.name, state=one.state, wchan=one.wchan, syscall=one.syscall)


def _nested(ops: Mapping[str, OpenOperation]) -> list[tuple[OpenOperation, bool]]:
    """Return the operations that have a name, and of each whether another one of them goes on inside."""
    named = {op: operation for op, operation in ops.items() if operation.operation is not None}
    around: set[str] = set()
    for operation in named.values():
        above, steps = operation.parent, 0
        while above is not None and above not in around and steps < len(ops):  # a journal may say that two contain each other
            around.add(above)
            above, steps = (ops[above].parent if above in ops else None), steps + 1
    return [(operation, op in around) for op, operation in named.items()]


def _open(operation: OpenOperation, around: bool) -> Open:
    attrs = operation.attrs
    missing = attrs.get("missing")
    return Open(
        operation=str(operation.operation),
        begun_ns=operation.begun_ns,
        deadline_ns=operation.deadline_ns,
        planned_bytes=operation.planned_bytes,
        done_bytes=operation.done_bytes,
        moved_ns=operation.progress_ns,
        detail=_detail(attrs),
        missing=tuple(rank for rank in missing if type(rank) is int) if isinstance(missing, list) else (),
        around=around,
    )


def _detail(attrs: Mapping[str, Any]) -> str:
    """Say in a few words which one it is: range and chunk, a key, a file, a collective."""
    words: list[str] = []
    for name in ("range", "chunk"):
        at, of = attrs.get(name), attrs.get(f"{name}s")
        if type(at) is int and type(of) is int:
            words.append(f"{name} {at}/{of}")
    words += [attrs[name] for name in ("op", "lock", "stage") if isinstance(attrs.get(name), str)]
    if isinstance(attrs.get("key"), str):
        words.append(short_key(attrs["key"]))
    if isinstance(attrs.get("file"), str):
        words.append(Path(attrs["file"]).name)
    return printable(", ".join(words), 120)


def _waits(locks: Sequence[LockFacts]) -> dict[int, tuple[Wait, ...]]:
    """Return by pid the locks that each process waits for, with who holds them and whom those wait for."""
    asked: dict[int, list[LockFacts]] = {}
    for lock in locks:
        for waiter in lock.waiters:
            if waiter.pid is not None:
                asked.setdefault(waiter.pid, []).append(lock)

    def waited_for_by(pid: int | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_name(holder) for lock in asked.get(pid or 0, ()) for holder in lock.holders if holder.pid != pid))

    def holder(party: LockParty) -> Holder:
        return Holder(name=_name(party), state=party.state, waits_for=waited_for_by(party.pid))

    return {
        pid: tuple(
            Wait(
                lock=lock.kind.value,
                file=_short(lock.file),
                since_ns=next((waiter.since_ns for waiter in lock.waiters if waiter.pid == pid), None),
                holders=tuple(holder(party) for party in lock.holders),
            )
            for lock in found
        )
        for pid, found in asked.items()
    }


def _short(file: str) -> str:
    """Cut an artifact's key in a lock file's name to what people are shown of it everywhere."""
    key, dot, rest = file.partition(".")
    return printable(f"{short_key(key)}.{rest}" if dot and KEY.match(key) else file, 100)


def _name(party: LockParty) -> str:
    if party.worker is not None:
        return party.worker
    return f"pid {party.pid}" if party.pid is not None else "a process that is not visible"


def _joined(told: Sequence[Wait], listed: Sequence[Wait]) -> tuple[Wait, ...]:
    """Join what the journal says (since when, how long still) with what the kernel says (who)."""
    by_file = {wait.file: wait for wait in listed}
    found: list[Wait] = []
    for wait in told:
        seen = by_file.pop(wait.file, None)
        found.append(wait if seen is None or not seen.holders else replace(wait, holders=seen.holders))
    return (*found, *by_file.values())


_Sequences = dict[tuple[str, str], dict[int, tuple[str, int]]]


def _sequences(workers: Sequence[Seen], names: Mapping[Path, str]) -> _Sequences:
    """Return by engine and collective how far each rank is: its name and its count.

    In a group that has room for every rank that is seen, one that was never in this collective has a place too, before the first.
    """
    found: _Sequences = {}
    ranks: dict[str, dict[int, str]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for worker in sorted(workers, key=lambda one: one.start_ns):
        if worker.role is Role.AGENT or worker.liveness is Liveness.EXITED:
            continue
        name = names.get(worker.directory, "")
        engine = name.rpartition("/")[0]
        if worker.role is Role.WORKER and name:
            ranks.setdefault(engine, {})[worker.rank] = name
        for op, told in worker.state.collectives.items():
            sequence, size = (told.get("sequence"), told.get("world_size")) if isinstance(told, dict) else (None, None)
            if type(sequence) is int:
                found.setdefault((engine, op), {})[worker.rank] = (name, sequence)
            if type(size) is int:
                sizes[engine, op] = max(size, sizes.get((engine, op), 0))
    for (engine, op), counts in found.items():
        members = ranks.get(engine, {})
        if len(members) <= sizes.get((engine, op), 0):
            for rank, name in members.items():
                counts.setdefault(rank, (name, NEVER))
    return found


def _collectives(
    worker: Seen, names: Mapping[Path, str], peers: Mapping[tuple[str, str], Mapping[int, tuple[str, int]]]
) -> tuple[InCollective, ...]:
    engine = names.get(worker.directory, "").rpartition("/")[0]
    found: list[InCollective] = []
    for op, told in worker.state.collectives.items():
        if not isinstance(told, dict) or type(told.get("begun_ns")) is not int or type(told.get("sequence")) is not int:
            continue
        sequence, size = told["sequence"], told.get("world_size")
        others = peers.get((engine, op), {})
        behind = tuple(name for rank, (name, count) in sorted(others.items()) if count < sequence and rank != worker.rank)
        found.append(
            InCollective(
                op=printable(op, 40),
                sequence=sequence,
                begun_ns=told["begun_ns"],
                world_size=size if type(size) is int else None,
                behind=behind,
            )
        )
    return tuple(found)
