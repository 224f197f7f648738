"""What holds a worker up, judged from two samples.

Owns the order in which explanations are tried: what the kernel says outright (dead, stopped), what makes every other sign meaningless (the
process's mmap lock, its interpreter's lock), whom it waits for, and last what its own counters suggest. Promises a pure function with one
verdict for any two samples, each with its evidence (N8). Refuses to call a slow thing stuck: whatever moves between the samples is no stall
of the kind that would be wrong to interrupt, and what nothing explains is `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diag.analysis.stall_samples import NodeSample, Open, Thread, Wait, WorkerSample
from hwr.outcomes import Confidence, Liveness, Operation, Stall
from hwr.units import bytes_text

RUNBOOK: Final = "stall.md"

# A worker beats once a second; two beats may be missed on a busy machine.
BEAT_LATE_SECONDS: Final = 2.5
TRACED_SECONDS: Final = 1.5
# A wait that is younger is how locks and collectives look when they work.
WAIT_SECONDS: Final = 1.0
# A read of one byte comes back in microseconds; a quarter of a second is five looks of a busy scheduler.
MMAP_BLOCKED_SECONDS: Final = 0.25
# Without any sign of progress inside of a registration: at first only likely, from `stall_after_seconds` on certain. A driver that pins in
# batches pauses for a second or two.
PIN_QUIET_SECONDS: Final = 3.0
# The node's counters are read once a second; an older reading says nothing of now.
STALE_SECONDS: Final = 5.0
# The share of a second for which a thread must have run, or somebody must have waited, to count as an explanation.
BUSY_SHARE: Final = 0.5
PRESSED_SHARE: Final = 0.1
# Less is what a process uses that waits, its beat included.
IDLE_SHARE: Final = 0.05
# Less than this read from disk between two looks is no reason to wait.
READ_BYTES: Final = 1 << 20
# A driver that is asked again and again does so from the beginning; a copy of one block takes milliseconds.
POLL_SECONDS: Final = 5.0
# A loop over memory that is mapped faults now and then; a copy into new memory, thousands of times.
POLL_FAULTS: Final = 256

# Of threads that may be the one.
MAX_NAMED: Final = 3

_PINNING: Final = frozenset({Operation.REGISTER.value, Operation.REGISTER_CHUNK.value})
_MEETING: Final = frozenset({Operation.COLLECTIVE.value, Operation.ALLGATHER.value, Operation.VOTE.value})
# Where the time goes into a driver; elsewhere a busy core is how computing looks.
_DRIVING: Final = frozenset({Operation.TRANSFER.value})
_LOCKING: Final = frozenset({Operation.LOCK.value, Operation.ADMISSION.value})
_FILESYSTEM_WCHANS: Final = (
    "jbd2",
    "ext4",
    "xfs",
    "btrfs",
    "fuse",
    "nfs",
    "io_schedule",
    "wait_on_page",
    "folio_wait",
    "balance_dirty",
    "request_wait",
)
# mmap, mprotect, munmap, mremap and madvise of x86-64: what holds a process's mmap lock for long.
_MMAP_CALLS: Final = {"9": "mmap", "10": "mprotect", "11": "munmap", "25": "mremap", "28": "madvise", "149": "mlock", "151": "mlockall"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What holds a worker up, and why we think so.

    `evidence` are whole sentences, the strongest first. `since_ns` (CLOCK_BOOTTIME) is the earliest moment that the evidence reaches back
    to. `blames` names who is waited for (`engine/rank`, or `pid N`), where somebody is. `runbook` is `<file>#<section>` below `runbooks/`,
    empty for `none`.
    """

    stall: Stall = Stall.NONE
    confidence: Confidence = Confidence.HIGH
    evidence: tuple[str, ...] = ()
    since_ns: int | None = None
    blames: tuple[str, ...] = ()
    runbook: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """The two samples side by side; the earlier ones are None at the first look."""

    before: WorkerSample | None
    now: WorkerSample
    node_before: NodeSample | None
    node: NodeSample | None

    @property
    def seconds(self) -> float:
        """Between the samples."""
        return 0.0 if self.before is None else max(0.0, (self.now.taken_ns - self.before.taken_ns) / 1e9)

    def age(self, then_ns: int | None) -> float:
        """Return the seconds since a moment, 0 for an unknown one."""
        return 0.0 if then_ns is None else max(0.0, (self.now.taken_ns - then_ns) / 1e9)

    def grew(self, name: str) -> float:
        """Return by how much a counter of the worker grew, 0 where that is not known."""
        return _difference(self.before, self.now, name)

    def node_grew(self, name: str) -> float:
        """Return by how much a counter of the node grew, 0 where that is not known."""
        return _difference(self.node_before, self.node, name)

    def busy(self, name: str) -> float:
        """Return the share of the time between two readings for which a counter of seconds ran."""
        before, now = self.before and self.before.read_ns, self.now.read_ns
        seconds = (now - before) / 1e9 if before and now else self.seconds
        return self.grew(name) / seconds if seconds > 0 else 0.0

    def pressed(self, name: str) -> float:
        """Return the share of the time for which somebody on the node waited."""
        if self.node is None or self.node_before is None:
            return 0.0
        between = (self.node.taken_ns - self.node_before.taken_ns) / 1e9
        return self.node_grew(name) / between if between > 0 else 0.0


