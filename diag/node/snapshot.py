"""What a node looks like at one moment: the value that every view of the node side is a function of.

Owns `NodeSnapshot` and its parts, their JSON form and its schema. Promises values that never change once made, a version that grows with
the form, and a time, a source and a cost with every figure that was read. Refuses to look at anything: collectors read, this is what they
found. Times that end in `_ns` are CLOCK_BOOTTIME of the node; `wall_ns` turns one into nanoseconds since the epoch. Sizes are bytes.

What could not be known is None (JSON null), and `CollectorHealth.problem` or `notes` says why; it is never 0 (N6).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from diag.analysis.stall import Verdict
from hwr.outcomes import CollectorName, InventoryState, Liveness, LockKind, MemorySource, Role, View
from hwr.telemetry.state import WorkerState

SNAPSHOT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorHealth:
    """One collector, or one of several of a name: `target` is the directory that this one reads, empty where there is one only.

    `ok` is false while it hangs beyond its deadline, and after it raised or could read nothing. `sampled_ns` is the end of the last
    run that brought data, `seconds` what the last finished run took, `running_since_ns` is set while one goes on.
    """

    name: CollectorName
    target: str = ""
    ok: bool = False
    problem: str | None = None
    sampled_ns: int | None = None
    seconds: float | None = None
    running_since_ns: int | None = None
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """A place where journals were looked for, and what was found; `strangers` counts what lies there and is no journal of ours."""

    path: str
    readable: bool
    problem: str | None = None
    runs: int = 0
    workers: int = 0
    strangers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """One thread. `state` is the kernel's letter; None is what could not be read (`wchan` of a lone 0 is unknown)."""

    tid: int
    name: str
    state: str
    wchan: str | None = None
    syscall: str | None = None
    utime_s: float | None = None
    stime_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What the lock-free files of /proc say of a process; counters since its start.

    `threads` are those worth naming: the main thread, and with a suspicion every one that runs or waits in the kernel.
    `mmap_lock_blocked_seconds`: how long a bounded read that needs the process's mmap lock has been waiting; 0.0 if it
    came back at once, None if it was not tried. `frozen`: whether its control group is (a paused container); None if it was not asked.
    """

    pid: int
    state: str
    sampled_ns: int
    name: str = ""
    ppid: int | None = None
    uid: int | None = None
    tracer_pid: int | None = None
    thread_count: int | None = None
    utime_s: float | None = None
    stime_s: float | None = None
    minflt: int | None = None
    majflt: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    threads: tuple[ThreadFacts, ...] = ()
    mmap_lock_blocked_seconds: float | None = None
    frozen: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigure:
    """One figure of a process's memory: from which file, when, and what that reading cost."""

    bytes: int
    source: MemorySource
    sampled_ns: int
    cost_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactUse:
    """What the mappings of one artifact are to one process; healthy: `anonymous_bytes` 0."""

    key: str
    source: MemorySource
    sampled_ns: int
    cost_seconds: float | None = None
    mapped_bytes: int | None = None
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    anonymous_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process that writes a journal.

    `engine` is the name that views use: that of the journal, with a number where a second live one has the same. `pid` is the process's
    number here, `ns_pid` what it calls itself. `state` is the fold of its journal: shared, never to be changed. `shown` is false for a
    process whose engine and rank a newer one has taken: it has no series. `quiet_ns`: when a dead one last wrote or beat.
    """

    engine: str
    rank: int
    role: Role
    run_id: str
    directory: str
    ns_pid: int
    start_ns: int
    liveness: Liveness
    state: WorkerState
    verdict: Verdict
    pid: int | None = None
    uid: int | None = None
    heartbeat_ns: int | None = None
    quiet_ns: int | None = None
    shown: bool = True
    process: ProcessFacts | None = None
    memory: dict[str, MemoryFigure] = field(default_factory=dict)  # rss_anon, rss_file, rss_shmem, pss, private, locked, hugetlb
    artifacts: tuple[ArtifactUse, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How views call it."""
        return f"{self.engine}/{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapper:
    """A process that uses an artifact. An orphan is one that no journal of a living worker accounts for; `how` is `lease` or `mapping`."""

    pid: int
    how: str
    name: str = ""
    worker: str | None = None
    orphan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One artifact of a store, or one that a worker maps although no store that was read has it (`state` None)."""

    key: str
    domain: str | None = None
    state: InventoryState | None = None
    reason: str | None = None
    bytes: int | None = None
    files: int | None = None
    modified_ns: int | None = None  # since the epoch
    page_cache_bytes: int | None = None
    page_cache_source: MemorySource | None = None
    page_cache_ns: int | None = None
    mappers: tuple[Mapper, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One domain, as its elected reporter sees it; with `reporting` false another agent reports it, and only the root is known here."""

    domain: str
    root: str
    reporting: bool
    problem: str | None = None
    sampled_ns: int | None = None
    fstype: str | None = None
    entries: dict[InventoryState, int] = field(default_factory=dict)
    bytes: dict[InventoryState, int] = field(default_factory=dict)
    limit_bytes: int | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockParty:
    """A process that holds or waits for a lock; `state` is the kernel's letter, `worker` its name in views."""

    pid: int | None
    exclusive: bool
    state: str | None = None
    worker: str | None = None
    since_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFacts:
    """A lock of a store or of a pin that somebody holds or waits for. `file` is the file's name, `key` the artifact's if it has one.

    Waiters are the kernel's (`->` in /proc/locks) and those that say in their journal that they wait: polling with a deadline leaves
    none in the kernel's table.
    """

    kind: LockKind
    file: str
    domain: str | None = None
    key: str | None = None
    holders: tuple[LockParty, ...] = ()
    waiters: tuple[LockParty, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """One line of a PSI file: `total_seconds` since boot, averages as shares of 1."""

    total_seconds: float
    avg10: float | None = None
    avg60: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """The machine's own counters. `pressure` by resource (cpu, memory, io) and kind (some, full); `vmstat` those that verdicts use."""

    sampled_ns: int
    pinned_bytes: int | None = None
    mlocked_bytes: int | None = None
    memory: dict[str, int] = field(default_factory=dict)  # of meminfo: total, free, available, cached, shmem, unevictable
    vmstat: dict[str, int] = field(default_factory=dict)
    pressure: dict[str, dict[str, Pressure]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupFacts:
    """One level of a worker's memory control group, split as far as its version says."""

    path: str
    version: int
    sampled_ns: int
    usage_bytes: int | None = None
    limit_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    unevictable_bytes: int | None = None
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """The node at `taken_ns`. `retained` counts dead workers that are kept; `unreadable` says once what this reader may not read, and what
    would open it."""

    version: int = SNAPSHOT_VERSION
    view: View
    taken_ns: int
    realtime_offset_ns: int
    host: str
    boot_id: str | None = None
    kernel_release: str = ""
    program_version: str = ""
    pid: int = 0
    started_ns: int = 0
    run_directories: tuple[RunDirectory, ...] = ()
    workers: tuple[Worker, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    stores: tuple[Store, ...] = ()
    locks: tuple[LockFacts, ...] = ()
    kernel: KernelFacts | None = None
    cgroups: tuple[CgroupFacts, ...] = ()
    collectors: tuple[CollectorHealth, ...] = ()
    unreadable: tuple[str, ...] = ()

    def wall_ns(self, mono_ns: int) -> int:
        """Convert a CLOCK_BOOTTIME reading of this node to nanoseconds since the epoch."""
        return mono_ns + self.realtime_offset_ns


class WrongSnapshot(ValueError):
    """The text is not a snapshot of a version that this reader knows."""


def to_json(snapshot: NodeSnapshot) -> bytes:
    """Return the snapshot as one JSON object."""
    return msgspec.json.encode(snapshot)


def from_json(text: bytes) -> NodeSnapshot:
    """Rebuild a snapshot; unknown fields of a later version are ignored.

    Raises:
        WrongSnapshot: it is none.
    """
    try:
        return msgspec.json.decode(text, type=NodeSnapshot)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WrongSnapshot(str(error)) from error


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a snapshot."""
    schema = msgspec.json.schema(NodeSnapshot)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "hwr node snapshot", **schema}
