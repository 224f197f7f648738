"""The processes that write journals below one run directory, followed.

Owns the listing, one reader a journal, and who lives. Promises that a second's work grows with what is new and not with what lies there
(directories of the dead are looked at once), that one worker's strange files cost only that worker, and states that nobody changes once
they are handed out. Refuses to follow links, to wait for a FIFO, to read more than its share at a time, and to show what another boot left.
"""

from __future__ import annotations

import copy
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diag.node.pids import Pids, Writer
from diag.node.snapshot import RunDirectory
from hwr.errors import Unavailable, errno_text
from hwr.outcomes import Liveness, Role
from hwr.procfs.file_id import FileId
from hwr.procfs.identity import read_boot_id
from hwr.procfs.locks import KernelLock, read_locks
from hwr.procfs.reading import PROC_ROOT
from hwr.telemetry.alive import Beat, is_held, read_beat
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.reader import JournalReader
from hwr.telemetry.rundir import ALIVE, GRACE_SECONDS, WorkerDirectory, parse_worker_directory
from hwr.telemetry.state import WorkerState
from hwr.units import NS_PER_S, one_line, printable

KEEP_DEAD_SECONDS: Final = 600.0
# Workers of one run directory that are followed at once, the newest first; the rest is counted.
MAX_FOLLOWED: Final = 512
# Runs in which nobody lives are listed again in turns, this many at a time: thousands of them lie there after a week of restarts.
QUIET_RUNS_AT_ONCE: Final = 128
# Records of one journal that are folded at a time: a fifth of a second of one core; a longer journal goes on at the next look.
RECORDS_AT_ONCE: Final = 60_000
_OURS: Final = ("agent.", "reporter.", ".")
_LABEL_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A process that writes a journal, as its run directory shows it. `pid` is its number here; `engine` as the journal says.

    `state` is a copy that nobody changes any more. `roots` are the stores that the journal names. Times are CLOCK_BOOTTIME.
    """

    directory: Path
    run_id: str
    rank: int
    role: Role
    engine: str
    ns_pid: int
    start_ns: int
    pid: int | None
    uid: int | None
    liveness: Liveness
    heartbeat_ns: int | None
    quiet_ns: int | None
    state: WorkerState
    roots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFound:
    """What one run directory holds."""

    directory: RunDirectory
    workers: tuple[Seen, ...]


@dataclass(slots=True)
class _Run:
    """A directory of one run as it was listed: again when its time of change says that something came or went."""

    changed_ns: int
    workers: tuple[WorkerDirectory, ...]
    strangers: int


class RunWatch:
    """Follows one run directory; one thread calls `collect`, about once a second."""

    def __init__(
        self,
        path: Path,
        *,
        proc_root: Path = PROC_ROOT,
        keep_dead_seconds: float = KEEP_DEAD_SECONDS,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self.path = path
        self._proc_root, self._keep_ns, self._clock = proc_root, int(keep_dead_seconds * NS_PER_S), clock
        self._boot = read_boot_id(proc_root)
        self._pids = Pids(proc_root)
        self._runs: dict[str, _Run] = {}
        self._turn = 0
        self._followed: dict[Path, _Followed] = {}
        self._past: dict[Path, FileId | None] = {}  # of the dead that are kept no longer

    def collect(self) -> RunsFound:
        """Look once."""
        now = self._clock()
        problem = self._list_runs()
        held = self._held()
        present = [worker for run in self._runs.values() for worker in run.workers]
        self._forget({worker.path for worker in present})
        self._wake(held)
        fresh = [worker for worker in present if worker.path not in self._past]
        fresh.sort(key=lambda worker: worker.start_ns, reverse=True)
        strangers = sum(run.strangers for run in self._runs.values())
        found: list[Seen] = []
        for worker in fresh[:MAX_FOLLOWED]:
            followed = self._followed.get(worker.path)
            if followed is None:
                followed = self._followed[worker.path] = _Followed(worker, self._proc_root)
            seen = followed.look(held, self._pids, now, self._boot)
            if self._is_past(seen, followed, now):
                self._past[worker.path] = followed.alive_id
                followed.close()
                del self._followed[worker.path]
            else:
                found.append(seen)
        if len(fresh) > MAX_FOLLOWED:
            problem = f"{len(fresh) - MAX_FOLLOWED} more workers than the {MAX_FOLLOWED} newest are not followed"
        directory = RunDirectory(
            path=printable(str(self.path)),
            readable=problem is None or bool(self._runs),
            problem=problem,
            runs=len({seen.run_id for seen in found if seen.role is not Role.AGENT}),
            workers=sum(1 for seen in found if seen.role is not Role.AGENT),
            strangers=strangers,
        )
        return RunsFound(directory=directory, workers=tuple(found))

    def close(self) -> None:
        """Close every journal."""
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()

    def _list_runs(self) -> str | None:
        """Bring the listing up to date; return why the directory itself cannot be listed."""
        try:
            facts = os.lstat(self.path)
            if stat.S_ISLNK(facts.st_mode):
                facts = os.stat(self.path)
            if not stat.S_ISDIR(facts.st_mode):
                self._runs.clear()
                return "it is not a directory"
            with os.scandir(self.path) as entries:
                listed = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except FileNotFoundError:
            self._runs.clear()
            return "it does not exist"
        except OSError as error:
            self._runs.clear()
            return errno_text(error)
        runs = [name for name, is_directory in listed.items() if is_directory]
        for name in self._runs.keys() - set(runs) - {""}:
            del self._runs[name]
        strange = sum(1 for name, is_directory in listed.items() if not is_directory and not name.startswith(_OURS))
        self._runs[""] = _Run(0, (), strange)
        problems = [problem for name in self._due(runs) if (problem := self._list_run(name)) is not None]
        del self._runs[""]
        if strange:
            self._runs[""] = _Run(0, (), strange)
        return problems[0] if problems else None

    def _due(self, runs: list[str]) -> Iterator[str]:
        """Yield the runs to look into: new ones, those where somebody lives, and some of the quiet ones."""
        lively = {followed.worker.path.parent.name for followed in self._followed.values()}
        quiet: list[str] = []
        for name in runs:
            if name not in self._runs or name in lively:
                yield name
            else:
                quiet.append(name)
        quiet.sort()
        for offset in range(min(QUIET_RUNS_AT_ONCE, len(quiet))):
            yield quiet[(self._turn + offset) % len(quiet)]
        self._turn += QUIET_RUNS_AT_ONCE

    def _list_run(self, name: str) -> str | None:
        path = self.path / name
        known = self._runs.get(name)
        try:
            changed = os.lstat(path).st_mtime_ns
            if known is not None and known.changed_ns == changed:
                return None
            with os.scandir(path) as entries:
                listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError as error:
            self._runs[name] = _Run(0, known.workers if known else (), 0)
            return None if isinstance(error, FileNotFoundError) else f"{printable(name)}: {errno_text(error)}"
        workers = [parse_worker_directory(path / inner) for inner, is_directory in listed if is_directory]
        own = parse_worker_directory(path)  # a directory of one run was given
        if own is not None:
            workers.append(own)
        found = tuple(worker for worker in workers if worker is not None)
        # A listing as old as the clock's tick may miss what came within it: looked at again next time.
        settled = time.time_ns() - changed > NS_PER_S
        self._runs[name] = _Run(changed if settled else 0, found, 0)
        return None

    def _held(self) -> Mapping[FileId, int | None] | None:
        """Return who holds which file exclusively; None if the kernel's table cannot be read."""
        table = read_locks(self._proc_root)
        if isinstance(table, Unavailable):
            return None
        return {lock.file: lock.pid for lock in table if lock.file is not None and lock.kind is KernelLock.FLOCK and lock.exclusive}

    def _forget(self, present: set[Path]) -> None:
        for path in [path for path in self._followed if path not in present]:
            self._followed.pop(path).close()
        if len(self._past) > len(present):
            self._past = {path: file for path, file in self._past.items() if path in present}

    def _wake(self, held: Mapping[FileId, int | None] | None) -> None:
        """Follow again whoever was taken for gone and holds its lock: it was stopped for a long time before we came."""
        if held:
            for path in [path for path, file in self._past.items() if file is not None and file in held]:
                del self._past[path]

    def _is_past(self, seen: Seen, followed: _Followed, now: int) -> bool:
        if followed.other_boot:
            return True
        if seen.liveness is Liveness.ALIVE or followed.behind:
            return False
        return seen.quiet_ns is None or now - seen.quiet_ns > self._keep_ns


