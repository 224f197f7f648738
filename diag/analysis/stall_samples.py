"""What a judge of stalls is told: figures of one worker and of its node at one moment.

Owns these types. Promises plain values, times on CLOCK_BOOTTIME, None for what could not be known. Refuses to read anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwr.outcomes import Liveness


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread; `syscall` is its number as text, or `running`."""

    tid: int
    name: str
    state: str
    wchan: str | None = None
    syscall: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """An operation that has begun and not ended. `missing` are ranks that it names as not there yet."""

    operation: str
    begun_ns: int
    deadline_ns: int | None = None
    planned_bytes: int | None = None
    done_bytes: int | None = None
    moved_ns: int | None = None
    detail: str = ""
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock: `engine/rank` or `pid N`, and the kernel's letter for its state."""

    name: str
    state: str | None = None
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait for a lock: which, since when, and who has it."""

    lock: str
    file: str
    since_ns: int | None
    deadline_ns: int | None = None
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InCollective:
    """A collective that this rank is in; `behind` are the ranks of its engine whose count of this collective is lower."""

    op: str
    sequence: int
    begun_ns: int
    world_size: int | None = None
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One worker at `taken_ns`; its processor time, faults and reads are as of `read_ns`."""

    taken_ns: int
    read_ns: int | None = None
    liveness: Liveness
    heartbeat_ns: int | None = None
    quiet_ns: int | None = None
    state: str | None = None
    tracer_pid: int | None = None
    utime_s: float | None = None
    stime_s: float | None = None
    minflt: int | None = None
    majflt: int | None = None
    read_bytes: int | None = None
    threads: tuple[Thread, ...] = ()
    mmap_lock_blocked_seconds: float | None = None
    events: int = 0
    registered_bytes: int | None = None
    chunks_done: int | None = None
    operations: tuple[Open, ...] = ()
    waits: tuple[Wait, ...] = ()
    collectives: tuple[InCollective, ...] = ()
    stall_after_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """The node's counters; pages and events since boot, seconds of pressure since boot."""

    taken_ns: int
    pinned_bytes: int | None = None
    mlocked_bytes: int | None = None
    compactions: int | None = None  # compact_stall + compact_fail: direct compactions, and those that found nothing
    reclaims: int | None = None  # allocstall_*: allocations that had to reclaim themselves
    memory_some_s: float | None = None
    io_some_s: float | None = None
    cpu_some_s: float | None = None
