"""What `/livez`, `/readyz` and `/startupz` say.

Owns their texts and statuses, as pure functions of a snapshot. Promises plain JSON values in which every string is printable and what is
not known is null, with ages as of the moment of the question. Refuses to look at anything, and to give up a worker that moves
(`health_probe` has the table).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from diag.node.health_probe import Peers, given_up, held_up_seconds
from diag.node.snapshot import CollectorHealth, NodeSnapshot, RunDirectory, Worker
from hwr.outcomes import CollectorName, Liveness, Role, Stall
from hwr.telemetry.state import OpenOperation
from hwr.units import NS_PER_S, printable, seconds_text

STARTUP_VERSION: Final = 1
# The agent looks once a second. A node that swaps or is suspended makes it late; half a minute is more than that, and still soon.
ALIVE_SECONDS: Final = 30.0

# Roles that have a rank of their own; an agent's journal lies in the same directories.
_RANKED: Final = frozenset({Role.WORKER, Role.TOOL})
_WAITING: Final = frozenset({Stall.LOCK_WAIT, Stall.COLLECTIVE_WAIT})
_SLOW: Final = frozenset({Stall.COMPACTION, Stall.COLD_CACHE, Stall.RECLAIM})
_MAX_DEPTH: Final = 6


@dataclass(frozen=True, slots=True)
class Health:
    """Whether it is well, and one line about it."""

    ok: bool
    text: str


def alive(looked_ns: int, now_ns: int, problem: str | None) -> Health:
    """Say whether the agent itself does its second's work; `looked_ns` is when it last did, or began."""
    age_seconds = max(0.0, (now_ns - looked_ns) / NS_PER_S)
    said = "" if problem is None else f"; {printable(problem)}"
    return Health(age_seconds <= ALIVE_SECONDS, f"looked {seconds_text(age_seconds)} ago{said}")


def ready(snapshot: NodeSnapshot | None) -> Health:
    """Say whether every part has been looked at once, or is known to hang.

    Stores are left out: journals name new ones at any time, and what was ready stays so.
    """
    if snapshot is None:
        return Health(False, "no look has ended yet")
    pending = sorted({one.name.value for one in snapshot.collectors if one.name is not CollectorName.STORE and _pending(one, snapshot)})
    if pending:
        return Health(False, f"waiting for {', '.join(pending)}")
    failing = sorted({one.name.value for one in snapshot.collectors if not one.ok})
    return Health(True, f"ready; failing: {', '.join(failing)}" if failing else "ready")


def _pending(one: CollectorHealth, snapshot: NodeSnapshot) -> bool:
    if one.seconds is not None or one.sampled_ns is not None:
        return False
    if one.running_since_ns is None or one.deadline_seconds is None:
        return True
    return (snapshot.taken_ns - one.running_since_ns) / NS_PER_S <= one.deadline_seconds


