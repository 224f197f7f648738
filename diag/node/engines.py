"""Which engine and rank a process is shown as.

Owns the names: that of the journal, with a number where a second living process has the same engine and rank. Promises that a name stays
for a process's life, that no (engine, rank) is shown twice, that a new process takes a dead one's place at once, and the same names after
a restart of the reader: they are given in the order in which the processes started. Refuses more than eight names: the rest is `other`.

A tool (`hwr publish`) never takes a worker's place: it is shown where nobody works under its engine and rank. An agent is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diag.node.runs import Seen
from hwr.outcomes import Liveness, Role
from hwr.units import printable

MAX_ENGINES: Final = 8
OTHER: Final = "other"
DEFAULT: Final = "default"
_CHARACTERS: Final = 64

_Slot = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine's name for views, and whether this process is the one that its rank shows."""

    engine: str
    shown: bool


class EngineNames:
    """Gives names, and remembers them."""

    def __init__(self) -> None:
        self._given: dict[Path, str] = {}

    def assign(self, workers: Sequence[Seen]) -> dict[Path, Placed]:
        """Return the place of each process."""
        present = {worker.directory for worker in workers}
        self._given = {path: name for path, name in self._given.items() if path in present}
        ordered = sorted(workers, key=lambda worker: (worker.role is not Role.WORKER, worker.start_ns, worker.ns_pid))
        holders: dict[_Slot, Seen] = {}
        runs: dict[tuple[str, str], str] = {}
        for worker in ordered:  # those who have a name keep it
            name = self._given.get(worker.directory)
            if name is not None and worker.role is not Role.AGENT:
                self._hold(holders, (name, worker.rank), worker)
                runs.setdefault((worker.run_id, _engine(worker)), name)
        for worker in ordered:
            if worker.role is Role.AGENT or worker.directory in self._given:
                continue
            name = self._choose(worker, holders, runs)
            self._given[worker.directory] = name
            runs.setdefault((worker.run_id, _engine(worker)), name)
            self._hold(holders, (name, worker.rank), worker)
        return {
            worker.directory: Placed(
                engine=self._given.get(worker.directory, _engine(worker)),
                shown=worker.role is not Role.AGENT and holders[(self._given[worker.directory], worker.rank)] is worker,
            )
            for worker in workers
        }

    def _choose(self, worker: Seen, holders: dict[_Slot, Seen], runs: dict[tuple[str, str], str]) -> str:
        engine = _engine(worker)
        if worker.role is Role.TOOL or worker.liveness is not Liveness.ALIVE:
            return engine if self._may_use(engine) else OTHER
        of_its_run = runs.get((worker.run_id, engine))
        numbered = (engine, *(f"{engine}-{number}" for number in range(2, MAX_ENGINES + 2)))
        for name in (of_its_run, *numbered) if of_its_run else numbered:
            held = holders.get((name, worker.rank))
            free = held is None or held.liveness is not Liveness.ALIVE or held.role is not Role.WORKER
            if free and self._may_use(name):
                return name
        return OTHER

    def _may_use(self, name: str) -> bool:
        in_use = set(self._given.values()) - {OTHER}
        return name in in_use or len(in_use) < MAX_ENGINES

    @staticmethod
    def _hold(holders: dict[_Slot, Seen], slot: _Slot, worker: Seen) -> None:
        held = holders.get(slot)
        if held is None or _claim(worker) >= _claim(held):
            holders[slot] = worker


def _claim(worker: Seen) -> tuple[bool, bool, int, int]:
    """Order claims to one place: workers before tools, the living before the dead, the later started before the earlier."""
    return (worker.role is Role.WORKER, worker.liveness is Liveness.ALIVE, worker.start_ns, worker.ns_pid)


def _engine(worker: Seen) -> str:
    return printable(worker.engine.strip(), _CHARACTERS) or DEFAULT
