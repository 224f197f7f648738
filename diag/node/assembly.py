"""From what the collectors brought to a snapshot.

Owns the join: names of workers on locks and artifacts, page cache and users on artifacts. Promises a pure function of its parts, and to
join ten thousand artifacts again only when one of the parts changed. Refuses to read or to judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diag.analysis.stall import Verdict
from diag.node.engines import Placed
from diag.node.memory import MemoryOf
from diag.node.page_cache import CachedPages
from diag.node.runs import RunsFound, Seen
from diag.node.snapshot import Artifact, CgroupFacts, KernelFacts, LockFacts, LockParty, Mapper, ProcessFacts, Store, Worker
from diag.node.stores import StoreFound
from hwr.outcomes import Liveness
from hwr.units import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The newest of what each collector brought; empty where nothing came yet."""

    runs: Sequence[RunsFound] = ()
    processes: Mapping[int, ProcessFacts] = field(default_factory=dict)
    memory: Mapping[int, MemoryOf] = field(default_factory=dict)
    page_cache: Mapping[str, CachedPages] = field(default_factory=dict)
    locks: Sequence[LockFacts] = ()
    kernel: KernelFacts | None = None
    cgroups: Sequence[CgroupFacts] = ()
    stores: Sequence[StoreFound] = ()
    mappers: Mapping[str, Sequence[Mapper]] = field(default_factory=dict)

    def seen(self) -> tuple[Seen, ...]:
        """Every process that writes a journal, once, whichever run directory shows it."""
        found: dict[Path, Seen] = {}
        for runs in self.runs:
            for worker in runs.workers:
                found.setdefault(worker.directory, worker)
        return tuple(found.values())


def names_of(seen: Sequence[Seen], placed: Mapping[Path, Placed]) -> dict[Path, str]:
    """Return how views call each worker."""
    return {worker.directory: f"{placed[worker.directory].engine}/{worker.rank}" for worker in seen if worker.directory in placed}


def workers(parts: Parts, seen: Sequence[Seen], placed: Mapping[Path, Placed], verdicts: Mapping[Path, Verdict]) -> tuple[Worker, ...]:
    """Return the workers, by engine, rank and start."""
    found: list[Worker] = []
    for worker in seen:
        place = placed.get(worker.directory, Placed(engine=worker.engine, shown=False))
        alive = worker.pid is not None and worker.liveness is Liveness.ALIVE
        process = parts.processes.get(worker.pid) if alive and worker.pid is not None else None
        memory = parts.memory.get(worker.pid) if alive and worker.pid is not None else None
        found.append(
            Worker(
                engine=place.engine,
                rank=worker.rank,
                role=worker.role,
                run_id=printable(worker.run_id),
                directory=printable(str(worker.directory)),
                pid=worker.pid,
                ns_pid=worker.ns_pid,
                start_ns=worker.start_ns,
                uid=worker.uid,
                liveness=worker.liveness,
                heartbeat_ns=worker.heartbeat_ns,
                quiet_ns=worker.quiet_ns,
                shown=place.shown,
                state=worker.state,
                verdict=verdicts.get(worker.directory, Verdict()),
                process=process,
                memory={} if memory is None else dict(memory.figures),
                artifacts=() if memory is None else memory.artifacts,
                notes=worker.notes,
            )
        )
    return tuple(sorted(found, key=lambda worker: (worker.engine, worker.rank, worker.start_ns, worker.ns_pid)))


def named_locks(locks: Sequence[LockFacts], by_pid: Mapping[int, str]) -> tuple[LockFacts, ...]:
    """Say which workers hold and wait."""

    def party(one: LockParty) -> LockParty:
        name = None if one.pid is None else by_pid.get(one.pid)
        return one if name is None or one.worker == name else replace(one, worker=name)

    return tuple(replace(lock, holders=tuple(map(party, lock.holders)), waiters=tuple(map(party, lock.waiters))) for lock in locks)


class ArtifactJoin:
    """Joins artifacts with their page cache and their users; remembers the result while its parts are the same objects."""

    def __init__(self) -> None:
        self._parts: tuple[object, ...] = ()
        self._joined: tuple[Artifact, ...] = ()

    def join(self, parts: Parts, by_pid: Mapping[int, str]) -> tuple[Artifact, ...]:
        """Return every artifact that a store has or somebody uses, the largest first."""
        made_of: tuple[object, ...] = (parts.page_cache, parts.mappers, tuple(by_pid.items()), *parts.stores)
        if len(made_of) != len(self._parts) or any(
            one is not other and one != other for one, other in zip(made_of[2:3], self._parts[2:3], strict=True)
        ):
            changed = True
        else:
            changed = any(one is not other for index, (one, other) in enumerate(zip(made_of, self._parts, strict=True)) if index != 2)
        if changed:
            self._parts, self._joined = made_of, _joined(parts, by_pid)
        return self._joined


def _joined(parts: Parts, by_pid: Mapping[int, str]) -> tuple[Artifact, ...]:
    known: dict[str, Artifact] = {}
    for found in parts.stores:
        for artifact in found.artifacts:
            if artifact.key not in known or known[artifact.key].state != "ready":
                known[artifact.key] = artifact
    for key in (*parts.page_cache, *parts.mappers):
        known.setdefault(key, Artifact(key=key))
    for key in {*parts.page_cache, *parts.mappers}:
        pages = parts.page_cache.get(key)
        users = tuple(_named(user, by_pid) for user in parts.mappers.get(key, ()))
        known[key] = replace(
            known[key],
            page_cache_bytes=None if pages is None else pages.bytes,
            page_cache_source=None if pages is None else pages.source,
            page_cache_ns=None if pages is None else pages.sampled_ns,
            mappers=users,
        )
    return tuple(sorted(known.values(), key=lambda artifact: (-(artifact.bytes or 0), artifact.key)))


def _named(user: Mapper, by_pid: Mapping[int, str]) -> Mapper:
    name = by_pid.get(user.pid)
    return user if name is None else replace(user, worker=name, orphan=False)


def reported(stores: Sequence[StoreFound]) -> tuple[Store, ...]:
    """Return the stores, by domain, each once."""
    by_domain: dict[str, Store] = {}
    for found in stores:
        by_domain.setdefault(found.store.domain, found.store)
    return tuple(by_domain[domain] for domain in sorted(by_domain))
