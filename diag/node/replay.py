"""A node as it was: a snapshot put together from a copied run directory, as of any moment that its journals reach back to.

Owns the folding of worker journals up to a moment, and the join with what the node's agent recorded. Promises the same snapshot for a copy
as for the original, journals treated as untrusted throughout, and to say what is missing: without an agent's journal there is no verdict,
only the note that nobody judged. Refuses to look at this machine: liveness is `recorded`, and no pid is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from diag.analysis.stall import Verdict
from diag.node import recorded
from diag.node.snapshot import NodeSnapshot, RunDirectory, Worker
from hwr.outcomes import Liveness, Role, View
from hwr.telemetry.fold import apply
from hwr.telemetry.reader import JournalReader
from hwr.telemetry.rundir import WorkerDirectory, worker_directories
from hwr.telemetry.state import WorkerState
from hwr.units import printable

NOBODY_JUDGED: Final = "no agent recorded this run"
# An agent that lives writes at least once a minute how its collectors fare.
AGENT_SILENT_NS: Final = 120_000_000_000
_LABEL_CHARACTERS: Final = 64


class NothingRecorded(ValueError):
    """There is no journal below the directory, or none that reaches back to the moment."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What one journal says up to the moment."""

    place: WorkerDirectory
    state: WorkerState
    problem: str | None

    @property
    def name(self) -> str:
        return recorded.name_of(str(self.place.path))

    def res(self, key: str, kind: type[Any], otherwise: Any) -> Any:
        value = self.state.res.get(key)
        return value if type(value) is kind else otherwise


def moments(directory: Path) -> tuple[int, int]:
    """Return the first and the last moment (CLOCK_BOOTTIME) that the newest boot's journals below a directory tell of.

    Raises:
        NothingRecorded: there is no journal.
    """
    told, _ = _of_one_boot([_Told(place, *_read(place.path, None)) for place in worker_directories(directory)])
    first = [begin for one in told if (begin := _first_ns(one.place.path)) is not None]
    if not first:
        raise NothingRecorded(f"there is no journal below {printable(str(directory))}")
    last = max(one.state.last_ns for one in told)
    return min(*first, last), last


def replay(directory: Path, at_ns: int | None = None) -> NodeSnapshot:
    """Return the node as its journals have it at a moment (CLOCK_BOOTTIME), at the end if none is given.

    `directory` is a run directory, one run of it, or one worker's directory.

    Raises:
        NothingRecorded: there is no journal, or none that reaches back that far.
    """
    told, left_out = _of_one_boot([_Told(place, *_read(place.path, at_ns)) for place in worker_directories(directory)])
    if not told:
        raise NothingRecorded(f"no journal below {printable(str(directory))} reaches back to this moment")
    agents = [one for one in told if _role(one) is Role.AGENT]
    agent = max(agents, key=lambda one: (one.place.start_ns, one.state.last_ns), default=None)
    entries = agent.state.node if agent is not None else {}
    workers = tuple(_worker(one, agent) for one in told if _role(one) is not Role.AGENT)
    newest = max(told, key=lambda one: one.state.last_ns)
    node = recorded.built_node(entries)
    notes: list[str] = list(node.pop("unreadable"))
    if left_out:
        notes.append(f"journals of other boots are left out: {left_out}")
    taken_ns = newest.state.last_ns if at_ns is None else at_ns
    if agent is not None and taken_ns - agent.state.last_ns > AGENT_SILENT_NS:
        notes.append(f"the agent's journal ends {(taken_ns - agent.state.last_ns) // 1_000_000_000} s before this moment")
    parts = recorded.listed(entries)
    if not parts["run_directories"]:
        runs = len({one.place.run_id for one in told})
        parts["run_directories"] = (RunDirectory(path=printable(str(directory)), readable=True, runs=runs, workers=len(workers)),)
    facts = {
        "host": printable(newest.res("host.name", str, "")),
        "boot_id": newest.res("boot_id", str, None),
        "realtime_offset_ns": newest.res("clock.realtime_offset_ns", int, 0),
        **node,
    }
    return NodeSnapshot(
        view=View.REPLAY,
        taken_ns=taken_ns,
        workers=_named(workers),
        kernel=recorded.kernel(entries),
        unreadable=tuple(notes),
        **facts,
        **parts,
    )