class _Followed:
    """One worker's directory and its open journal."""

    def __init__(self, worker: WorkerDirectory, proc_root: Path) -> None:
        self.worker = worker
        self.other_boot = False
        self.behind = False
        self.alive_id: FileId | None = None
        self._proc_root = proc_root
        self._reader = JournalReader(worker.path)
        self._records: Iterator[dict[str, Any]] | None = None
        self._signature: tuple[int, ...] = ()
        self._state = WorkerState()
        self._began_ns = time.time_ns()
        self._dead = False
        try:
            self._uid: int | None = os.lstat(worker.path).st_uid
        except OSError:
            self._uid = None

    def close(self) -> None:
        self._records = None
        self._reader.close()

    def look(self, held: Mapping[FileId, int | None] | None, pids: Pids, now: int, boot: str | Unavailable) -> Seen:
        notes: list[str] = []
        self._fold(notes)
        state = self._state
        if isinstance(boot, str) and state.res.get("boot_id", boot) != boot:
            self.other_boot = True
        beat = read_beat(self.worker.path)
        liveness, holder = self._liveness(held, notes)
        writer = Writer(ns_pid=self.worker.pid, start_ns=self.worker.start_ns, namespace=_whole(state.res.get("pid_ns")))
        pid: int | None = None
        if liveness is Liveness.ALIVE:
            translated = pids.of(writer, holder, now)
            if isinstance(translated, Unavailable):
                notes.append(translated.reason)
            else:
                pid = translated
        heartbeat = beat.mono_ns if isinstance(beat, Beat) and 0 < beat.mono_ns <= now + NS_PER_S else None
        last = state.last_ns if 0 < state.last_ns <= now + NS_PER_S else None
        rank = _whole(state.res.get("hwr.rank"))
        if rank is not None and rank != self.worker.rank:
            notes.append(f"its journal says rank {rank}, its directory {self.worker.rank}")
        return Seen(
            directory=self.worker.path,
            run_id=printable(self.worker.run_id, 200),
            rank=self.worker.rank,
            role=_role(state.res.get("hwr.role")),
            engine=printable(str(state.res.get("hwr.engine", "default")), _LABEL_CHARACTERS),
            ns_pid=self.worker.pid,
            start_ns=self.worker.start_ns,
            pid=pid,
            uid=self._uid,
            liveness=liveness,
            heartbeat_ns=heartbeat,
            quiet_ns=max(filter(None, (heartbeat, last)), default=self._written(now)),
            state=state,
            roots=tuple(root for root in state.roots if type(root) is str),
            notes=tuple(dict.fromkeys(one_line(note) for note in notes)),
        )

    def _fold(self, notes: list[str]) -> None:
        """Read what is new, a bounded part of it at a time, and copy the state if it changed."""
        if self._records is None:
            self._records = self._reader.records()
        try:
            # The generator is kept: closing it half-way would lose the lines that it has read and not folded.
            taken = sum(1 for _ in itertools.islice(self._records, RECORDS_AT_ONCE))
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            notes.append(f"journal: {type(error).__name__}: {error}")
            taken, self._records = 0, None
        self.behind = taken == RECORDS_AT_ONCE
        if not self.behind:
            self._records = None
        else:
            notes.append("a long journal is still being read")
        told = self._reader.state
        signature = (told.seq, told.malformed, told.unknown_events, told.seq_gaps, len(told.res))
        if signature != self._signature:
            self._signature, self._state = signature, copy.deepcopy(told)
        if self._reader.problem is not None:
            notes.append(f"journal: {self._reader.problem.reason}")
        if told.malformed:
            notes.append(f"journal: {told.malformed} malformed lines or events")

    def _liveness(self, held: Mapping[FileId, int | None] | None, notes: list[str]) -> tuple[Liveness, int | None]:
        path = self.worker.path / ALIVE
        if self.alive_id is None:
            file = FileId.in_tables(path, self._proc_root)
            self.alive_id = None if isinstance(file, Unavailable) or os.path.islink(path) else file
        if held is not None and self.alive_id is not None and self.alive_id in held:
            return Liveness.ALIVE, held[self.alive_id]
        if self._state.exited:
            return Liveness.EXITED, None
        if self._dead:
            return Liveness.DEAD, None
        # Not listed may also mean held in a PID namespace that is not below ours: then only the lock itself tells.
        answer = is_held(self.worker.path, self._proc_root)
        if isinstance(answer, Unavailable):
            notes.append(f"alive: {answer.reason}")
            return Liveness.UNKNOWN, None
        # A worker locks its file right after it made its directory; until then it only looks dead.
        self._dead = not answer and time.time_ns() - self._began_ns > GRACE_SECONDS * NS_PER_S
        return (Liveness.ALIVE if answer else Liveness.DEAD), None

    def _written(self, now: int) -> int | None:
        """When the directory was last changed, on our clock: of a journal that says nothing."""
        try:
            changed = os.lstat(self.worker.path).st_mtime_ns
        except OSError:
            return None
        return now - max(0, time.time_ns() - changed)


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _role(value: Any) -> Role:
    try:
        return Role(value)
    except ValueError:
        return Role.WORKER