def judge(before: WorkerSample | None, now: WorkerSample, node_before: NodeSample | None = None, node: NodeSample | None = None) -> Verdict:
    """Return what holds the worker up at the second sample."""
    case = Case(before, now, node_before, node)
    for explain in _EXPLANATIONS:
        verdict = explain(case)
        if verdict is not None:
            return verdict
    return Verdict()


def _told(stall: Stall, confidence: Confidence, evidence: list[str], since_ns: int | None = None, blames: tuple[str, ...] = ()) -> Verdict:
    return Verdict(
        stall=stall,
        confidence=confidence,
        evidence=tuple(evidence),
        since_ns=since_ns,
        blames=tuple(dict.fromkeys(blames)),
        runbook="" if stall is Stall.NONE else f"{RUNBOOK}#{stall}",
    )


def _gone(case: Case) -> Verdict | None:
    now = case.now
    if now.liveness is Liveness.DEAD:
        evidence = [f"its process has gone without saying so, {case.age(now.quiet_ns):.1f} s after its last sign"]
        evidence += [_doing(case, operation) for operation in now.operations[:1]]
        return _told(Stall.DEAD, Confidence.HIGH, evidence, now.quiet_ns)
    if now.liveness is not Liveness.ALIVE:
        return Verdict()
    return None


def _stopped(case: Case) -> Verdict | None:
    now = case.now
    # A tracer stops it for a moment at each system call: only one that does not beat meanwhile is held.
    traced_and_running = now.state == "t" and now.heartbeat_ns is not None and case.age(now.heartbeat_ns) < TRACED_SECONDS
    if now.frozen:
        evidence = ["its control group is frozen (a container that is paused)"]
    elif now.state in ("T", "t") and not traced_and_running:
        evidence = [f"the kernel says it is stopped (state {now.state})"]
    else:
        return None
    if now.tracer_pid:
        evidence.append(f"pid {now.tracer_pid} traces it")
    evidence += [_doing(case, operation) for operation in now.operations[:1]]
    return _told(Stall.STOPPED, Confidence.HIGH, evidence, now.heartbeat_ns)


def _mmap_lock(case: Case) -> Verdict | None:
    now = case.now
    evidence: list[str] = []
    waiting = [thread for thread in now.threads if (thread.wchan or "").startswith("rwsem_down")]
    blocked = now.mmap_lock_blocked_seconds or 0.0
    if blocked >= MMAP_BLOCKED_SECONDS:
        evidence.append(f"a read that needs its mmap lock has been waiting for {blocked:.1f} s")
    if waiting:
        evidence.append(f"{len(waiting)} of its threads wait for a lock of its memory ({waiting[0].name}: {waiting[0].wchan})")
    if not evidence:
        return None
    holding = [thread for thread in now.threads if thread.state in ("R", "D") and thread not in waiting]
    for thread in holding[:1]:
        call = _MMAP_CALLS.get(thread.syscall or "")
        what = f"is in {call}" if call else "runs in the kernel" if case.busy("stime_s") >= BUSY_SHARE else "runs"
        evidence.append(f"thread {thread.tid} ({thread.name}) {what}")
    confidence = Confidence.HIGH if blocked >= MMAP_BLOCKED_SECONDS else Confidence.MEDIUM
    return _told(Stall.MMAP_LOCK_HELD, confidence, evidence, now.taken_ns - int(blocked * 1e9))


