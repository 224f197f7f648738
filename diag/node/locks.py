"""Who holds and who waits for the locks of the stores and of the payload files.

Owns the join of /proc/locks with the stores' lock files, with the payload files of known artifacts, and with what journals say of waiting.
Promises that old lock files cost nothing (names are looked up only when an unknown inode is locked on a store's device), that nothing is
locked in order to look, and that a store whose filesystem hangs costs its own names only. Refuses certainty about absence: a lock of
another PID namespace is not in the table, and a wait that polls leaves no waiter there: then the journal's word counts.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diag.node.artifact_files import ArtifactIndex
from diag.node.asides import Answer, Asides
from diag.node.collecting import Collected, joined_problem
from diag.node.runs import Seen
from diag.node.snapshot import LockFacts, LockParty
from diag.node.stores import StoreFound
from hwr.errors import Unavailable, errno_text
from hwr.outcomes import Liveness, LockKind, Operation
from hwr.procfs.file_id import FileId
from hwr.procfs.locks import KernelLock, Lock, parse_locks
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.procfs.stat import read_stat
from hwr.store.layout import StoreLayout
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.state import OpenOperation
from hwr.units import NS_PER_S, printable

MAX_LOCKS: Final = 512
MAX_PARTIES: Final = 64
# How long the table waits for the names in one store's `locks/`; a late answer serves the next look.
NAMES_SECONDS: Final = 0.1
# Every lock that is free has an open operation for some microseconds too; only an older one is a wait without a holder in the table.
WAIT_NS: Final = NS_PER_S // 4
# A directory's time of change moves in steps of up to 10 ms.
SETTLED_NS: Final = NS_PER_S

_NAMES: Final = {"domain-init.lock": LockKind.DOMAIN_INIT, "domain-build.lock": LockKind.ADMISSION}
_KEYED: Final = re.compile(r"([0-9a-f]{64})\.(build|artifact)\.lock\Z")


@dataclass(frozen=True, slots=True)
class _Place:
    """What a locked file is."""

    kind: LockKind
    file: str
    domain: str | None
    key: str | None


@dataclass(slots=True)
class _Names:
    """The lock files of one store, by inode, as listed when its directory last changed."""

    changed_ns: int = -1
    settled: bool = False  # a directory that changed just now may change again without another time
    by_inode: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait that a journal tells of."""

    pid: int | None
    place: _Place
    exclusive: bool
    since_ns: int


