"""How a snapshot is recorded: its parts as entries, and what of them is worth a line.

Owns the names of parts and entries, the rules of what counts as a change, and the way back from merged entries to the values of a snapshot.
Promises that `parts` and the functions that rebuild are each other's inverse but for what the rules leave out. Refuses to read journals
and to write them.

The rules, by field: a size is told again when it moved by more than 1 MiB and more than 1 %; counters, threads and texts of problems at
most every 10 seconds; costs of collectors at most once a minute; a time of sampling only along with something else of its entry; the state
of a process that flips between running and sleeping like a counter; everything else with each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from diag.node.snapshot import (
    Artifact,
    ArtifactUse,
    CgroupFacts,
    CollectorHealth,
    KernelFacts,
    LockFacts,
    MemoryFigure,
    NodeSnapshot,
    ProcessFacts,
    RunDirectory,
    Store,
    Worker,
)

Entry = dict[str, Any]
Entries = dict[str, Entry]
Value = TypeVar("Value")

# Beyond these the fold would refuse an entry; those in use and the largest artifacts come first.
MAX_ARTIFACTS: Final = 500
MAX_THREADS: Final = 16
MAX_USERS: Final = 32
# A heartbeat comes each second, and a collector that runs for longer than a moment is worth naming.
SILENT_NS: Final = 3_000_000_000

_MIB: Final = 1 << 20
_SHARE: Final = 0.01
_SLOW_NS: Final = 10_000_000_000
_RARE_NS: Final = 60_000_000_000

Rule = Callable[[Any, Any, int], bool]  # (told last, now, nanoseconds since) -> tell it again


def _exact(_old: Any, _new: Any, _elapsed: int) -> bool:
    return True


def _size(old: Any, new: Any, _elapsed: int) -> bool:
    return bool(abs(new - old) > max(_MIB, _SHARE * old))


def _slow(_old: Any, _new: Any, elapsed: int) -> bool:
    return elapsed >= _SLOW_NS


def _rare(_old: Any, _new: Any, elapsed: int) -> bool:
    return elapsed >= _RARE_NS


def _along(_old: Any, _new: Any, _elapsed: int) -> bool:
    return False


def _letter(old: Any, new: Any, elapsed: int) -> bool:
    return {old, new} != {"R", "S"} or elapsed >= _SLOW_NS


def _figure(old: Any, new: Any, elapsed: int) -> bool:
    return bool(old["source"] != new["source"]) or _size(old["bytes"], new["bytes"], elapsed)


_COUNTERS: Final = ("utime_s", "stime_s", "minflt", "majflt", "read_bytes", "write_bytes", "voluntary_switches", "involuntary_switches")
_SIZES: Final = ("mapped_bytes", "rss_bytes", "pss_bytes", "anonymous_bytes", "page_cache_bytes", "free_bytes", "usage_bytes")
_OF_CGROUPS: Final = ("anon_bytes", "file_bytes", "shmem_bytes", "unevictable_bytes", "pinned_bytes", "mlocked_bytes")
_RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys((*_COUNTERS, "threads", "thread_count", "mmap_lock_blocked_seconds", "free_inodes", "problem"), _slow),
    **dict.fromkeys((*_SIZES, *_OF_CGROUPS), _size),
    **dict.fromkeys(("seconds", "heartbeat_ns"), _rare),
    **dict.fromkeys(("sampled_ns", "page_cache_ns", "cost_seconds"), _along),
    "state": _letter,
}
# What an agent says of itself and of its machine.
_AGENT: Final[dict[str, type]] = {
    "host": str,
    "boot_id": str,
    "kernel_release": str,
    "program_version": str,
    "pid": int,
    "started_ns": int,
    "realtime_offset_ns": int,
}
# Entries whose fields are not those of a class: all of them follow one rule.
_ALL_FIELDS: Final[dict[str, Rule]] = {"memory": _figure, "node/memory": _size, "node/vmstat": _slow, "node/pressure": _slow}
_COLLECTOR_TIMES: Final[dict[str, Rule]] = {**_RULES, "sampled_ns": _rare}


def changed(part: str, name: str, told: Entry, times: dict[str, int], now: Entry, now_ns: int) -> Entry:
    """Return the fields of an entry that are worth telling; `times` says when each was told last, and is kept up."""
    everything = _ALL_FIELDS.get(f"{part}/{name}") or _ALL_FIELDS.get(part)
    rules = _COLLECTOR_TIMES if part == "collectors" else _RULES
    found: Entry = {}
    for field, value in now.items():
        if field in told:
            old = told[field]
            if old == value:
                continue
            rule = everything or rules.get(field, _exact)
            if old is not None and value is not None and not rule(old, value, now_ns - times.get(field, 0)):
                continue
        elif value is None:
            continue
        found[field] = value
    for field in told.keys() - now.keys():
        if told[field] is not None:
            found[field] = None
    if found:
        found |= {field: value for field, value in now.items() if rules.get(field) is _along and value is not None and not everything}
    times |= dict.fromkeys(found, now_ns)
    return found


# from a snapshot to entries ---------------------------------------------------------------------------------------


def name_of(directory: str) -> str:
    """Return what is the same of a worker's directory wherever it was copied to: its run and its own name."""
    return "/".join(directory.rsplit("/", 2)[-2:])


