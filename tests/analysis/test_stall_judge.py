"""Each class of stall from two samples of figures; what comes first when several would fit; and that there is always exactly one."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.analysis.stall import BEAT_LATE_SECONDS, PIN_QUIET_SECONDS, RUNBOOK, judge
from diag.analysis.stall_samples import Holder, InCollective, NodeSample, Open, Thread, Wait, WorkerSample
from hwr.outcomes import Confidence, Liveness, Operation, Stall

RUNBOOKS = Path(__file__).resolve().parents[2] / "runbooks"
S = 1_000_000_000
NOW = 1000 * S


def sample(age: float = 0.0, **figures: Any) -> WorkerSample:
    """A worker that is well, `age` seconds ago."""
    told: dict[str, Any] = {
        "taken_ns": NOW - int(age * S),
        "liveness": Liveness.ALIVE,
        "heartbeat_ns": NOW - int(age * S) - S // 2,
        "state": "S",
        "utime_s": 10.0,
        "stime_s": 5.0,
        "minflt": 1000,
        "majflt": 10,
        "read_bytes": 0,
        "threads": (Thread(tid=7, name="python", state="S", wchan="futex_wait_queue"),),
    }
    return WorkerSample(**{**told, **figures})


def node(age: float = 0.0, **figures: Any) -> NodeSample:
    told = {"pinned_bytes": 0, "mlocked_bytes": 0, "compactions": 0, "reclaims": 0, "memory_some_s": 0.0, "cpu_some_s": 0.0}
    return NodeSample(taken_ns=NOW - int(age * S), **{**told, **figures})


def opened(operation: Operation, age: float, **more: Any) -> Open:
    return Open(operation=operation.value, begun_ns=NOW - int(age * S), **more)


def wait(age: float, *holders: Holder) -> Wait:
    return Wait(lock="build", file="3f3f.build.lock", since_ns=NOW - int(age * S), deadline_ns=NOW + 60 * S, holders=holders)


CHUNK = opened(Operation.REGISTER_CHUNK, 5.0, planned_bytes=1 << 30, done_bytes=1 << 28, detail="chunk 2/4")
CHECKSUM = opened(Operation.CHECKSUM, 40.0, planned_bytes=1 << 30, done_bytes=1 << 20)
RUNNING = (Thread(tid=7, name="python", state="R"),)
BLOCKED = (Thread(tid=7, name="python", state="D", wchan="folio_wait_bit_common"),)
RWSEM = (Thread(tid=9, name="loader", state="D", wchan="rwsem_down_read_slowpath"), Thread(tid=7, name="python", state="R", syscall="10"))


@pytest.mark.parametrize(
    ("stall", "confidence", "before", "now", "node_before", "node_now", "words"),
    [
        pytest.param("none", "high", sample(1), sample(), node(1), node(), "", id="an idle server"),
        pytest.param("none", "high", sample(1), sample(liveness=Liveness.EXITED), None, None, "", id="ended in order"),
        pytest.param("dead", "high", sample(1), sample(liveness=Liveness.DEAD, quiet_ns=NOW - 2 * S), None, None, "2.0 s", id="killed"),
        pytest.param("stopped", "high", sample(1), sample(state="T"), None, None, "state T", id="stopped by a signal"),
        pytest.param(
            "stopped", "high", sample(1), sample(state="t", tracer_pid=42, heartbeat_ns=NOW - 2 * S), None, None, "pid 42", id="traced"
        ),
        pytest.param("none", "high", sample(1), sample(state="t", tracer_pid=42), None, None, "", id="traced, and running between calls"),
        pytest.param("stopped", "high", sample(1), sample(state="D", frozen=True), None, None, "frozen", id="a paused container"),
        pytest.param("gil_held", "high", sample(1), sample(heartbeat_ns=NOW - 4 * S), None, None, "no beat for 4.0 s", id="asleep in C"),
        pytest.param(
            "gil_held", "high", sample(1), sample(heartbeat_ns=NOW - 4 * S, state="R", threads=RUNNING), None, None, "runs", id="busy in C"
        ),
        pytest.param(
            "gil_held",
            "low",
            sample(1),
            sample(heartbeat_ns=NOW - 4 * S),
            node(1),
            node(cpu_some_s=0.98),
            "no processor time",
            id="late beats of a starved machine",
        ),
        pytest.param(
            "unknown",
            "medium",
            sample(1),
            sample(heartbeat_ns=NOW - 4 * S, threads=(Thread(tid=8, name="hwr-alive", state="D", wchan="jbd2_log_wait_commit"),)),
            None,
            None,
            "not the interpreter's lock",
            id="a beat that waits for the disk",
        ),
        pytest.param("mmap_lock_held", "high", sample(1), sample(mmap_lock_blocked_seconds=1.0), None, None, "1.0 s", id="a blocked read"),
        pytest.param("mmap_lock_held", "medium", sample(1), sample(threads=RWSEM), None, None, "mprotect", id="threads wait for it"),
        pytest.param(
            "lock_wait",
            "high",
            sample(1),
            sample(waits=(wait(3.1, Holder(name="default/0", state="T")),)),
            None,
            None,
            "it waits for 3.1 s for the build lock (3f3f.build.lock), held by default/0, which is stopped",
            id="the holder is stopped",
        ),
        pytest.param("lock_wait", "medium", sample(1), sample(waits=(wait(3.1),)), None, None, "nobody", id="nobody shows as holder"),
        pytest.param(
            "lock_wait",
            "high",
            sample(1),
            sample(waits=(wait(3.1, Holder(name="default/1", waits_for=("default/2",))),)),
            None,
            None,
            "default/1 itself waits for default/2",
            id="a chain",
        ),
        pytest.param(
            "lock_wait",
            "high",
            sample(1),
            sample(name="default/0", waits=(wait(3.1, Holder(name="default/1", waits_for=("default/2",), beyond=("default/0",))),)),
            None,
            None,
            "and so on, to default/0: none of them can go on",
            id="a cycle of three",
        ),
        pytest.param("none", "high", sample(1), sample(waits=(wait(0.4),)), None, None, "", id="a lock that is just taken"),
        pytest.param(
            "pin_advancing", "high", sample(1, chunks_done=1), sample(chunks_done=2, operations=(CHUNK,)), node(1), node(), "2 chunks"
        ),
        pytest.param(
            "pin_advancing", "medium", sample(1), sample(operations=(CHUNK,)), node(1), node(pinned_bytes=1 << 28), "pinned 256 MiB"
        ),
        pytest.param("pin_advancing", "medium", sample(1), sample(operations=(CHUNK,)), node(1), node(mlocked_bytes=4096), "pinned 4"),
        pytest.param("compaction", "medium", sample(1), sample(operations=(CHUNK,)), node(1), node(compactions=7), "7 direct"),
        pytest.param("pin_stuck", "low", sample(1), sample(operations=(CHUNK,)), node(1), node(), "neither", id="quiet for five seconds"),
        pytest.param(
            "pin_stuck",
            "high",
            sample(1),
            sample(operations=(replace(CHUNK, begun_ns=NOW - 31 * S),)),
            node(1),
            node(),
            "neither",
            id="quiet for half a minute",
        ),
        pytest.param(
            "pin_stuck",
            "high",
            sample(1),
            sample(operations=(replace(CHUNK, deadline_ns=NOW - S),)),
            node(1),
            node(),
            "its deadline has passed",
            id="past its deadline",
        ),
        pytest.param(
            "collective_wait",
            "high",
            sample(1),
            sample(collectives=(InCollective(op="all_reduce", sequence=4, begun_ns=NOW - 2 * S, world_size=8, behind=("default/7",)),)),
            None,
            None,
            "not there yet: default/7",
            id="a rank is behind",
        ),
        pytest.param(
            "collective_wait", "high", sample(1), sample(operations=(opened(Operation.VOTE, 4.0, missing=(3,)),)), None, None, "rank 3"
        ),
        pytest.param(
            "cold_cache",
            "medium",
            sample(1),
            sample(operations=(CHECKSUM,), state="D", threads=BLOCKED, read_bytes=200 << 20, majflt=50),
            node(1),
            node(),
            "200 MiB",
            id="reads from disk",
        ),
        pytest.param(
            "reclaim",
            "medium",
            sample(1),
            sample(operations=(CHECKSUM,), state="D", threads=BLOCKED),
            node(1),
            node(memory_some_s=0.5, reclaims=12),
            "12 allocations",
            id="memory is short",
        ),
        pytest.param(
            "driver_poll",
            "medium",
            sample(1),
            sample(operations=(opened(Operation.TRANSFER, 40.0),), state="R", threads=RUNNING, utime_s=10.98),
            node(1),
            node(),
            "98% of a core",
            id="burns a core and moves nothing",
        ),
        pytest.param("unknown", "low", sample(1), sample(operations=(CHECKSUM,)), node(1), node(), "nothing has moved for 40 s"),
        pytest.param(
            "unknown",
            "low",
            sample(1),
            sample(operations=(opened(Operation.PRODUCE, 40.0),), state="R", threads=RUNNING, utime_s=10.98),
            node(1),
            node(),
            "it may be computing",
            id="computes without a word",
        ),
        pytest.param(
            "none",
            "high",
            sample(1),
            sample(operations=(replace(CHECKSUM, moved_ns=NOW - S // 5),)),
            node(1),
            node(),
            "",
            id="a long checksum that moves",
        ),
    ],
)
def test_each_class_has_its_evidence(
    stall: str,
    confidence: str,
    before: WorkerSample,
    now: WorkerSample,
    node_before: NodeSample | None,
    node_now: NodeSample | None,
    words: str,
) -> None:
    """The class, how sure, and the sentence that says why."""
    verdict = judge(before, now, node_before, node_now)
    assert (verdict.stall, verdict.confidence) == (Stall(stall), Confidence(confidence)), verdict
    assert words in "; ".join(verdict.evidence)
    assert bool(verdict.evidence) == (verdict.stall is not Stall.NONE)


def test_who_waits_for_the_interpreter_is_not_named_as_its_holder() -> None:
    """A thread on a futex waits; another that sleeps elsewhere may be the one, and more is not claimed."""
    waiter = Thread(tid=7, name="python", state="S", wchan="futex_do_wait")
    sleeper = Thread(tid=8, name="loader", state="S", wchan="hrtimer_nanosleep")
    verdict = judge(sample(1), sample(heartbeat_ns=NOW - 4 * S, threads=(waiter, sleeper)))
    told = "; ".join(verdict.evidence)
    assert verdict.stall is Stall.GIL_HELD
    assert "thread 8 (loader) sleeps in hrtimer_nanosleep and may hold" in told
    assert "thread 7" not in told


STALE = {"heartbeat_ns": NOW - 60 * S, "waits": (wait(60.0, Holder(name="default/1")),), "operations": (CHECKSUM, CHUNK)}


@pytest.mark.parametrize(
    ("figures", "stall"),
    [
        ({"liveness": Liveness.DEAD, "state": None}, Stall.DEAD),
        ({"state": "T", "mmap_lock_blocked_seconds": 9.0}, Stall.STOPPED),
        ({"mmap_lock_blocked_seconds": 9.0}, Stall.MMAP_LOCK_HELD),
        ({}, Stall.GIL_HELD),
        ({"heartbeat_ns": NOW}, Stall.LOCK_WAIT),
        ({"heartbeat_ns": NOW, "waits": ()}, Stall.PIN_STUCK),
        ({"heartbeat_ns": NOW, "waits": (), "operations": (CHECKSUM,)}, Stall.UNKNOWN),
    ],
    ids=lambda value: value.value if isinstance(value, Stall) else "",
)
def test_what_explains_everything_else_comes_first(figures: dict[str, Any], stall: Stall) -> None:
    """A stopped process has late beats too, one whose map is locked cannot beat, and a waiter moves nothing."""
    assert judge(sample(1), sample(**{**STALE, **figures}), node(1), node()).stall is stall


def test_a_slow_thing_is_not_called_stuck_and_a_stuck_one_soon_is() -> None:
    """A chunk of a second with nothing moving is young; after some seconds it is likely stuck; while counters move it never is."""
    ages = [1.0, PIN_QUIET_SECONDS + 0.1, 29.0, 30.5]
    told = [judge(sample(1), sample(operations=(replace(CHUNK, begun_ns=NOW - int(age * S)),)), node(1), node()) for age in ages]
    assert [(verdict.stall, verdict.confidence) for verdict in told] == [
        (Stall.PIN_ADVANCING, Confidence.LOW),
        (Stall.PIN_STUCK, Confidence.LOW),
        (Stall.PIN_STUCK, Confidence.LOW),
        (Stall.PIN_STUCK, Confidence.HIGH),
    ]
    moving = judge(sample(1), sample(operations=(replace(CHUNK, begun_ns=NOW - 900 * S),)), node(1), node(pinned_bytes=4096))
    assert moving.stall is Stall.PIN_ADVANCING


def test_a_pause_of_the_counters_is_no_stuck_driver() -> None:
    """However old the call is: what counts is since when nothing has moved, and that is also where the stall begins."""
    old = sample(operations=(replace(CHUNK, begun_ns=NOW - 900 * S),))
    told = [judge(sample(1), old, node(1), node(pins_moved_ns=NOW - int(quiet * S))) for quiet in (1.0, 4.0, 31.0)]
    assert [(verdict.stall, verdict.confidence) for verdict in told] == [
        (Stall.PIN_ADVANCING, Confidence.LOW),
        (Stall.PIN_STUCK, Confidence.LOW),
        (Stall.PIN_STUCK, Confidence.HIGH),
    ]
    assert [verdict.since_ns for verdict in told[1:]] == [NOW - 4 * S, NOW - 31 * S]


def test_between_two_chunks_the_registration_is_as_quiet_as_its_last_sign() -> None:
    """The age of the whole registration says nothing: only from its last chunk on it may be stuck."""
    register = opened(Operation.REGISTER, 60.0)
    assert judge(sample(1), sample(operations=(register,), progress_ns=NOW - S), node(1), node()).stall is Stall.PIN_ADVANCING
    assert judge(sample(1), sample(operations=(register,), progress_ns=NOW - 5 * S), node(1), node()).stall is Stall.PIN_STUCK


@pytest.mark.parametrize("counters", [None, node(pinned_bytes=None, mlocked_bytes=None), node(9)], ids=["unread", "untold", "old"])
def test_counters_that_are_not_known_do_not_stand_still(counters: NodeSample | None) -> None:
    """Nothing is claimed of them, and without them no age of a call makes sure."""
    verdict = judge(sample(1), sample(operations=(replace(CHUNK, begun_ns=NOW - 40 * S),)), counters, counters)
    assert (verdict.stall, verdict.confidence) == (Stall.PIN_STUCK, Confidence.LOW)
    assert "counters of pinned pages are not known" in verdict.evidence[-1]


def test_the_worker_says_what_long_means() -> None:
    """`hwr_stall_after_seconds` of the worker decides when nothing that moves is worth a word."""
    quiet = opened(Operation.PUBLISH, 8.0)
    assert judge(sample(1), sample(operations=(quiet,), stall_after_seconds=30.0), node(1), node()).stall is Stall.NONE
    assert judge(sample(1), sample(operations=(quiet,), stall_after_seconds=7.0), node(1), node()).stall is Stall.UNKNOWN


def test_a_first_look_has_no_rates_and_still_sees_what_the_kernel_says() -> None:
    """One sample is enough for what does not need two; nothing is made of a rate that is not known."""
    assert judge(None, sample(state="T")).stall is Stall.STOPPED
    assert judge(None, sample(heartbeat_ns=NOW - int((BEAT_LATE_SECONDS + 1) * S))).stall is Stall.GIL_HELD
    assert judge(None, sample(operations=(CHECKSUM,))).stall is Stall.NONE
    assert judge(None, sample(operations=(replace(CHUNK, begun_ns=NOW - 900 * S),)), None, node()).stall is Stall.PIN_ADVANCING


def test_each_class_has_a_section_in_the_runbook() -> None:
    """A verdict's runbook leads somewhere; nothing there is left over."""
    sections = set(re.findall(r"^## (\w+)$", (RUNBOOKS / RUNBOOK).read_text(), re.MULTILINE))
    assert sections == {stall.value for stall in Stall} - {Stall.NONE.value}


