"""Which engine and rank a process is shown as.

Owns the names: that of the journal, with a number where a second living process has the same engine and rank. Promises that a name stays
for a process's life, that no (engine, rank) is shown twice, that a new process takes a dead one's place at once, and names that follow from
who is there: they are given in the order in which the processes started, so that a restarted reader gives the same. Refuses more than
eight names: the rest is `other`, and of those only the newest of a rank is shown. A living worker that needs a name gets that of the dead.

A tool (`hwr publish`) never takes a worker's place: it is shown where nobody works under its engine and rank. Nor does a process whose
journal says nothing yet, or cannot be read: it may be any of them. An agent is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diag.node.following import Seen
from hwr.outcomes import Liveness, Role
from hwr.units import printable

MAX_ENGINES: Final = 8
OTHER: Final = "other"
DEFAULT: Final = "default"
# A label has 64; the number of a second engine of the name must not be cut off.
_CHARACTERS: Final = 60

_Slot = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine's name for views, and whether this process is the one that its rank shows."""

    engine: str
    shown: bool


@dataclass(frozen=True, slots=True)
class _Given:
    """A name, and what it was given for: a journal that tells its engine only now gets another."""

    name: str
    engine: str
    firm: bool


class EngineNames:
    """Gives names, and remembers them."""

    def __init__(self) -> None:
        self._given: dict[Path, _Given] = {}

    def assign(self, workers: Sequence[Seen]) -> dict[Path, Placed]:
        """Return the place of each process."""
        named = sorted((worker for worker in workers if worker.role is not Role.AGENT), key=_order)
        given = {worker.directory: self._given.get(worker.directory) for worker in named}
        self._given = {
            worker.directory: name
            for worker in named
            if (name := given[worker.directory]) is not None and (name.engine, name.firm) == (_engine(worker), _firm(worker))
        }
        places: dict[_Slot, Seen] = {}
        of_runs: dict[tuple[str, str], str] = {}
        for worker in named:  # those who have a name keep it
            if worker.directory in self._given:
                self._hold(worker, places, of_runs)
        for worker in named:
            if worker.directory not in self._given:
                chosen = self._choose(worker, named, places, of_runs)
                self._given[worker.directory] = _Given(chosen, _engine(worker), _firm(worker))
                self._hold(worker, places, of_runs)
        shown = {id(worker) for worker in places.values()}
        placed = {worker.directory: Placed(engine=_engine(worker), shown=False) for worker in workers}
        for worker in named:
            placed[worker.directory] = Placed(engine=self._given[worker.directory].name, shown=id(worker) in shown)
        return placed

    def _choose(self, worker: Seen, named: Sequence[Seen], places: dict[_Slot, Seen], of_runs: dict[tuple[str, str], str]) -> str:
        engine = _engine(worker)
        if engine == OTHER:
            return OTHER
        if not _firm(worker) or worker.liveness is not Liveness.ALIVE:
            return engine if self._in_use(engine) or self._has_room() else OTHER
        numbered = [engine, *(f"{engine}-{number}" for number in range(2, MAX_ENGINES + 1))]
        of_its_run = of_runs.get((worker.run_id, engine))
        for name in ([of_its_run] if of_its_run is not None else []) + numbered:
            held = places.get((name, worker.rank))
            free = held is None or held.liveness is not Liveness.ALIVE or not _firm(held)
            if free and (self._in_use(name) or self._has_room() or self._give_up_one(named, places)):
                return name
        return OTHER

    def _in_use(self, name: str) -> bool:
        return any(given.name == name for given in self._given.values())

    def _has_room(self) -> bool:
        return len({given.name for given in self._given.values()} - {OTHER}) < MAX_ENGINES

    def _give_up_one(self, named: Sequence[Seen], places: dict[_Slot, Seen]) -> bool:
        """Take the name that has been without a living worker, the one of the earliest start first, from those who have it."""
        users: dict[str, list[Seen]] = {}
        for worker in named:
            given = self._given.get(worker.directory)
            if given is not None and given.name != OTHER:
                users.setdefault(given.name, []).append(worker)
        for name, having in users.items():
            if any(_firm(worker) and worker.liveness is Liveness.ALIVE for worker in having):
                continue
            for worker in having:
                self._given[worker.directory] = _Given(OTHER, _engine(worker), _firm(worker))
                places.pop((name, worker.rank), None)
            for worker in having:
                self._hold(worker, places, {})
            return True
        return False

    def _hold(self, worker: Seen, places: dict[_Slot, Seen], of_runs: dict[tuple[str, str], str]) -> None:
        name = self._given[worker.directory].name
        if _firm(worker) and name != OTHER:
            of_runs.setdefault((worker.run_id, _engine(worker)), name)
        held = places.get((name, worker.rank))
        if held is None or _claim(worker) >= _claim(held):
            places[(name, worker.rank)] = worker


def _order(worker: Seen) -> tuple[bool, int, int]:
    return not _firm(worker), worker.start_ns, worker.ns_pid


def _firm(worker: Seen) -> bool:
    """Say whether it is known to be a worker."""
    return worker.role is Role.WORKER and bool(worker.state.res)


def _claim(worker: Seen) -> tuple[bool, bool, int, int]:
    """Order claims to one place: workers before others, the living before the dead, the later started before the earlier."""
    return _firm(worker), worker.liveness is Liveness.ALIVE, worker.start_ns, worker.ns_pid


def _engine(worker: Seen) -> str:
    return printable(worker.engine.strip(), _CHARACTERS) or DEFAULT