class LockCollector:
    """Reads the table, once a second."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Seen]],
        stores: Callable[[], Sequence[StoreFound]],
        index: ArtifactIndex,
        *,
        proc_root: Path = PROC_ROOT,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._workers, self._stores, self._index = workers, stores, index
        self._proc_root, self._clock = proc_root, clock
        self._asides = Asides("locks", clock=clock)
        self._names: dict[Path, _Names] = {}
        self._text, self._devices = b"", frozenset[tuple[int, int]]()
        self._kept: list[bytes] = []
        self._groups: dict[bytes, tuple[Lock, ...]] = {}
        self._table: tuple[Lock, ...] = ()
        self._placed_of: tuple[object, ...] = ()
        self._placed: tuple[tuple[Lock, _Place], ...] = ()
        self._exclusive: set[_Place] = set()
        self._made_of: tuple[object, ...] = ()
        self._found: tuple[LockFacts, ...] = ()

    def collect(self) -> Collected[tuple[LockFacts, ...]] | Unavailable:
        """Read once."""
        text = read_text(self._proc_root / "locks")
        if isinstance(text, Unavailable):
            return text
        stores = [store for store in self._stores() if store.path is not None and store.device is not None]
        devices = frozenset(store.device for store in stores if store.device is not None)
        problems = self._join(self._locks(text, devices | self._index.devices()), stores)
        waits = self._waits(stores)
        states = self._states(self._contenders(waits))
        made_of = (self._placed, waits, states)
        if made_of != self._made_of:
            self._made_of, self._found = made_of, _facts(self._placed, waits, states)
        return Collected(self._found, joined_problem(problems))

    def _join(self, table: tuple[Lock, ...], stores: Sequence[StoreFound]) -> list[str]:
        """Find out what each locked file is, unless that is known from the last time."""
        placed_of = (table, self._index.version, [(store.path, store.device, store.store.domain) for store in stores])
        if placed_of == self._placed_of:
            return []
        problems = self._look_up_names(table, stores)
        files = self._index.by_file()
        placed = ((lock, self._place(lock.file, stores, files)) for lock in table if lock.file is not None)
        self._placed = tuple((lock, place) for lock, place in placed if place is not None)
        self._exclusive = {place for lock, place in self._placed if lock.exclusive or lock.waiters}
        settled = all(names.settled for names in self._names.values())
        self._placed_of = placed_of if settled and not problems else ()  # a late answer is fetched the next time
        return problems

    def _locks(self, text: bytes, devices: frozenset[tuple[int, int]]) -> tuple[Lock, ...]:
        """Parse the lines of the devices that matter, and only when one of them changed: parsing all of them each second costs more."""
        if text != self._text or devices != self._devices:
            self._text, self._devices = text, devices
            words = [b" %02x:%02x:" % device for device in devices]
            # Without their numbers, which change whenever anybody's lock anywhere comes or goes.
            kept = [line.partition(b": ")[2] for line in text.split(b"\n") if any(word in line for word in words)]
            if kept != self._kept:
                self._kept = kept
                self._table = self._parsed(kept)
        return self._table

    def _parsed(self, lines: Sequence[bytes]) -> tuple[Lock, ...]:
        groups: list[bytes] = []
        for line in lines:
            if line.startswith(b"->") and groups:
                groups[-1] += b"1: " + line + b"\n"
            else:
                groups.append(b"1: " + line + b"\n")
        before, self._groups = self._groups, {}
        for group in groups:
            self._groups[group] = before.get(group) or parse_locks(group)
        return tuple(lock for group in groups for lock in self._groups[group] if lock.kind is KernelLock.FLOCK)

    def _look_up_names(self, table: Sequence[Lock], stores: Sequence[StoreFound]) -> list[str]:
        problems: list[str] = []
        files = self._index.by_file()
        for store in stores:
            assert store.path is not None
            names = self._names.setdefault(store.path, _Names())
            unknown = any(
                lock.file is not None
                and (lock.file.major, lock.file.minor) == store.device
                and lock.file.inode not in names.by_inode
                and lock.file not in files
                for lock in table
            )
            if not unknown:
                continue
            directory = StoreLayout(store.path).locks
            try:
                answer = self._asides.ask(store.path, functools.partial(_listed, directory, names), NAMES_SECONDS)
            except OSError as error:
                problems.append(f"locks of {printable(store.root)}: {errno_text(error)}")
                continue
            if isinstance(answer, Answer):
                self._names[store.path] = answer.value
            else:
                why = answer.reason if isinstance(answer, Unavailable) else f"no answer for {answer.seconds:.0f} s"
                problems.append(f"locks of {printable(store.root)}: {why}")
        known = {store.path for store in stores}
        self._names = {path: names for path, names in self._names.items() if path in known}
        return problems

    def _place(self, file: FileId, stores: Sequence[StoreFound], files: Mapping[FileId, str]) -> _Place | None:
        for store in stores:
            if (file.major, file.minor) == store.device and store.path is not None:
                name = self._names.get(store.path, _Names()).by_inode.get(file.inode)
                if name is not None:
                    return _of_name(name, store.store.domain)
        key = files.get(file)
        if key is None:
            return None
        found = self._index.known(key)
        name = next((payload.path.name for payload in found.files if payload.file == file), "") if found else ""
        return _Place(LockKind.PIN, printable(name), None, key)

    def _waits(self, stores: Sequence[StoreFound]) -> list[_Wait]:
        now = self._clock()
        domains = {store.root: store.store.domain for store in stores}
        found: list[_Wait] = []
        for worker in self._workers():
            if worker.liveness in (Liveness.DEAD, Liveness.EXITED):
                continue
            for operation in worker.state.ops.values():
                place = _waited_for(operation, worker, domains) if operation.operation == Operation.LOCK else None
                if place is not None and now - operation.begun_ns >= WAIT_NS:
                    exclusive = operation.attrs.get("exclusive") is not False
                    found.append(_Wait(worker.pid, place, exclusive, operation.begun_ns))
        return found

    def _contenders(self, waits: Sequence[_Wait]) -> set[int | None]:
        """Whose state is worth a letter: who holds exclusively, who waits, and who keeps somebody waiting."""
        if not waits and not self._exclusive:
            return set()
        contended = {wait.place for wait in waits} | self._exclusive
        return {lock.pid for lock, place in self._placed if place in contended} | {wait.pid for wait in waits}

    def _states(self, pids: set[int | None]) -> dict[int, str]:
        found: dict[int, str] = {}
        for pid in pids:
            stat = None if pid is None else read_stat(pid, self._proc_root)
            if stat is not None and not isinstance(stat, Unavailable):
                found[stat.pid] = stat.state
        return found


def _listed(directory: Path, before: _Names) -> _Names:
    """List a store's lock files if something was added since; names and inodes come with the listing, no file is looked at."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        changed = os.fstat(descriptor).st_mtime_ns
        if changed == before.changed_ns and before.settled:
            return before
        settled = time.time_ns() - changed > SETTLED_NS
        with os.scandir(descriptor) as entries:
            return _Names(changed, settled, {entry.inode(): entry.name for entry in entries if entry.name.endswith(".lock")})
    finally:
        os.close(descriptor)