def _gil(case: Case) -> Verdict | None:
    now = case.now
    late = case.age(now.heartbeat_ns)
    if now.heartbeat_ns is None or late < BEAT_LATE_SECONDS:
        return None
    evidence = [f"no beat for {late:.1f} s although its process lives"]
    writing = [thread for thread in now.threads if thread.name.startswith("hwr-alive") and thread.state == "D"]
    stuck = [thread for thread in (writing or now.threads) if thread.state == "D" and _in_filesystem(thread)]
    if writing and stuck:
        evidence.append(f"its beating thread waits for a filesystem ({stuck[0].wchan}): that is not the interpreter's lock")
        return _told(Stall.UNKNOWN, Confidence.MEDIUM, evidence, now.heartbeat_ns)
    confidence = Confidence.HIGH
    # Who waits for the interpreter's lock sleeps on a futex; which of the others has it cannot be seen from outside.
    others = [thread for thread in now.threads if "futex" not in (thread.wchan or "")]
    for thread in others[:MAX_NAMED]:
        place = "runs" if thread.state == "R" else f"sleeps in {thread.wchan or 'a call'}"
        evidence.append(f"thread {thread.tid} ({thread.name}) {place} and may hold the interpreter's lock")
    if len(others) > MAX_NAMED:
        evidence.append(f"so may {len(others) - MAX_NAMED} more threads")
    if case.pressed("cpu_some_s") >= 1 - PRESSED_SHARE and case.busy("utime_s") < BUSY_SHARE:
        evidence.append("the machine has no processor time to give: the beats may only be late")
        confidence = Confidence.LOW
    evidence += [_doing(case, operation) for operation in now.operations[:1]]
    return _told(Stall.GIL_HELD, confidence, evidence, now.heartbeat_ns)


def _lock(case: Case) -> Verdict | None:
    old = [wait for wait in case.now.waits if wait.since_ns is None or case.age(wait.since_ns) >= WAIT_SECONDS]
    if not old:
        return None
    wait = min(old, key=lambda one: one.since_ns or 0)
    evidence = [_waiting(case, wait)]
    for holder in wait.holders:
        if case.now.name and case.now.name in holder.waits_for:
            evidence.append(f"{holder.name} waits for this one: neither can go on before a deadline passes")
        elif holder.waits_for:
            evidence.append(f"{holder.name} itself waits for {', '.join(holder.waits_for)}")
        if holder.beyond:
            end = ": none of them can go on before a deadline passes" if case.now.name and case.now.name in holder.beyond else ""
            evidence.append(f"and so on, to {', '.join(holder.beyond)}{end}")
    names = tuple(holder.name for holder in wait.holders)
    confidence = Confidence.HIGH if names else Confidence.MEDIUM
    return _told(Stall.LOCK_WAIT, confidence, evidence, wait.since_ns, names)


def _waiting(case: Case, wait: Wait) -> str:
    age = f"for {case.age(wait.since_ns):.1f} s " if wait.since_ns is not None else ""
    who = ", ".join(f"{holder.name}{_how(holder.state)}" for holder in wait.holders) or "nobody that the kernel shows"
    left = "" if wait.deadline_ns is None else f"; it gives up in {max(0.0, (wait.deadline_ns - case.now.taken_ns) / 1e9):.0f} s"
    return f"it waits {age}for the {wait.lock} lock ({wait.file}), held by {who}{left}"


def _how(state: str | None) -> str:
    return {"T": ", which is stopped", "t": ", which is being traced", "D": ", which waits in the kernel", "Z": ", which has ended"}.get(
        state or "", ""
    )


