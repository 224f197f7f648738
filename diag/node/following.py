"""One worker's directory, followed: what its journal says, and whether its process lives.

Owns one journal's reader and one alive file. Promises states that nobody changes once they are handed out, that a process which is gone is
not read again, and a reason in `notes` for whatever could not be known. Refuses (N4) to follow links, to wait for a FIFO, to believe a file
that is not its directory's owner's, and to touch the lock of a worker that is just starting.

A directory's name is what the writer's own code made of its rank, pid and start: it counts, and a journal that says otherwise is noted.
"""

from __future__ import annotations

import os
import pickle
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diag.node.pids import TICK_NS, Pids, Writer
from hwr.errors import Unavailable, errno_text
from hwr.outcomes import Liveness, Role
from hwr.procfs.file_id import FileId
from hwr.telemetry.alive import Beat, is_locked, read_beat
from hwr.telemetry.reader import JournalReader
from hwr.telemetry.rundir import ALIVE, GRACE_SECONDS, WorkerDirectory
from hwr.telemetry.state import WorkerState
from hwr.units import NS_PER_S, one_line, printable

_LABEL_CHARACTERS: Final = 64
_RUN_CHARACTERS: Final = 200

# By file, who holds it exclusively; None is a table that cannot be read.
Held = Mapping[FileId, int | None] | None


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


class FileIds:
    """What the kernel's tables call the files of one run directory: their mounts are asked for once a device, not once a file."""

    def __init__(self, proc_root: Path) -> None:
        self._proc_root = proc_root
        self._devices: dict[int, tuple[int, int]] = {}

    def id_of(self, path: Path, facts: os.stat_result) -> FileId | None:
        known = self._devices.get(facts.st_dev)
        if known is None:
            told = FileId.in_tables(path, self._proc_root)
            if isinstance(told, Unavailable):
                return None
            known = self._devices[facts.st_dev] = (told.major, told.minor)
        return FileId(*known, facts.st_ino)


