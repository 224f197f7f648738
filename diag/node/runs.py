"""The processes that write journals below one run directory, followed.

Owns who is followed, and how much of their journals is read at a time. Promises that a second's work grows with what is new and not with
what lies there (directories of the long dead are looked at once, and not read), and that one worker's strange files cost only that worker.
Refuses to read more than its share at a time, and to show what another boot left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diag.node.following import FileIds, Followed, Held, Seen
from diag.node.pids import Pids
from diag.node.run_listing import RunListing
from diag.node.snapshot import RunDirectory
from hwr.errors import Unavailable
from hwr.outcomes import Liveness, Role
from hwr.procfs.file_id import FileId
from hwr.procfs.identity import read_boot_id
from hwr.procfs.locks import KernelLock, read_locks
from hwr.procfs.reading import PROC_ROOT
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.rundir import WorkerDirectory
from hwr.units import NS_PER_S, printable

__all__ = ["RunWatch", "RunsFound", "Seen"]

KEEP_DEAD_SECONDS: Final = 600.0
# Of one run directory: workers that are followed, the living first, then the newest; and new directories that are looked into at a time.
MAX_FOLLOWED: Final = 512
NEW_AT_ONCE: Final = 512
# Read of all journals at a time, shared by those that have more: half a second of a core. A longer journal goes on at the next look.
BYTES_AT_ONCE: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFound:
    """What one run directory holds."""

    directory: RunDirectory
    workers: tuple[Seen, ...]


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
        self._keep_ns, self._clock = int(keep_dead_seconds * NS_PER_S), clock
        self._proc_root = proc_root
        self._boot = read_boot_id(proc_root)
        self._listing = RunListing(path)
        self._pids = Pids(proc_root)
        self._files = FileIds(proc_root)
        self._followed: dict[Path, Followed] = {}
        # Directories that are looked at no more, and their alive files: a worker that was stopped for hours holds its lock all the same.
        self._past: set[Path] = set()
        self._past_files: dict[FileId, Path] = {}
        self._excess: set[Path] = set()  # beyond the number that is followed: looked at when there is room

    def collect(self) -> RunsFound:
        """Look once."""
        now = self._clock()
        problems = [self._listing.update({followed.worker.path.parent.name for followed in self._followed.values()})]
        held = self._held()
        present = self._listing.workers
        self._forget(present)
        for file in self._past_files.keys() & (held or {}).keys():
            self._past.discard(self._past_files.pop(file))
        known = (self._past, self._excess, self._followed)
        fresh = sorted((worker for path, worker in present.items() if not any(path in each for each in known)), key=_age)
        for worker in fresh[:NEW_AT_ONCE]:
            self._begin(worker, held)
        found = self._look(held, now)
        self._make_room(present, MAX_FOLLOWED - len(found))
        if len(fresh) > NEW_AT_ONCE:
            problems.append(f"{len(fresh) - NEW_AT_ONCE} more workers' directories are not looked into yet")
        if self._excess:
            problems.append(f"{len(self._excess)} more workers than the {MAX_FOLLOWED} that are followed")
        directory = RunDirectory(
            path=printable(str(self.path)),
            readable=self._listing.readable,
            problem="; ".join(problem for problem in problems if problem is not None) or None,
            runs=len({seen.run_id for seen in found if seen.role is not Role.AGENT}),
            workers=sum(1 for seen in found if seen.role is not Role.AGENT),
            strangers=self._listing.strangers,
        )
        return RunsFound(directory=directory, workers=tuple(found))

    def close(self) -> None:
        """Close every journal."""
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()

    def _held(self) -> Held:
        table = read_locks(self._proc_root)
        if isinstance(table, Unavailable):
            return None
        return {lock.file: lock.pid for lock in table if lock.file is not None and lock.kind is KernelLock.FLOCK and lock.exclusive}

    def _forget(self, present: Mapping[Path, WorkerDirectory]) -> None:
        for path in [path for path, followed in self._followed.items() if path not in present or followed.replaced()]:
            self._followed.pop(path).close()
        if len(self._past) > len(present):
            self._past &= present.keys()
            self._past_files = {file: path for file, path in self._past_files.items() if path in self._past}
        self._excess &= present.keys()

    def _make_room(self, present: Mapping[Path, WorkerDirectory], room: int) -> None:
        """Let the newest of those that were too many come next time."""
        if self._excess and room > 0:
            self._excess -= set(sorted(self._excess, key=lambda path: _age(present[path]))[:room])

    def _begin(self, worker: WorkerDirectory, held: Held) -> None:
        """Follow a new directory, unless nobody has written there for long and nobody holds its lock."""
        followed = Followed(worker, self._files)
        if followed.silent_ns() <= self._keep_ns or followed.is_held(held):
            self._followed[worker.path] = followed
        else:
            self._leave(followed)

    def _look(self, held: Held, now: int) -> list[Seen]:
        """Look at everybody who is followed; leave those whose time is over, and whoever is too many."""
        hungry = sum(1 for followed in self._followed.values() if followed.behind)
        share = BYTES_AT_ONCE // max(1, hungry)
        left = 2 * BYTES_AT_ONCE  # whoever has nothing more to read may still have had much since the last look
        seen: list[tuple[Seen, Followed]] = []
        for followed in list(self._followed.values()):
            one = followed.look(held, self._pids, now, self._boot, min(share, left))
            left -= followed.taken
            if followed.other_boot or self._is_over(one, followed, now):
                self._leave(followed)
            else:
                seen.append((one, followed))
        seen.sort(key=lambda pair: (pair[0].liveness is not Liveness.ALIVE, *_age(pair[1].worker)))
        for _, followed in seen[MAX_FOLLOWED:]:
            self._excess.add(followed.worker.path)
            self._followed.pop(followed.worker.path).close()
        return [one for one, _ in seen[:MAX_FOLLOWED]]

    def _leave(self, followed: Followed) -> None:
        path = followed.worker.path
        self._past.add(path)
        if followed.alive_id is not None and not followed.other_boot:
            self._past_files[followed.alive_id] = path
        followed.close()
        self._followed.pop(path, None)

    def _is_over(self, seen: Seen, followed: Followed, now: int) -> bool:
        if seen.liveness is Liveness.ALIVE or followed.behind:
            return False
        if seen.liveness is Liveness.UNKNOWN and self._pids.is_writer(seen.ns_pid, followed.writer()):
            return False  # not readable for us, and there all the same
        return seen.quiet_ns is None or now - seen.quiet_ns > self._keep_ns


def _age(worker: WorkerDirectory) -> tuple[int, int]:
    """Order the newest first."""
    return -worker.start_ns, -worker.pid