def parts(snapshot: NodeSnapshot) -> dict[str, Entries]:
    """Return the snapshot as entries by part, artifacts apart; what a worker says of itself is in its own journal."""
    return {
        "node": _node(snapshot),
        "workers": {name_of(worker.directory): _worker(worker, snapshot.taken_ns) for worker in snapshot.workers},
        "processes": {str(worker.process.pid): _process(worker.process) for worker in snapshot.workers if worker.process is not None},
        "memory": {
            name_of(worker.directory): {figure: _plain(value) for figure, value in worker.memory.items()}
            for worker in snapshot.workers
            if worker.memory
        },
        "uses": {f"{name_of(worker.directory)}|{use.key}": _plain(use) for worker in snapshot.workers for use in worker.artifacts},
        "stores": {f"{store.domain}|{store.root}": _plain(store) for store in snapshot.stores},
        "locks": {f"{lock.domain}|{lock.kind}|{lock.file}": _plain(lock) for lock in snapshot.locks},
        "cgroups": {group.path: _plain(group) for group in snapshot.cgroups},
        "collectors": {f"{one.name}|{one.target}": _collector(one, snapshot.taken_ns) for one in snapshot.collectors},
        "directories": {directory.path: _plain(directory) for directory in snapshot.run_directories},
    }


def artifacts(found: Iterable[Artifact]) -> Entries:
    """Return those artifacts that are recorded."""
    chosen = sorted(found, key=lambda artifact: (not artifact.mappers, -(artifact.bytes or 0), artifact.key))[:MAX_ARTIFACTS]
    return {artifact.key: _plain(replace(artifact, mappers=artifact.mappers[:MAX_USERS])) for artifact in chosen}


def _plain(value: Any) -> Entry:
    plain: Entry = msgspec.to_builtins(value)
    return plain


def _node(snapshot: NodeSnapshot) -> Entries:
    entries: Entries = {"agent": {**{name: getattr(snapshot, name) for name in _AGENT}, "unreadable": list(snapshot.unreadable)}}
    kernel = snapshot.kernel
    if kernel is not None:
        plain = _plain(kernel)
        entries["memory"], entries["vmstat"] = plain.pop("memory"), plain.pop("vmstat")
        entries["pressure"] = {
            f"{resource}.{kind}": line for resource, lines in plain.pop("pressure").items() for kind, line in lines.items()
        }
        entries["kernel"] = plain
    return entries


