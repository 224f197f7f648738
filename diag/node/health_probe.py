"""When a liveness probe should give a worker up.

Owns the table from stall classes to the answer of `/startupz?rank=N`. Promises one rule a class, and that what moves, however slowly, is
never given up: killing a worker that registers, pages in or waits its turn makes the next start slower. Refuses to judge what holds a
worker up: that is the verdict's part.

| stall | given up |
|---|---|
| none, pin_advancing, compaction, cold_cache, reclaim | never |
| dead | at once |
| stopped, pin_stuck, gil_held, mmap_lock_held | after 60 s, or past the operation's deadline |
| driver_poll, unknown | after 600 s, or past the operation's deadline |
| lock_wait, collective_wait | past the operation's deadline; after 60 s if whoever it waits for is dead, given up, or waits for it |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from diag.node.snapshot import Worker
from hwr.outcomes import Liveness, Stall
from hwr.units import NS_PER_S, seconds_text

GRACE_SECONDS: Final = 60.0
# What has no explanation, and a driver that is asked again and again, have been seen to take as long as a start's own deadline.
PATIENT_SECONDS: Final = 600.0
# A worker ends an operation at its deadline itself, and needs a moment to do so.
DEADLINE_MARGIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRule:
    """When a worker of one stall class is given up. `after_seconds` counts from the verdict's `since_ns`; None is never by time alone.

    With `if_blamed` the time counts only if who is waited for is dead, given up, or waits in turn. `past_deadline`: also when the deadline
    of its operation has passed.
    """

    why: str
    after_seconds: float | None = None
    past_deadline: bool = False
    if_blamed: bool = False


_MOVES: Final = ProbeRule(why="it moves; a restart would begin again")
_STANDS: Final = ProbeRule(why="nothing moves while this lasts", after_seconds=GRACE_SECONDS, past_deadline=True)
_PATIENT: Final = ProbeRule(why="it may still come to an end by itself", after_seconds=PATIENT_SECONDS, past_deadline=True)
_WAITS: Final = ProbeRule(
    why="it is well, and moves when the one that it waits for does", after_seconds=GRACE_SECONDS, past_deadline=True, if_blamed=True
)

PROBE_RULES: Final[Mapping[Stall, ProbeRule]] = {
    Stall.NONE: _MOVES,
    Stall.PIN_ADVANCING: _MOVES,
    Stall.COMPACTION: _MOVES,
    Stall.COLD_CACHE: _MOVES,
    Stall.RECLAIM: _MOVES,
    Stall.DEAD: ProbeRule(why="its process is gone", after_seconds=0.0),
    Stall.STOPPED: _STANDS,
    Stall.PIN_STUCK: _STANDS,
    Stall.GIL_HELD: _STANDS,
    Stall.MMAP_LOCK_HELD: _STANDS,
    Stall.DRIVER_POLL: _PATIENT,
    Stall.UNKNOWN: _PATIENT,
    Stall.LOCK_WAIT: _WAITS,
    Stall.COLLECTIVE_WAIT: _WAITS,
}


class Peers:
    """The workers of one snapshot, found by what a verdict calls them: `engine/rank`, or `pid N`."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._by_name: dict[str, Worker] = {}
        for worker in workers:
            if worker.shown or worker.name not in self._by_name:
                self._by_name[worker.name] = worker
            if worker.pid is not None:
                self._by_name.setdefault(f"pid {worker.pid}", worker)

    def find(self, name: str) -> Worker | None:
        """Return the worker, or None for one that this node does not see."""
        return self._by_name.get(name)


def given_up(worker: Worker, peers: Peers, now_ns: int) -> str | None:
    """Say why a probe should give this worker up, or None."""
    return _given_up(worker, peers, now_ns, frozenset())


def _given_up(worker: Worker, peers: Peers, now_ns: int, waiting: frozenset[str]) -> str | None:
    if worker.liveness is Liveness.EXITED:  # it said goodbye: whoever started it knows
        return None
    if worker.liveness is Liveness.DEAD:
        return "its process is gone"
    verdict = worker.verdict
    rule = PROBE_RULES.get(verdict.stall, _PATIENT)
    if rule.past_deadline:
        operation = worker.state.current_operation()
        if operation is not None and operation.deadline_ns is not None:
            over_seconds = (now_ns - operation.deadline_ns) / NS_PER_S
            if over_seconds > DEADLINE_MARGIN_SECONDS:
                return f"{verdict.stall}, {seconds_text(over_seconds)} past the deadline of {operation.operation}"
    if rule.after_seconds is None:
        return None
    held_seconds = held_up_seconds(worker, now_ns)
    if held_seconds is None or held_seconds < rule.after_seconds:
        return None
    held = f"{verdict.stall} for {seconds_text(held_seconds)}"
    if not rule.if_blamed:
        return held
    culprit = _culprit(worker, peers, now_ns, waiting | {worker.name})
    return None if culprit is None else f"{held}, and {culprit}"


def held_up_seconds(worker: Worker, now_ns: int) -> float | None:
    """Return for how long: since the evidence reaches back to, else since its last sign of progress; None if neither is known."""
    stall = worker.verdict.stall
    if stall is Stall.NONE:
        return None
    if stall is Stall.DEAD:
        since = worker.verdict.since_ns or worker.quiet_ns or now_ns
    else:
        since = worker.verdict.since_ns or worker.state.progress_ns or worker.state.last_ns
    return max(0.0, (now_ns - since) / NS_PER_S) if since else None


def _culprit(worker: Worker, peers: Peers, now_ns: int, waiting: frozenset[str]) -> str | None:
    for name in worker.verdict.blames:
        blamed = peers.find(name)
        if blamed is None:  # on another node, or no worker: nobody here can say that it stands
            continue
        if blamed.name in waiting:
            return f"{name} waits in turn"
        reason = _given_up(blamed, peers, now_ns, waiting)
        if reason is not None:
            return f"{name}: {reason}"
    return None
