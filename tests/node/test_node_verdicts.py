"""From journals, /proc, locks and counters to verdicts: names, beginnings that stay, and who deserves a closer look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diag.analysis.stall import Verdict
from diag.node.runs import Seen
from diag.node.snapshot import KernelFacts, LockFacts, LockParty, ProcessFacts
from diag.node.verdicts import Judge
from hwr.outcomes import Confidence, Liveness, LockKind, Operation, Role, Stall
from hwr.telemetry.state import OpenOperation, WorkerState

S = 1_000_000_000
NOW = 1000 * S
LOCK = "3f" * 32 + ".build.lock"


def seen(rank: int, now: int = NOW, **more: Any) -> Seen:
    told: dict[str, Any] = {
        "directory": Path(f"/run/a/r{rank}.{100 + rank}.1"),
        "run_id": "a",
        "rank": rank,
        "role": Role.WORKER,
        "engine": "default",
        "ns_pid": 100 + rank,
        "start_ns": 1,
        "pid": 100 + rank,
        "uid": 0,
        "liveness": Liveness.ALIVE,
        "heartbeat_ns": now - S // 2,
        "quiet_ns": now,
        "state": WorkerState(),
    }
    return Seen(**{**told, **more})


def names(*workers: Seen) -> dict[Path, str]:
    return {worker.directory: f"default/{worker.rank}" for worker in workers}


def process(pid: int, now: int, **more: Any) -> ProcessFacts:
    return ProcessFacts(**{"pid": pid, "state": "S", "sampled_ns": now, "utime_s": 1.0, "stime_s": 1.0, **more})


def waiting(since: int, **attrs: Any) -> WorkerState:
    state = WorkerState()
    state.ops["o"] = OpenOperation(
        event="hwr.store.lock.begin", operation=Operation.LOCK.value, begun_ns=since, attrs={"lock": "build", "file": f"/s/{LOCK}", **attrs}
    )
    return state


def test_a_verdict_keeps_its_beginning_while_its_class_stays() -> None:
    """Every look sees a later beat or none; the stall began when it was first seen to."""
    judge = Judge()
    worker = seen(0)
    stopped = {100: process(100, NOW, state="T")}
    first = judge.judge(NOW, [worker], names(worker), stopped, None, ())[worker.directory]
    later = seen(0, NOW, heartbeat_ns=NOW - S // 4)
    again = judge.judge(NOW + 5 * S, [later], names(later), {100: process(100, NOW + 5 * S, state="T")}, None, ())[worker.directory]
    assert first.stall is again.stall is Stall.STOPPED
    assert first.since_ns == again.since_ns == NOW - S // 2
    well = judge.judge(NOW + 6 * S, [seen(0, NOW + 6 * S)], names(worker), {100: process(100, NOW + 6 * S)}, None, ())[worker.directory]
    assert (well.stall, well.since_ns) == (Stall.NONE, None)


def test_a_waiter_blames_the_worker_that_holds_the_lock() -> None:
    """The kernel says who holds it now and in which state; the journal says since when. Whom the holder waits for is named too."""
    holder, waiter = seen(0), seen(4, state=waiting(NOW - 3 * S))
    lock = LockFacts(
        kind=LockKind.BUILD,
        file=LOCK,
        key="3f" * 32,
        holders=(LockParty(pid=100, exclusive=True, state="T", worker="default/0"),),
        waiters=(LockParty(pid=104, exclusive=True, worker="default/4", since_ns=NOW - 3 * S),),
    )
    beyond = LockFacts(
        kind=LockKind.ARTIFACT,
        file="x.artifact.lock",
        holders=(LockParty(pid=999, exclusive=True),),
        waiters=(LockParty(pid=100, exclusive=True, worker="default/0"),),
    )
    found = Judge().judge(NOW, [holder, waiter], names(holder, waiter), {}, None, (lock, beyond))
    verdict = found[waiter.directory]
    assert (verdict.stall, verdict.blames) == (Stall.LOCK_WAIT, ("default/0",))
    assert "3f3f3f3f3f3f.build.lock" in verdict.evidence[0]
    assert "which is stopped" in verdict.evidence[0]
    assert "default/0 itself waits for pid 999" in verdict.evidence[1]


def test_short_operations_beside_a_quiet_one_do_not_hide_it_and_those_inside_of_it_do() -> None:
    """A background thread's lookups come and go beside a publication that stands still; a checksum inside of a lookup moves for it."""
    state = WorkerState()
    state.ops["long"] = OpenOperation(event="e", operation=Operation.PUBLISH.value, begun_ns=NOW - 60 * S)
    state.ops["short"] = OpenOperation(event="e", operation=Operation.LOOKUP.value, begun_ns=NOW - S // 10)
    worker, judge = seen(0, state=state), Judge()
    for second in range(2):
        now = NOW + second * S
        living = seen(0, now, state=state)
        beside = judge.judge(now, [living], names(living), {100: process(100, now)}, None, ())[worker.directory].stall
    assert beside is Stall.UNKNOWN
    state.ops["step"] = OpenOperation(event="e", operation=None, begun_ns=NOW, parent="long")
    state.ops["short"].parent = "step"
    for second in range(2, 4):
        now = NOW + second * S
        state.ops["short"].progress_ns = now - S // 10
        living = seen(0, now, state=state)
        inside = judge.judge(now, [living], names(living), {100: process(100, now)}, None, ())[worker.directory].stall
    assert inside is Stall.NONE
    state.ops["long"].parent = "short"  # each contains the other, as only a forged journal says
    judge.judge(NOW + 5 * S, [worker], names(worker), {}, None, ())


def test_a_cycle_is_called_one() -> None:
    """Two workers that poll for each other's locks, as the store's locks are waited for: the kernel's table has no waiter then."""
    one = seen(0, state=waiting(NOW - 3 * S, holder_pid=104, holder_state="S"))
    other = seen(4, state=waiting(NOW - 3 * S, holder_pid=100, holder_state="S"))
    found = Judge().judge(NOW, [one, other], names(one, other), {}, None, ())
    for worker, blamed in ((one, "default/4"), (other, "default/0")):
        assert found[worker.directory].blames == (blamed,)
        assert f"{blamed} waits for this one" in found[worker.directory].evidence[1]


def test_a_chain_is_followed_to_its_end_and_a_longer_cycle_to_its_beginning() -> None:
    """Of three that wait for each other each is told so; of a chain the last one, who waits for nobody, is named."""
    ring = [seen(rank, state=waiting(NOW - 3 * S, holder_pid=100 + (rank + 1) % 3)) for rank in range(3)]
    found = Judge().judge(NOW, ring, names(*ring), {}, None, ())
    for rank, worker in enumerate(ring):
        assert found[worker.directory].evidence[-1].startswith(f"and so on, to default/{rank}: none of them can go on")
    chain = [*(seen(rank, state=waiting(NOW - 3 * S, holder_pid=101 + rank)) for rank in range(3)), seen(3)]
    verdict = Judge().judge(NOW, chain, names(*chain), {}, None, ())[chain[0].directory]
    assert (verdict.blames, verdict.evidence[-1]) == (("default/1",), "and so on, to default/3")


def test_without_the_kernels_table_the_journals_word_counts() -> None:
    """The holder that the waiter saw is named as the worker that has this pid."""
    holder, waiter = seen(0), seen(4, state=waiting(NOW - 3 * S, holder_pid=100, holder_state="T"))
    verdict = Judge().judge(NOW, [holder, waiter], names(holder, waiter), {}, None, ())[waiter.directory]
    assert verdict.blames == ("default/0",)


def test_a_wait_that_only_the_table_shows_is_dated_by_its_first_sight() -> None:
    """A process that does not tell of its wait is judged a second after it was first seen to wait."""
    judge, waiter = Judge(), seen(4)
    lock = LockFacts(kind=LockKind.BUILD, file=LOCK, holders=(), waiters=(LockParty(pid=104, exclusive=True),))
    first = judge.judge(NOW, [waiter], names(waiter), {}, None, (lock,))[waiter.directory]
    later = seen(4, NOW + 2 * S)
    second = judge.judge(NOW + 2 * S, [later], names(waiter), {}, None, (lock,))[waiter.directory]
    assert (first.stall, second.stall, second.since_ns) == (Stall.NONE, Stall.LOCK_WAIT, NOW)


def test_the_rank_that_is_behind_is_blamed() -> None:
    """Of one engine and one collective; ranks of another engine, and those as far, are not."""
    inside = WorkerState(collectives={"all_reduce": {"sequence": 4, "begun_ns": NOW - 2 * S, "world_size": 3}})
    as_far = WorkerState(collectives={"all_reduce": {"sequence": 4, "begun_ns": NOW - 2 * S, "world_size": 3}})
    behind = WorkerState(collectives={"all_reduce": {"sequence": 3, "begun_ns": None, "world_size": 3}})
    ranks = [seen(0, state=inside), seen(1, state=as_far), seen(2, state=behind)]
    stranger = seen(9, state=behind)
    called = {**names(*ranks), stranger.directory: "other/9"}
    verdict = Judge().judge(NOW, [*ranks, stranger], called, {}, None, ())[ranks[0].directory]
    assert (verdict.stall, verdict.blames) == (Stall.COLLECTIVE_WAIT, ("default/2",))


def test_a_rank_that_never_came_is_behind_if_the_group_has_room_for_it() -> None:
    """Before the first collective nobody has a count; ranks outside of a smaller group, tools, and who ended in order are not missed."""

    def told(size: int) -> tuple[str, ...]:
        inside = WorkerState(collectives={"barrier": {"sequence": 1, "begun_ns": NOW - 2 * S, "world_size": size}})
        ended, tool = seen(2, liveness=Liveness.EXITED), seen(3, role=Role.TOOL)
        ranks = [seen(0, state=inside), seen(1), seen(4, liveness=Liveness.DEAD), ended, tool]
        return Judge().judge(NOW, ranks, names(*ranks), {}, None, ())[ranks[0].directory].blames

    assert told(3) == ("default/1", "default/4")
    assert told(2) == ()


def registering(age: float, judge: Judge, pinned: list[int | None]) -> list[Verdict]:
    """A worker in one driver call, looked at once a second, with what the node's counter says at each look."""
    state = WorkerState()
    state.ops["o"] = OpenOperation(event="e", operation=Operation.REGISTER_CHUNK.value, begun_ns=NOW - int(age * S))
    told = []
    for second, count in enumerate(pinned):
        now = NOW + second * S
        worker = seen(0, now, state=state)
        kernel = KernelFacts(sampled_ns=now, pinned_bytes=None if count is None else count << 20)
        told.append(judge.judge(now, [worker], names(worker), {100: process(100, now)}, kernel, ())[worker.directory])
    return told


def test_an_agent_that_begins_to_look_calls_nothing_stuck() -> None:
    """Nor does one pause of the counters: a probe would end a start that is slow and well. Real quiet is told within five seconds."""
    assert {verdict.stall for verdict in registering(600.0, Judge(), [0, 0, 100, 100, 200, 200])} == {Stall.PIN_ADVANCING}
    quiet = registering(600.0, Judge(), [0, 100, *[200] * 34])
    assert [verdict.stall for verdict in quiet[:5]] == [Stall.PIN_ADVANCING] * 5
    assert {verdict.stall for verdict in quiet[5:]} == {Stall.PIN_STUCK}
    assert [verdict.confidence for verdict in quiet[-5:]] == [*[Confidence.LOW] * 1, *[Confidence.HIGH] * 4]
    assert {verdict.since_ns for verdict in quiet[5:]} == {NOW + 2 * S}


def test_the_same_reading_twice_is_not_a_counter_that_stands_still() -> None:
    """Looks are more frequent than readings: a busy driver poll stays one between two readings of /proc."""
    state = WorkerState()
    state.ops["o"] = OpenOperation(event="e", operation=Operation.TRANSFER.value, begun_ns=NOW - 60 * S)
    worker, judge, told = seen(0, state=state), Judge(), []
    for second, reading in enumerate((0, 1, 1, 2, 2, 3)):
        now = NOW + second * S
        facts = {100: process(100, NOW + reading * S, state="R", utime_s=1.0 + reading)}
        kernel = KernelFacts(sampled_ns=NOW + reading * S)
        living = seen(0, now, state=worker.state)
        told.append(judge.judge(now, [living], names(living), facts, kernel, ())[worker.directory].stall)
    assert told[1:] == [Stall.DRIVER_POLL] * 5


def test_who_deserves_a_closer_look() -> None:
    """A late beat, a long operation, or work inside of the kernel; nobody who is well, and nobody who cannot be seen."""
    judge = Judge()
    workers = [
        seen(0),
        seen(1, heartbeat_ns=NOW - 2 * S),
        seen(2, state=waiting(NOW - 2 * S)),
        seen(3),
        seen(5, pid=None, heartbeat_ns=NOW - 9 * S),
    ]
    quiet = {100 + rank: process(100 + rank, NOW) for rank in range(4)}
    busy = {**quiet, 103: process(103, NOW + S, state="R", stime_s=1.9)}
    judge.suspects(NOW, workers, quiet)
    assert judge.suspects(NOW, workers, busy) == {101, 102, 103}


def test_agents_are_not_judged() -> None:
    """An agent's journal is followed and has no verdict."""
    agent = seen(0, role=Role.AGENT, liveness=Liveness.DEAD)
    assert Judge().judge(NOW, [agent], {}, {}, None, ()) == {}