def _of_name(name: str, domain: str | None) -> _Place | None:
    if name in _NAMES:
        return _Place(_NAMES[name], name, domain, None)
    match = _KEYED.match(name)
    return _Place(LockKind(match[2]), name, domain, match[1]) if match else None


def _waited_for(operation: OpenOperation, worker: Seen, domains: Mapping[str, str]) -> _Place | None:
    kind, file = operation.attrs.get("lock"), operation.attrs.get("file")
    if not isinstance(file, str) or kind not in LockKind.__members__.values():
        return None
    if kind == LockKind.PIN:
        return _Place(LockKind.PIN, printable(file, 255), None, None)
    named = _of_name(file, next((domains[root] for root in reversed(worker.roots) if root in domains), None))
    return named if named is not None and named.kind == kind else None


def _facts(placed: Sequence[tuple[Lock, _Place]], waits: Sequence[_Wait], states: Mapping[int, str]) -> tuple[LockFacts, ...]:
    def party(lock: Lock) -> LockParty:
        return LockParty(pid=lock.pid, exclusive=lock.exclusive, state=states.get(lock.pid or 0))

    holders: dict[_Place, list[LockParty]] = {}
    waiters: dict[_Place, dict[int | None, LockParty]] = {}
    for lock, place in placed:
        holders.setdefault(place, []).append(party(lock))
        for waiter in lock.waiters:
            waiters.setdefault(place, {})[waiter.pid] = party(waiter)
    for wait in waits:
        place = _match(wait, holders)
        held = holders.get(place, [])
        if any(holder.pid == wait.pid and wait.pid is not None for holder in held):
            continue  # it has just got it
        told = LockParty(pid=wait.pid, exclusive=wait.exclusive, state=states.get(wait.pid or 0), since_ns=wait.since_ns)
        waiters.setdefault(place, {})[wait.pid] = told
    facts = [
        LockFacts(
            kind=place.kind,
            file=place.file,
            domain=place.domain,
            key=place.key,
            holders=tuple(holders.get(place, [])[:MAX_PARTIES]),
            waiters=tuple(waiters.get(place, {}).values())[:MAX_PARTIES],
        )
        for place in {**holders, **waiters}
    ]
    # Those that keep somebody waiting come first, leases last: where there are too many, nobody misses those.
    facts.sort(
        key=lambda lock: (not lock.waiters, not any(holder.exclusive for holder in lock.holders), lock.kind, lock.domain or "", lock.file)
    )
    return tuple(facts[:MAX_LOCKS])


def _match(wait: _Wait, holders: Mapping[_Place, Sequence[LockParty]]) -> _Place:
    """Find what a waiter names by file alone; the payload file of a pin has the same name in many artifacts: one that is held is meant."""
    if wait.place in holders:
        return wait.place
    for place, held in holders.items():
        if (place.kind, place.file) == (wait.place.kind, wait.place.file) and any(holder.exclusive for holder in held):
            return place
    return wait.place