def _pin(case: Case) -> Verdict | None:
    now = case.now
    calls = [operation for operation in now.operations if operation.operation in _PINNING]
    if not calls:
        return None
    call = max(calls, key=lambda operation: operation.begun_ns)
    pinned, locked = case.node_grew("pinned_bytes"), case.node_grew("mlocked_bytes")
    told = [_doing(case, call)]
    if case.grew("chunks_done") > 0 or case.grew("registered_bytes") > 0 or (case.before and call.begun_ns > case.before.taken_ns):
        told.append(f"{now.chunks_done or 0} chunks are done, {bytes_text(now.registered_bytes or 0)} registered")
        return _told(Stall.PIN_ADVANCING, Confidence.HIGH, told, call.begun_ns)
    if pinned > 0 or locked > 0:
        told.append(f"the kernel pinned {bytes_text(max(pinned, locked))} more in the last {case.seconds:.1f} s")
        return _told(Stall.PIN_ADVANCING, Confidence.MEDIUM, told, call.begun_ns)
    if case.node_grew("compactions") > 0:
        told.append(f"the kernel compacts memory: {case.node_grew('compactions'):.0f} direct compactions in the last {case.seconds:.1f} s")
        return _told(Stall.COMPACTION, Confidence.MEDIUM, told, call.begun_ns)
    moved, counted = _pin_moved(case, call)
    quiet = case.age(moved)
    overdue = call.deadline_ns is not None and now.taken_ns > call.deadline_ns
    if overdue:
        told.append("its deadline has passed; the call cannot be cancelled")
    if case.before is None or quiet < PIN_QUIET_SECONDS:
        short = f"nothing has been seen to move for {quiet:.1f} s, too short a time to call it stuck"
        told.append("whether it moves a second look will tell" if case.before is None else short)
        return _told(Stall.PIN_ADVANCING, Confidence.LOW, told, call.begun_ns)
    if counted:
        told.append(f"neither a chunk nor the kernel's counters of pinned and locked pages have moved for {quiet:.1f} s")
    else:
        told.append(f"no chunk has ended for {quiet:.1f} s, and the kernel's counters of pinned pages are not known")
    if case.busy("utime_s") >= BUSY_SHARE:
        told.append(f"it burns {case.busy('utime_s'):.0%} of a core in user mode: the driver asks again and again")
    certain = overdue or (counted and quiet >= now.stall_after_seconds)
    return _told(Stall.PIN_STUCK, Confidence.HIGH if certain else Confidence.LOW, told, moved)


def _pin_moved(case: Case, call: Open) -> tuple[int, bool]:
    """Return the last moment at which a registration showed a sign of progress, and whether the node's counters had a say in it."""
    moved = [call.begun_ns, call.moved_ns]
    if call.operation == Operation.REGISTER:  # between two of its chunks
        moved.append(case.now.progress_ns)
    node = case.node
    counted = (
        node is not None and (node.pinned_bytes is not None or node.mlocked_bytes is not None) and case.age(node.taken_ns) < STALE_SECONDS
    )
    if node is not None and counted:
        moved.append(node.pins_moved_ns)
    return max(moment for moment in moved if moment is not None), counted


def _collective(case: Case) -> Verdict | None:
    now = case.now
    inside = [one for one in now.collectives if case.age(one.begun_ns) >= WAIT_SECONDS]
    if inside:
        one = min(inside, key=lambda collective: collective.begun_ns)
        of = f", among {one.world_size} ranks," if one.world_size else ""
        evidence = [f"it has been in {one.op} number {one.sequence}{of} for {case.age(one.begun_ns):.1f} s"]
        evidence.append(f"not there yet: {', '.join(one.behind)}" if one.behind else "no journal shows a rank that is behind")
        return _told(Stall.COLLECTIVE_WAIT, Confidence.HIGH if one.behind else Confidence.MEDIUM, evidence, one.begun_ns, one.behind)
    for operation in now.operations:
        if operation.operation in _MEETING and case.age(operation.begun_ns) >= WAIT_SECONDS:
            missing = tuple(f"rank {rank}" for rank in operation.missing)
            evidence = [_doing(case, operation)]
            evidence.append(f"not there yet: {', '.join(missing)}" if missing else "it does not say who is missing")
            return _told(Stall.COLLECTIVE_WAIT, Confidence.HIGH if missing else Confidence.MEDIUM, evidence, operation.begun_ns, missing)
    return None