class Followed:
    """One worker's directory and its open journal."""

    def __init__(self, worker: WorkerDirectory, files: FileIds) -> None:
        self.worker = worker
        self.other_boot = False
        self.behind = True  # nothing was read yet
        self.taken = 0
        self.alive_id: FileId | None = None
        self._files = files
        self._facts = self._stat()
        self._reader = JournalReader(worker.path)
        self._state = WorkerState()
        self._gone = False
        self._last: Seen | None = None  # what is to be said of one that is gone, once nothing was left to read

    def close(self) -> None:
        self._reader.close()

    def writer(self) -> Writer:
        namespace = _whole(self._state.res.get("pid_ns"))
        return Writer(ns_pid=self.worker.pid, start_ns=self.worker.start_ns, namespace=namespace)

    def replaced(self) -> bool:
        """Whether to begin anew: the directory or its journal was taken away and back, or one that was gone writes again."""
        if self._reader.vanished:
            return True
        before, self._facts = self._facts, self._stat()
        now = self._facts
        if before is None or now is None:
            return False
        again = self._last is not None and before.st_mtime_ns != now.st_mtime_ns
        return again or (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino)

    def silent_ns(self) -> int:
        """For how long nothing was written, by the files' own times; 0 if they are not told."""
        newest = 0
        try:
            with os.scandir(self.worker.path) as entries:
                newest = max((entry.stat(follow_symlinks=False).st_mtime_ns for entry in entries), default=0)
        except OSError:
            return 0
        return max(0, time.time_ns() - max(newest, self._facts.st_mtime_ns if self._facts is not None else 0))

    def is_held(self, held: Held) -> bool:
        """Say whether somebody holds the lock, of a directory that is too old for a start."""
        notes: list[str] = []
        if self._find_alive(notes) is None:
            return False
        return (held is not None and self.alive_id in held) or is_locked(self.worker.path) is True

    def look(self, held: Held, pids: Pids, now: int, boot: str | Unavailable, limit_bytes: int) -> Seen:
        if self._last is not None and (held is None or self.alive_id not in held):
            self.taken = 0
            return self._last
        notes: list[str] = []
        was_gone, self._last = self._gone, None
        self._fold(notes, limit_bytes)
        state, worker = self._state, self.worker
        beat = read_beat(worker.path)
        heartbeat = beat.mono_ns if isinstance(beat, Beat) and 0 < beat.mono_ns <= now + NS_PER_S else None
        last = state.last_ns if 0 < state.last_ns <= now + NS_PER_S else None
        liveness, holder = self._liveness(held, isinstance(beat, Beat), notes)
        quiet = max((each for each in (heartbeat, last) if each is not None), default=None)
        if quiet is None:
            quiet = self._written(now)
        told_boot = state.res.get("boot_id", boot)
        long_ago = liveness is not Liveness.ALIVE and quiet is not None and quiet < 0  # before the node started
        self.other_boot = (isinstance(boot, str) and told_boot != boot) or worker.start_ns > now + TICK_NS or long_ago
        pid: int | None = None
        if liveness is Liveness.ALIVE:
            translated = pids.of(self.writer(), holder, now)
            if isinstance(translated, Unavailable):
                notes.append(translated.reason)
            else:
                pid = translated
        for key, named in (("hwr.rank", worker.rank), ("process.pid", worker.pid), ("hwr.run_id", worker.run_id)):
            told = state.res.get(key, named)
            if told != named:
                notes.append(f"its journal says {key} {printable(str(told), _LABEL_CHARACTERS)}, its directory {named}")
        seen = Seen(
            directory=worker.path,
            run_id=printable(worker.run_id, _RUN_CHARACTERS),
            rank=worker.rank,
            role=_role(state.res.get("hwr.role")),
            engine=_engine(state.res.get("hwr.engine")),
            ns_pid=worker.pid,
            start_ns=worker.start_ns,
            pid=pid,
            uid=None if self._facts is None else self._facts.st_uid,
            liveness=liveness,
            heartbeat_ns=heartbeat,
            quiet_ns=quiet,
            state=state,
            roots=tuple(state.roots),
            notes=tuple(dict.fromkeys(one_line(note) for note in notes)),
        )
        if was_gone and self._gone and not self.taken and not self.behind:
            self._last = seen
            self._reader.close()
        return seen

    def _fold(self, notes: list[str], limit_bytes: int) -> None:
        """Read what is new, at most so much of it, and copy the state if there was anything: copying costs more than looking."""
        before = self._reader.taken_bytes
        try:
            told = self._reader.poll(limit_bytes)
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            notes.append(f"journal: {type(error).__name__}: {error}")
            told = self._reader.state
        self.behind, self.taken = self._reader.behind, self._reader.taken_bytes - before
        if self.taken:
            # Four times as fast as deepcopy, and it is done once a second for every worker that writes; nothing of it leaves this process.
            self._state = pickle.loads(pickle.dumps(told, pickle.HIGHEST_PROTOCOL))
        if self.behind:
            notes.append("a long journal is still being read")
        if self._reader.problem is not None:
            notes.append(f"journal: {self._reader.problem.reason}")
        if self._state.malformed:
            notes.append(f"journal: {self._state.malformed} malformed lines or events")

    def _liveness(self, held: Held, beats: bool, notes: list[str]) -> tuple[Liveness, int | None]:
        if self.alive_id is None:
            self._find_alive(notes)
        if held is not None and self.alive_id is not None and self.alive_id in held:
            self._gone = False
            return Liveness.ALIVE, held[self.alive_id]
        if self._state.exited:
            self._gone = True
            return Liveness.EXITED, None
        if self._gone:
            return Liveness.DEAD, None
        if not beats and self.silent_ns() < GRACE_SECONDS * NS_PER_S:
            notes.append("alive: no beat was written yet")
            return Liveness.UNKNOWN, None  # it makes its directory, takes its lock and beats: in between it only looks dead
        if self.alive_id is None:
            return Liveness.UNKNOWN, None
        # Not listed may also mean held in a PID namespace that is not below ours: then only the lock itself tells.
        answer = is_locked(self.worker.path)
        if isinstance(answer, Unavailable):
            notes.append(f"alive: {answer.reason}")
            return Liveness.UNKNOWN, None
        self._gone = not answer
        return (Liveness.ALIVE if answer else Liveness.DEAD), None

    def _find_alive(self, notes: list[str]) -> FileId | None:
        path = self.worker.path / ALIVE
        try:
            facts = os.lstat(path)
        except OSError as error:
            notes.append(f"alive: {errno_text(error)}")
            return None
        if not stat.S_ISREG(facts.st_mode) or self._facts is None or facts.st_uid != self._facts.st_uid:
            notes.append("alive: it is not a regular file of its directory's owner")
            return None
        self.alive_id = self._files.id_of(path, facts)
        return self.alive_id

    def _written(self, now: int) -> int | None:
        """When the directory was last changed, on our clock: of a journal that says nothing."""
        return None if self._facts is None else now - max(0, time.time_ns() - self._facts.st_mtime_ns)

    def _stat(self) -> os.stat_result | None:
        try:
            return os.lstat(self.worker.path)
        except OSError:
            return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _engine(value: Any) -> str:
    return printable(value, _LABEL_CHARACTERS) if type(value) is str else "default"


def _role(value: Any) -> Role:
    try:
        return Role(value)
    except ValueError:
        return Role.WORKER
