"""Probes: what moves is left alone, what stands is given up in time, and what is not known is said to be unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import node_snapshots as made
import pytest

from diag.analysis.stall import Verdict
from diag.node import health_probe
from diag.node.health import ALIVE_SECONDS, alive, ready, startup
from diag.node.health_probe import DEADLINE_MARGIN_SECONDS, GRACE_SECONDS, PATIENT_SECONDS, PROBE_RULES
from diag.node.snapshot import CollectorHealth, NodeSnapshot, Worker
from hwr.outcomes import CollectorName, Confidence, Liveness, Role, Stall
from hwr.telemetry.state import OpenOperation, WorkerState

SECOND = 1_000_000_000
NOW = 10_000 * SECOND

NEVER = (Stall.NONE, Stall.PIN_ADVANCING, Stall.COMPACTION, Stall.COLD_CACHE, Stall.RECLAIM)
STANDING = (Stall.STOPPED, Stall.PIN_STUCK, Stall.GIL_HELD, Stall.MMAP_LOCK_HELD)
PATIENT = (Stall.DRIVER_POLL, Stall.UNKNOWN)
WAITING = (Stall.LOCK_WAIT, Stall.COLLECTIVE_WAIT)


def held_up(
    stall: Stall, seconds: float = 0.0, *, rank: int = 0, blames: tuple[str, ...] = (), over_seconds: float | None = None, **more: Any
) -> Worker:
    """Return a worker that is held up for so long, its operation so long past its deadline."""
    operation = OpenOperation(event="e", operation="lock", begun_ns=NOW - 20 * SECOND)
    operation.deadline_ns = None if over_seconds is None else NOW - int(over_seconds * SECOND)
    verdict = Verdict(stall=stall, since_ns=NOW - int(seconds * SECOND), blames=blames, evidence=("seen",), runbook="stall.md#x")
    one = made.worker(made.hub(rank), at_ns=NOW, verdict=verdict, state=WorkerState(ops={"o": operation}, last_ns=NOW - SECOND))
    return replace(one, **more)


def node(*workers: Worker) -> NodeSnapshot:
    return made.snapshot(workers, at_ns=NOW)


def status(*workers: Worker, rank: int = 0, engine: str | None = None) -> int:
    return startup(node(*workers), rank, engine)[0]


def test_every_class_has_a_rule() -> None:
    """The rules cover the closed set, and the table of the module says the same."""
    assert set(PROBE_RULES) == set(Stall)
    table = (health_probe.__doc__ or "").partition("| stall |")[2]
    assert all(stall.value in table for stall in Stall)
    assert f"{GRACE_SECONDS:.0f} s" in table
    assert f"{PATIENT_SECONDS:.0f} s" in table


@pytest.mark.parametrize("stall", NEVER)
def test_what_moves_is_never_given_up(stall: Stall) -> None:
    """Not after a day, and not past its deadline: the worker itself ends what takes too long."""
    assert status(held_up(stall, 86_400, over_seconds=3600)) == 200


@pytest.mark.parametrize("stall", STANDING)
def test_what_stands_is_given_up_after_a_grace(stall: Stall) -> None:
    """200 until the grace is over, then 503; past the deadline at once, but for the moment that ending takes."""
    assert status(held_up(stall, GRACE_SECONDS - 1)) == 200
    assert status(held_up(stall, GRACE_SECONDS + 1)) == 503
    assert status(held_up(stall, 1, over_seconds=DEADLINE_MARGIN_SECONDS - 1)) == 200
    assert status(held_up(stall, 1, over_seconds=DEADLINE_MARGIN_SECONDS + 1)) == 503


@pytest.mark.parametrize("stall", PATIENT)
def test_what_has_no_explanation_gets_more_time(stall: Stall) -> None:
    """Not knowing is no reason to kill: ten minutes, or the deadline."""
    assert status(held_up(stall, GRACE_SECONDS * 2)) == 200
    assert status(held_up(stall, PATIENT_SECONDS + 1)) == 503
    assert status(held_up(stall, 1, over_seconds=60)) == 503


@pytest.mark.parametrize("stall", WAITING)
def test_who_waits_is_given_up_only_with_the_one_that_it_waits_for(stall: Stall) -> None:
    """A holder that moves, or that nobody here sees, is waited for; a dead or stuck one, after the grace, is not; nor a circle."""
    long = GRACE_SECONDS + 5
    waiter = held_up(stall, long, blames=("default/1",))
    assert status(waiter, held_up(Stall.PIN_ADVANCING, long, rank=1)) == 200
    assert status(waiter, held_up(Stall.STOPPED, 5, rank=1)) == 200
    assert status(waiter, held_up(Stall.STOPPED, long, rank=1)) == 503
    assert status(waiter, held_up(Stall.NONE, rank=1, liveness=Liveness.DEAD)) == 503
    assert status(waiter) == 200
    assert status(held_up(stall, long, blames=("pid 1",))) == 200
    assert status(held_up(stall, GRACE_SECONDS - 5, blames=("default/1",)), held_up(Stall.STOPPED, long, rank=1)) == 200
    assert status(held_up(stall, 1, over_seconds=60)) == 503
    stopped = held_up(Stall.STOPPED, long, rank=1)
    assert status(held_up(stall, long, blames=(f"pid {stopped.pid}",)), stopped) == 503
    circle = held_up(stall, long, rank=1, blames=("default/0",))
    answer, body = startup(node(waiter, circle), 0)
    assert answer == 503
    assert "waits in turn" in body["problem"]


def test_a_dead_one_is_given_up_at_once_and_one_that_said_goodbye_is_not() -> None:
    """Whoever ended in order is known to whoever started it."""
    assert status(held_up(Stall.DEAD, 0, liveness=Liveness.DEAD)) == 503
    assert status(held_up(Stall.NONE, liveness=Liveness.DEAD)) == 503
    assert status(held_up(Stall.NONE, liveness=Liveness.EXITED)) == 200
    assert status(held_up(Stall.NONE, liveness=Liveness.UNKNOWN)) == 200


def test_a_stall_without_a_beginning_counts_from_the_last_sign_of_life() -> None:
    """And where there is none either, nothing is claimed."""
    verdict = Verdict(stall=Stall.GIL_HELD)
    old = WorkerState(last_ns=NOW - 100 * SECOND)
    assert status(held_up(Stall.NONE, verdict=verdict, state=old)) == 503
    assert status(held_up(Stall.NONE, verdict=verdict, state=replace(old, progress_ns=NOW - SECOND))) == 200
    assert status(held_up(Stall.NONE, verdict=verdict, state=WorkerState())) == 200


def test_a_rank_is_found_by_number_and_engine() -> None:
    """Unknown ones are 404 with what is known; without an engine the worst of all counts; a replaced process and a tool do not."""
    well, stuck = held_up(Stall.NONE), held_up(Stall.STOPPED, 100, engine="other")
    assert status(well, stuck) == 503
    assert status(well, stuck, engine="default") == 200
    assert status(well, stuck, engine="none") == 404
    code, body = startup(node(well, stuck), 7)
    assert code == 404
    assert "default/0, other/0" in body["problem"]
    assert status(well, held_up(Stall.DEAD, liveness=Liveness.DEAD, shown=False)) == 200
    assert status(well, held_up(Stall.DEAD, liveness=Liveness.DEAD, role=Role.TOOL, engine="e")) == 200
    assert status(held_up(Stall.DEAD, liveness=Liveness.DEAD, shown=False)) == 503
    assert status(held_up(Stall.NONE, role=Role.AGENT)) == 404
    code, body = startup(node(well, stuck))
    assert code == 200
    assert [one["engine"] for one in body["ranks"]] == ["default", "other"]


def test_the_body_says_what_an_operator_asks() -> None:
    """Where was looked, what is not readable, and of the rank: state, operation with age, deadline and share, stall with its why."""
    one = made.worker(made.busy(made.hub(3)), at_ns=NOW)
    lock = OpenOperation(
        event="hwr.lock.wait.begin",
        operation="register",
        begun_ns=NOW - 30 * SECOND,
        deadline_ns=NOW + 5 * SECOND,
        planned_bytes=200,
        done_bytes=50,
    )
    state = replace(one.state, ops={"o": lock}, last_failure={"error.code": "x\x1b[2J", "size": float("nan"), "mono_ns": NOW - SECOND})
    verdict = Verdict(stall=Stall.PIN_ADVANCING, confidence=Confidence.MEDIUM, evidence=("pages rise",), since_ns=NOW - 9 * SECOND)
    one = replace(one, state=state, verdict=verdict, heartbeat_ns=NOW - SECOND, notes=("a\u202eb",))
    code, body = startup(node(one), 3, now_ns=NOW + 2 * SECOND)
    text = json.dumps(body, allow_nan=False)
    rank = json.loads(text)["ranks"][0]
    assert code == 200
    assert (rank["state"], rank["phase"], rank["liveness"]) == ("registering", "registering", "alive")
    assert rank["operation"] == {
        "name": "register",
        "event": "hwr.lock.wait.begin",
        "age_seconds": 32.0,
        "deadline_seconds_left": 3.0,
        "planned_bytes": 200,
        "done_bytes": 50,
        "share": 0.25,
        "progress_age_seconds": None,
    }
    assert rank["heartbeat_age_seconds"] == 3.0
    assert rank["stall"]["class"] == "pin_advancing"
    assert (rank["stall"]["for_seconds"], rank["stall"]["given_up"]) == (11.0, None)
    assert rank["last_failure"] == {"error.code": "x\\x1b[2J", "size": None, "mono_ns": NOW - SECOND, "age_seconds": 3.0}
    assert rank["notes"] == ["a\\u202eb"]
    assert body["agent"]["snapshot_age_seconds"] == 2.0
    assert body["unreadable"] == ["memory: smaps of uid 0: needs CAP_SYS_PTRACE"]
    assert body["run_directories"][0]["path"] == "/run/hwr"
    assert {one["name"] for one in body["collectors"]} == {name.value for name in CollectorName}


@pytest.mark.parametrize(
    ("stall", "liveness", "word"),
    [
        (Stall.NONE, Liveness.DEAD, "dead"),
        (Stall.NONE, Liveness.EXITED, "exited"),
        (Stall.STOPPED, Liveness.ALIVE, "stopped"),
        (Stall.LOCK_WAIT, Liveness.ALIVE, "waiting"),
        (Stall.COLD_CACHE, Liveness.ALIVE, "slow"),
        (Stall.UNKNOWN, Liveness.ALIVE, "stalled"),
        (Stall.NONE, Liveness.ALIVE, "waiting_lock"),
    ],
)
def test_one_word_says_how_it_is(stall: Stall, liveness: Liveness, word: str) -> None:
    """As a person would say it."""
    assert startup(node(held_up(stall, 1, liveness=liveness)))[1]["ranks"][0]["state"] == word


def test_the_agent_is_alive_while_it_looks() -> None:
    """Half a minute without a look is too long; why it could not look is said."""
    assert alive(NOW, NOW + SECOND, None).ok
    late = alive(NOW, NOW + int((ALIVE_SECONDS + 1) * SECOND), "ValueError: x\ny")
    assert not late.ok
    assert "ValueError: x\\x0ay" in late.text
    assert alive(NOW + SECOND, NOW, None).ok


def test_the_agent_is_ready_when_every_part_was_looked_at_once() -> None:
    """A part that answered, failed or is known to hang counts; one that has not come back yet does not, but for a store."""
    assert not ready(None).ok
    assert ready(node()).ok
    assert "failing: store" in ready(node()).text

    def with_(**facts: Any) -> NodeSnapshot:
        one = CollectorHealth(**{"name": CollectorName.MEMORY, "deadline_seconds": 2.0, "problem": "has not come back yet", **facts})
        return replace(node(), collectors=(one,))

    assert not ready(with_()).ok
    assert "memory" in ready(with_()).text
    assert not ready(with_(running_since_ns=NOW - SECOND)).ok
    assert ready(with_(running_since_ns=NOW - 3 * SECOND)).ok
    assert ready(with_(seconds=0.1)).ok
    assert ready(with_(name=CollectorName.STORE)).ok