def _slow(case: Case) -> Verdict | None:
    """Judge what is left: an open operation that is slow or does not move at all, by what its process spends its time on."""
    now = case.now
    working = [operation for operation in now.operations if operation.operation not in _LOCKING and not operation.around]
    if not working or case.before is None:
        return None
    # The one that has been quiet for longest: short ones of another thread come and go beside it.
    operation = min(working, key=_moved_ns)
    quiet = case.age(_moved_ns(operation))
    if quiet < WAIT_SECONDS:
        return None
    told = [_doing(case, operation)]
    waits = now.state in ("D", "R") or any(thread.state == "D" for thread in now.threads)
    direct, pressed = case.node_grew("reclaims"), case.pressed("memory_some_s")
    if waits and (direct > 0 or pressed >= PRESSED_SHARE):
        told.append(f"the kernel reclaims memory: {direct:.0f} allocations had to, {pressed:.0%} of the time somebody waited")
        return _told(Stall.RECLAIM, Confidence.MEDIUM, told, operation.begun_ns)
    read, faults = case.grew("read_bytes"), case.grew("majflt")
    if waits and (read >= READ_BYTES or faults > 0):
        told.append(f"it reads from disk: {bytes_text(read)} and {faults:.0f} faults that waited for it in the last {case.seconds:.1f} s")
        return _told(Stall.COLD_CACHE, Confidence.MEDIUM, told, operation.begun_ns)
    busy = case.busy("utime_s")
    if operation.operation in _DRIVING and quiet >= POLL_SECONDS and busy >= BUSY_SHARE and case.grew("minflt") < POLL_FAULTS:
        told.append(f"it burns {busy:.0%} of a core in user mode; no read, no fault and no pin moves")
        return _told(Stall.DRIVER_POLL, Confidence.MEDIUM, told, operation.begun_ns)
    if quiet >= now.stall_after_seconds:
        told.append(f"nothing has moved for {quiet:.0f} s, and nothing explains it")
        told += _place(case)
        return _told(Stall.UNKNOWN, Confidence.LOW, told, operation.begun_ns)
    return None


def _moved_ns(operation: Open) -> int:
    return operation.begun_ns if operation.moved_ns is None else operation.moved_ns


def _place(case: Case) -> list[str]:
    """Say what can be said of a process whose stall has no name: how busy it is, and where its main thread waits."""
    told: list[str] = []
    busy = case.busy("utime_s") + case.busy("stime_s")
    if busy >= IDLE_SHARE:
        told.append(f"its process uses {busy:.0%} of a core: it may be computing")
    for thread in case.now.threads[:1]:
        call = f", in system call {thread.syscall}" if (thread.syscall or "").isdigit() else ""
        if thread.state != "R":
            told.append(f"its main thread sleeps in {thread.wchan or 'the kernel'}{call}")
    return told


def _doing(case: Case, operation: Open) -> str:
    detail = f" ({operation.detail})" if operation.detail else ""
    done = ""
    if operation.planned_bytes:
        done = f", {bytes_text(operation.done_bytes or 0)} of {bytes_text(operation.planned_bytes)}"
    return f"{operation.operation}{detail} has been open for {case.age(operation.begun_ns):.1f} s{done}"


def _in_filesystem(thread: Thread) -> bool:
    return any(word in (thread.wchan or "") for word in _FILESYSTEM_WCHANS)


def _difference(before: object, after: object, name: str) -> float:
    if before is None or after is None:
        return 0.0
    first, last = getattr(before, name), getattr(after, name)
    return 0.0 if first is None or last is None else max(0.0, float(last) - float(first))


# A stopped process has a late beat, a held mmap lock keeps a process from beating, and a waiter is no longer moving either: order matters.
_EXPLANATIONS: Final[tuple[Callable[[Case], Verdict | None], ...]] = (_gone, _stopped, _mmap_lock, _gil, _lock, _pin, _collective, _slow)
