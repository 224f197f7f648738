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
    """An operation that has begun and not ended. `missing` are ranks that it names as not there yet.

    `around` is true while another one goes on inside of it: that one moves or does not.
    """

    operation: str
    begun_ns: int
    deadline_ns: int | None = None
    planned_bytes: int | None = None
    done_bytes: int | None = None
    moved_ns: int | None = None
    detail: str = ""
    missing: tuple[int, ...] = ()
    around: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock: `engine/rank` or `pid N`, and the kernel's letter for its state.

    `waits_for` are those that it itself waits for, `beyond` those that they wait for in turn, the nearest first.
    """

    name: str
    state: str | None = None
    waits_for: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()


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
    name: str = ""
    read_ns: int | None = None
    liveness: Liveness
    heartbeat_ns: int | None = None
    quiet_ns: int | None = None
    state: str | None = None
    tracer_pid: int | None = None
    frozen: bool = False
    utime_s: float | None = None
    stime_s: float | None = None
    minflt: int | None = None
    majflt: int | None = None
    read_bytes: int | None = None
    threads: tuple[Thread, ...] = ()
    mmap_lock_blocked_seconds: float | None = None
    registered_bytes: int | None = None
    chunks_done: int | None = None
    progress_ns: int | None = None
    operations: tuple[Open, ...] = ()
    waits: tuple[Wait, ...] = ()
    collectives: tuple[InCollective, ...] = ()
    stall_after_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """The node's counters; pages and events since boot, seconds of pressure since boot.

    `pins_moved_ns` is when pinned or locked pages were last seen to grow, or since when somebody looks, if they were not.
    """

    taken_ns: int
    pins_moved_ns: int | None = None
    pinned_bytes: int | None = None
    mlocked_bytes: int | None = None
    compactions: int | None = None  # compact_stall + compact_fail: direct compactions, and those that found nothing
    reclaims: int | None = None  # allocstall_*: allocations that had to reclaim themselves
    memory_some_s: float | None = None
    io_some_s: float | None = None
    cpu_some_s: float | None = None