def _worker(worker: Worker, now_ns: int) -> Entry:
    silent = worker.heartbeat_ns is not None and now_ns - worker.heartbeat_ns > SILENT_NS
    return {
        "engine": worker.engine,
        "directory": worker.directory,
        "pid": worker.pid,
        "uid": worker.uid,
        "liveness": worker.liveness.value,
        "shown": worker.shown,
        "heartbeat_ns": worker.heartbeat_ns,
        "silent_since_ns": worker.heartbeat_ns if silent else None,
        "quiet_ns": worker.quiet_ns if worker.quiet_ns is None or now_ns - worker.quiet_ns > SILENT_NS else None,
        "notes": list(worker.notes),
    }


def _process(facts: ProcessFacts) -> Entry:
    threads = tuple(replace(thread, utime_s=None, stime_s=None) for thread in facts.threads[:MAX_THREADS])
    return _plain(replace(facts, threads=threads))


def _collector(health: CollectorHealth, now_ns: int) -> Entry:
    since = health.running_since_ns
    return _plain(health if since is None or now_ns - since > SILENT_NS else replace(health, running_since_ns=None))


# and back ---------------------------------------------------------------------------------------------------------


def _built(kind: type[Value], entry: Entry) -> Value | None:
    """Return an entry as a value, None where it is none: a journal may be somebody else's file."""
    try:
        return msgspec.convert({name: value for name, value in entry.items() if value is not None}, kind)
    except (msgspec.ValidationError, RecursionError, TypeError):
        return None


def built(kind: type[Value], entries: Mapping[str, Entry]) -> tuple[Value, ...]:
    """Return the entries of a part as values, those left out that are none."""
    return tuple(value for value in (_built(kind, entry) for entry in entries.values()) if value is not None)


def processes(entries: Mapping[str, Entry]) -> dict[int, ProcessFacts]:
    """Return the processes by pid."""
    return {facts.pid: facts for facts in built(ProcessFacts, entries)}


def memory(entry: Entry) -> dict[str, MemoryFigure]:
    """Return the memory figures of one worker."""
    figures = {name: _built(MemoryFigure, figure) for name, figure in entry.items() if isinstance(figure, dict)}
    return {name: figure for name, figure in figures.items() if figure is not None}


def uses(entries: Mapping[str, Entry], worker: str) -> tuple[ArtifactUse, ...]:
    """Return what artifacts are to one worker."""
    return built(ArtifactUse, {name: entry for name, entry in entries.items() if name.startswith(f"{worker}|")})


def kernel(parts_told: Mapping[str, Mapping[str, Entry]]) -> KernelFacts | None:
    """Return the kernel's counters."""
    entries = parts_told.get("node", {})
    if "kernel" not in entries:
        return None
    pressure: dict[str, Entry] = {}
    for name, line in entries.get("pressure", {}).items():
        resource, _, kind = name.partition(".")
        if line is not None:
            pressure.setdefault(resource, {})[kind] = line
    tables = {name: {key: value for key, value in entries.get(name, {}).items() if value is not None} for name in ("memory", "vmstat")}
    return _built(KernelFacts, {**entries["kernel"], **tables, "pressure": pressure})


def listed(entries: Mapping[str, Mapping[str, Entry]]) -> dict[str, Any]:
    """Return the parts of a snapshot that are lists of entries, by the snapshot's field."""
    return {
        "artifacts": built(Artifact, entries.get("artifacts", {})),
        "stores": built(Store, entries.get("stores", {})),
        "locks": built(LockFacts, entries.get("locks", {})),
        "cgroups": built(CgroupFacts, entries.get("cgroups", {})),
        "collectors": built(CollectorHealth, entries.get("collectors", {})),
        "run_directories": built(RunDirectory, entries.get("directories", {})),
    }


def built_node(entries: Mapping[str, Mapping[str, Entry]]) -> dict[str, Any]:
    """Return what the agent said of itself and of its machine; `unreadable` is always there."""
    told = entries.get("node", {}).get("agent", {})
    found: dict[str, Any] = {name: value for name, value in told.items() if _AGENT.get(name) is type(value)}
    unreadable = told.get("unreadable")
    return {**found, "unreadable": tuple(map(str, unreadable)) if isinstance(unreadable, list) else ()}