def _read(path: Path, at_ns: int | None) -> tuple[WorkerState, str | None]:
    reader = JournalReader(path, from_start=at_ns is not None)
    try:
        if at_ns is None:
            state = reader.poll()
        else:
            state = WorkerState()
            for record in reader.records():
                if record["mono_ns"] > at_ns:
                    break
                apply(state, record)
    finally:
        reader.close()
    return state, None if reader.problem is None else reader.problem.reason


def _first_ns(path: Path) -> int | None:
    reader = JournalReader(path, from_start=True)
    records: Iterator[dict[str, Any]] = reader.records()
    try:
        return next((record["mono_ns"] for record in records), None)
    finally:
        reader.close()


def _of_one_boot(told: Sequence[_Told]) -> tuple[list[_Told], int]:
    """Return the journals of the boot that was written to last, and how many are of others: their clocks cannot be compared."""
    spoken = [one for one in told if one.state.res and one.state.last_ns]
    if not spoken:
        return [], 0
    newest = max(spoken, key=lambda one: one.state.last_ns + int(one.res("clock.realtime_offset_ns", int, 0)))
    boot = newest.res("boot_id", str, None)
    same = [one for one in spoken if one.res("boot_id", str, None) == boot]
    return same, len(spoken) - len(same)


def _role(one: _Told) -> Role:
    try:
        return Role(one.res("hwr.role", str, ""))
    except ValueError:  # a later version's
        return Role.TOOL


def _worker(one: _Told, agent: _Told | None) -> Worker:
    entries = agent.state.node if agent is not None else {}
    seen = entries.get("workers", {}).get(one.name, {})
    pid = _whole(seen.get("pid"))
    silent, beat = _whole(seen.get("silent_since_ns")), _whole(seen.get("heartbeat_ns"))
    engine = seen.get("engine")
    processes = recorded.processes({str(pid): entries.get("processes", {}).get(str(pid), {})}) if pid is not None else {}
    rank = one.res("hwr.rank", int, one.place.rank)
    return Worker(
        engine=printable(engine if isinstance(engine, str) else one.res("hwr.engine", str, "default"), _LABEL_CHARACTERS),
        rank=rank if 0 <= rank < 1 << 31 else one.place.rank,
        role=_role(one),
        run_id=printable(one.place.run_id),
        directory=printable(str(one.place.path)),
        ns_pid=one.place.pid,
        start_ns=one.place.start_ns,
        pid=pid,
        uid=_whole(seen.get("uid")),
        liveness=Liveness.RECORDED,
        state=one.state,
        verdict=_verdict(one, agent),
        heartbeat_ns=silent if silent is not None else beat,
        quiet_ns=one.state.last_ns,
        shown=seen.get("shown") is not False,
        process=processes.get(pid) if pid is not None else None,
        memory=recorded.memory(entries.get("memory", {}).get(one.name, {})),
        artifacts=recorded.uses(entries.get("uses", {}), one.name),
        notes=tuple(printable(note) for note in (*_texts(seen.get("notes")), *((one.problem,) if one.problem else ()))),
    )


def _verdict(one: _Told, agent: _Told | None) -> Verdict:
    if agent is None:
        return Verdict(evidence=(NOBODY_JUDGED,))
    told = agent.state.verdicts.get(one.name)
    if told is None:
        return Verdict()
    names = ("stall", "confidence", "evidence", "blames", "runbook", "since_ns")
    try:
        return msgspec.convert({name: told[name] for name in names if told.get(name) is not None}, Verdict)
    except (msgspec.ValidationError, TypeError):
        return Verdict(evidence=("the recorded verdict is not one",))


def _named(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Tell those apart that no agent did: two of a name that lived at one time are two engines, of two others the newer is shown."""
    taken: dict[tuple[str, int], Worker] = {}
    placed: list[Worker] = []
    for worker in sorted(workers, key=lambda worker: (worker.start_ns, worker.ns_pid)):
        if not worker.shown:
            placed.append(worker)
            continue
        name, number = worker.engine, 1
        while (holder := taken.get((name, worker.rank))) is not None and (holder.quiet_ns or 0) > worker.start_ns:
            number += 1
            name = f"{worker.engine}-{number}"
        if holder is not None:
            placed[placed.index(holder)] = replace(holder, shown=False)
        taken[name, worker.rank] = placed_worker = replace(worker, engine=name)
        placed.append(placed_worker)
    return tuple(sorted(placed, key=lambda worker: (worker.engine, worker.rank, worker.start_ns)))


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