def startup(
    snapshot: NodeSnapshot, rank: int | None = None, engine: str | None = None, *, now_ns: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of `/startupz`.

    Without `rank` the status is 200. With it: 404 if no worker of that rank (and engine) is known, 503 if one of them should be given
    up, else 200.
    """
    now = snapshot.taken_ns if now_ns is None else now_ns
    workers = _asked_for(snapshot.workers, rank, engine)
    peers = Peers(snapshot.workers)
    ranks = [_rank(worker, peers, now) for worker in workers]
    body: dict[str, Any] = {
        "version": STARTUP_VERSION,
        "agent": {
            "version": printable(snapshot.program_version),
            "pid": snapshot.pid,
            "host": printable(snapshot.host),
            "uptime_seconds": _age(snapshot.started_ns or None, now),
            "snapshot_age_seconds": _age(snapshot.taken_ns, now),
        },
        "run_directories": [_directory(one) for one in snapshot.run_directories],
        "stores": [{"root": printable(one.root), "reporting": one.reporting, "problem": _text(one.problem)} for one in snapshot.stores],
        "collectors": [_collector(one, now) for one in snapshot.collectors],
        "unreadable": [printable(line) for line in snapshot.unreadable],
        "ranks": ranks,
    }
    if rank is None:
        return HTTPStatus.OK, body
    if not ranks:
        of_engine = "" if engine is None else f" of engine {printable(engine, 100)}"
        known = sorted({worker.name for worker in snapshot.workers if worker.role in _RANKED})
        said = ", ".join(map(printable, known)) or "none"
        return HTTPStatus.NOT_FOUND, {**body, "problem": f"no worker with rank {rank}{of_engine} is known; known: {said}"}
    gone = [f"{one['engine']}/{one['rank']}: {one['stall']['given_up']}" for one in ranks if one["stall"]["given_up"] is not None]
    if gone:
        return HTTPStatus.SERVICE_UNAVAILABLE, {**body, "problem": "; ".join(gone)}
    return HTTPStatus.OK, body


def _asked_for(workers: Iterable[Worker], rank: int | None, engine: str | None) -> list[Worker]:
    """Return those of the rank and engine; of one name, one that a newer process has replaced does not count."""
    chosen = [
        worker
        for worker in workers
        if worker.role in _RANKED and (rank is None or worker.rank == rank) and (engine is None or worker.engine == engine)
    ]
    if rank is None:  # of the dead, those whose place nobody has taken: a rank that was restarted fifty times is one rank
        return [worker for worker in chosen if worker.shown or worker.liveness not in (Liveness.DEAD, Liveness.EXITED)]
    # A tool that took a rank's number for a moment is not that rank, unless there is nobody else.
    workers_only = [worker for worker in chosen if worker.role is Role.WORKER] or chosen
    named = {worker.name for worker in workers_only if worker.shown}
    return [worker for worker in workers_only if worker.shown or worker.name not in named]


def _rank(worker: Worker, peers: Peers, now_ns: int) -> dict[str, Any]:
    state, verdict = worker.state, worker.verdict
    reason = given_up(worker, peers, now_ns)
    failure = state.last_failure
    return {
        "engine": printable(worker.engine),
        "rank": worker.rank,
        "role": worker.role.value,
        "run_id": printable(worker.run_id),
        "pid": worker.pid,
        "ns_pid": worker.ns_pid,
        "uid": worker.uid,
        "replaced": not worker.shown,
        "liveness": worker.liveness.value,
        "phase": state.phase().value,
        "state": _word(worker, reason),
        "operation": _operation(state.current_operation(), now_ns),
        "progress_age_seconds": _age(state.progress_ns, now_ns),
        "heartbeat_age_seconds": _age(worker.heartbeat_ns, now_ns),
        "stall": {
            "class": verdict.stall.value,
            "confidence": verdict.confidence.value,
            "for_seconds": _seconds(held_up_seconds(worker, now_ns)),
            "given_up": _text(reason),
            "evidence": [printable(line) for line in verdict.evidence],
            "blames": [printable(name) for name in verdict.blames],
            "runbook": printable(verdict.runbook) or None,
        },
        "last_event": None
        if state.last_event is None
        else {"name": printable(state.last_event), "age_seconds": _age(state.last_ns, now_ns)},
        "transport": printable(state.transport),
        "transport_reason": _text(state.transport_reason),
        "last_failure": None if failure is None else {**_clean(failure), "age_seconds": _age_of(failure.get("mono_ns"), now_ns)},
        "notes": [printable(note) for note in worker.notes],
    }


def _word(worker: Worker, reason: str | None) -> str:
    """Say in one word how it is, as a person would."""
    if worker.liveness is Liveness.EXITED:
        return "exited"
    if worker.liveness is Liveness.DEAD:
        return "dead"
    if reason is not None:
        return "stuck"
    stall = worker.verdict.stall
    if stall in _WAITING:
        return "waiting"
    if stall in _SLOW:
        return "slow"
    if stall is Stall.STOPPED:
        return "stopped"
    if stall not in (Stall.NONE, Stall.PIN_ADVANCING):
        return "stalled"
    return worker.state.phase().value


def _operation(operation: OpenOperation | None, now_ns: int) -> dict[str, Any] | None:
    if operation is None:
        return None
    planned, done = operation.planned_bytes, operation.done_bytes
    deadline = operation.deadline_ns
    return {
        "name": _text(operation.operation),
        "event": printable(operation.event),
        "age_seconds": _age(operation.begun_ns, now_ns),
        "deadline_seconds_left": None if deadline is None else _seconds((deadline - now_ns) / NS_PER_S),
        "planned_bytes": planned,
        "done_bytes": done,
        "share": round(min(1.0, max(0.0, done / planned)), 4) if planned and done is not None else None,
        "progress_age_seconds": _age(operation.progress_ns, now_ns),
    }


def _directory(one: RunDirectory) -> dict[str, Any]:
    return {
        "path": printable(one.path),
        "readable": one.readable,
        "problem": _text(one.problem),
        "runs": one.runs,
        "workers": one.workers,
        "strangers": one.strangers,
    }


def _collector(one: CollectorHealth, now_ns: int) -> dict[str, Any]:
    return {
        "name": one.name.value,
        "target": printable(one.target) or None,
        "ok": one.ok,
        "problem": _text(one.problem),
        "age_seconds": _age(one.sampled_ns, now_ns),
        "cost_seconds": None if one.seconds is None else round(one.seconds, 6),
        "running_seconds": _age(one.running_since_ns, now_ns),
        "deadline_seconds": one.deadline_seconds,
    }


def _text(text: str | None) -> str | None:
    return None if text is None else printable(text)


def _age(then_ns: int | None, now_ns: int) -> float | None:
    """Return the age of a moment; a journal may claim one that is yet to come, which is no age below 0."""
    return None if then_ns is None else _seconds(max(0, now_ns - then_ns) / NS_PER_S)


def _age_of(then_ns: Any, now_ns: int) -> float | None:
    return _age(then_ns, now_ns) if type(then_ns) is int else None


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _clean(value: Any, depth: int = 0) -> Any:
    """Return plain JSON of what a journal says; NaN and what lies too deep become null."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {printable(str(key)): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, depth + 1) for item in value]
    return None
