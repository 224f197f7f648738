"""The names below a run directory: which runs, and which workers' directories in them.

Owns the listing and what of it is looked at again. Promises that a second's work does not grow with what lies there: a run is listed again
when its time of change says that something came or went, and runs in which nobody is followed are asked for that time in turns. What is
no worker's directory is counted, not opened. Refuses to follow links inside, and one in the directory's own place unless it is ours or
root's.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import errno_text
from hwr.telemetry.rundir import WorkerDirectory, parse_worker_directory
from hwr.units import NS_PER_S, printable

ABSENT: Final = "it does not exist"
# Runs in which nobody is followed that are looked at a time: a worker that joins one of thousands of old runs is found within a minute.
QUIET_RUNS_AT_ONCE: Final = 128
# What an agent itself puts there: where it listens, its sums, its locks, and files that are not renamed yet.
_OURS: Final = ("agent.", "reporter.", ".")
# Linux numbers processes up to 2^22; ranks are told with nine digits at most; a time is a 64-bit number with a sign.
_PIDS: Final = 1 << 22
_RANKS: Final = 10**9
_TIMES: Final = 1 << 63


@dataclass(slots=True)
class _Run:
    """A run as it was listed; `changed_ns` 0 asks for another listing."""

    changed_ns: int
    workers: tuple[WorkerDirectory, ...] = ()
    strangers: int = 0
    problem: str | None = None


class RunListing:
    """Lists one run directory, or a run's, or a worker's own; `update` is called about once a second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readable = False
        self._runs: dict[str, _Run] = {}
        self._strangers = 0
        self._turn = 0
        self._present: dict[Path, WorkerDirectory] = {}

    @property
    def workers(self) -> dict[Path, WorkerDirectory]:
        """The workers' directories by path."""
        return self._present

    @property
    def strangers(self) -> int:
        """How many entries are no worker's directory, no run, and nothing of an agent's."""
        return self._strangers + sum(run.strangers for run in self._runs.values())

    def update(self, lively: Collection[str]) -> str | None:
        """Bring the listing up to date; return what could not be listed. `lively`: names of the runs in which somebody is followed."""
        try:
            listed = self._list()
        except OSError as error:
            self.readable = False
            self._runs, self._strangers, self._present = {}, 0, {}
            return _why(error)
        self.readable = True
        if self._list_runs(listed, lively):
            self._present = {worker.path: worker for run in self._runs.values() for worker in run.workers}
            own = _worker(self.path)
            if own is not None:
                self._present[own.path] = own
        problems = [run.problem for run in self._runs.values() if run.problem is not None]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return problems[0] + more if problems else None

    def _list(self) -> dict[str, bool]:
        """Return the names, and which are directories.

        Raises:
            OSError: it cannot be listed.
        """
        facts = os.lstat(self.path)
        if stat.S_ISLNK(facts.st_mode) and facts.st_uid not in (0, os.geteuid()):
            raise NotADirectoryError(errno.ENOTDIR, "a link that belongs to another user")
        with os.scandir(self.path) as entries:
            return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}

    def _list_runs(self, listed: dict[str, bool], lively: Collection[str]) -> bool:
        """Update the runs; return whether a worker's directory may have come or gone."""
        gone = self._runs.keys() - {name for name, is_directory in listed.items() if is_directory}
        for name in gone:
            del self._runs[name]
        if _worker(self.path) is None:
            self._strangers = sum(1 for name, is_directory in listed.items() if not is_directory and not name.startswith(_OURS))
        runs = [name for name, is_directory in listed.items() if is_directory]
        changed = [self._list_run(name) for name in self._due(runs, lively)]
        return bool(gone) or any(changed) or not self._present

    def _due(self, runs: list[str], lively: Collection[str]) -> Iterator[str]:
        """Yield the runs to look at: new ones, those where somebody is followed, and some of the quiet ones."""
        quiet: list[str] = []
        for name in runs:
            if name in self._runs and name not in lively:
                quiet.append(name)
            else:
                yield name
        quiet.sort()
        for offset in range(min(QUIET_RUNS_AT_ONCE, len(quiet))):
            yield quiet[(self._turn + offset) % len(quiet)]
        self._turn += QUIET_RUNS_AT_ONCE

    def _list_run(self, name: str) -> bool:
        """Look at one run; return whether it was listed anew."""
        path = self.path / name
        known = self._runs.get(name)
        try:
            changed = os.lstat(path).st_mtime_ns
            if known is not None and known.changed_ns == changed:
                return False
            with os.scandir(path) as entries:
                listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            kept = known.workers if known is not None and not gone else ()
            self._runs[name] = _Run(0, kept, problem=None if gone else f"{printable(name, 200)}: {errno_text(error)}")
            return known is None or known.workers != kept
        own = _worker(path)  # the directory of one run was given: what lies in here is a worker's own
        told = [own] if own is not None else [_worker(path / inner) if is_directory else None for inner, is_directory in listed]
        found = tuple(worker for worker in told if worker is not None)
        strangers = len(told) - len(found)
        # A directory that changed within the last tick of the clock may change again and keep its time: once more, next time.
        settled = abs(time.time_ns() - changed) > NS_PER_S
        self._runs[name] = _Run(changed if settled else 0, found, strangers)
        return known is None or known.workers != found


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return ABSENT
    if isinstance(error, NotADirectoryError):
        return f"it is no directory: {error.strerror}"
    return errno_text(error)


def _worker(path: Path) -> WorkerDirectory | None:
    """Take a path for a worker's, unless its numbers are none that a kernel gives."""
    worker = parse_worker_directory(path)
    sane = worker is not None and worker.rank < _RANKS and worker.pid <= _PIDS and worker.start_ns < _TIMES
    return worker if sane else None