_NUMBER = st.none() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False, width=32)
_TIME = st.none() | st.integers(-(2**62), 2**62)
_OPEN = st.builds(
    Open, operation=st.sampled_from([*Operation, "of a later version"]).map(str), begun_ns=st.integers(0, 2 * NOW), deadline_ns=_TIME
)
_THREAD = st.builds(Thread, tid=st.integers(), name=st.text(), state=st.sampled_from("RSDTtZX"), wchan=st.none() | st.text())
_COUNTS = ("utime_s", "stime_s", "minflt", "majflt", "read_bytes", "registered_bytes", "chunks_done")
_SAMPLE = st.builds(
    WorkerSample,
    taken_ns=st.integers(0, 2 * NOW),
    liveness=st.sampled_from(Liveness),
    heartbeat_ns=_TIME,
    state=st.none() | st.sampled_from("RSDTtZX"),
    threads=st.lists(_THREAD, max_size=3).map(tuple),
    operations=st.lists(_OPEN, max_size=3).map(tuple),
    mmap_lock_blocked_seconds=st.none() | st.floats(0, 1e6),
    **dict.fromkeys(_COUNTS, _NUMBER),
)
_NODE = st.builds(
    NodeSample, taken_ns=st.integers(0, 2 * NOW), **{item.name: _NUMBER for item in fields(NodeSample) if item.name != "taken_ns"}
)


@given(before=st.none() | _SAMPLE, now=_SAMPLE, node_before=st.none() | _NODE, node_now=st.none() | _NODE)
def test_any_two_samples_have_one_verdict(
    before: WorkerSample | None, now: WorkerSample, node_before: NodeSample | None, node_now: NodeSample | None
) -> None:
    """Whatever the figures are, nothing raises, and what is no stall has no evidence."""
    verdict = judge(before, now, node_before, node_now)
    assert bool(verdict.evidence) == (verdict.stall is not Stall.NONE)
    assert bool(verdict.runbook) == (verdict.stall is not Stall.NONE)
