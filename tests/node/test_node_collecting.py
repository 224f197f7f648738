"""Collectors in the background: what hangs or raises costs nobody else's data, and everything has a name."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from node_agents import until
from node_collectors import REPOSITORY

from diag.node.asides import Answer, Asides, Waiting
from diag.node.collecting import Allowance, Collected, Collector, Gaps, Running, joined_problem
from diag.node.snapshot import CollectorHealth
from hwr.errors import Unavailable
from hwr.outcomes import CollectorName


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns

    def go(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@pytest.fixture
def running() -> Iterator[Running]:
    own = Running()
    yield own
    own.stop()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging collector waits for; opened at the end, so that its thread ends with the test."""
    event = threading.Event()
    yield event
    event.set()


def collector(collect, name=CollectorName.KERNEL, *, target: str = "", interval: float = 0.01, deadline: float = 30.0) -> Collector:
    return Collector(name=name, collect=collect, interval_seconds=interval, deadline_seconds=deadline, target=target)


def health_of(running: Running, name: CollectorName, target: str = "") -> CollectorHealth:
    return next(health for health in running.health() if (health.name, health.target) == (name, target))


def test_a_collector_comes_back_again_and_again_with_the_newest_value(running: Running) -> None:
    """The reading carries when it was begun and ended; health says that it is fine and what it took."""
    counted = iter(range(1_000_000))
    running.add(collector(lambda: Collected(next(counted))))
    running.start()
    until(lambda: running.latest(CollectorName.KERNEL) and running.latest(CollectorName.KERNEL)[0].value >= 3, "three runs")
    reading = running.latest(CollectorName.KERNEL)[0]
    assert reading.begun_ns <= reading.ended_ns
    health = health_of(running, CollectorName.KERNEL)
    assert (health.ok, health.problem) == (True, None)
    assert health.sampled_ns is not None
    assert health.seconds is not None


def test_one_that_hangs_is_named_and_keeps_nobody_else(running: Running, gate: threading.Event) -> None:
    """Its older value stays with its own time; the other goes on; the deadline and the age stand in the problem."""
    runs = iter(range(1_000_000))

    def hangs() -> Collected[int]:
        number = next(runs)
        if number:
            gate.wait()
        return Collected(number)

    running.add(collector(hangs, CollectorName.PAGE_CACHE, deadline=0.05))
    running.add(collector(lambda: Collected(time.monotonic())))
    running.start()
    until(lambda: not health_of(running, CollectorName.PAGE_CACHE).ok and running.latest(CollectorName.PAGE_CACHE), "it is overdue")
    health = health_of(running, CollectorName.PAGE_CACHE)
    assert health.problem is not None
    assert "has not answered for" in health.problem
    assert "deadline 50 ms" in health.problem
    assert health.running_since_ns is not None
    assert running.latest(CollectorName.PAGE_CACHE)[0].value == 0
    before = running.latest(CollectorName.KERNEL)[0].value
    until(lambda: running.latest(CollectorName.KERNEL)[0].value > before, "the other one goes on")
    begun = time.monotonic()
    running.stop()
    assert time.monotonic() - begun < 1.0, "stopping waits for nobody who hangs"


def test_one_that_raises_is_named_escaped_and_tried_less_and_less_often(running: Running) -> None:
    """Type and text, control characters escaped; the last value stays; ten milliseconds of interval do not become a flood."""
    calls: list[float] = []

    def fails() -> Collected[str]:
        calls.append(time.monotonic())
        if len(calls) > 1:
            raise ValueError("bad \x1b[31m\nbytes")
        return Collected("first")

    running.add(collector(fails))
    running.start()
    until(lambda: len(calls) >= 5, "five tries")
    health = until(lambda: (found := health_of(running, CollectorName.KERNEL)).problem and found, "it is named")
    assert not health.ok
    assert health.problem == "ValueError: bad \\x1b[31m bytes"
    assert running.latest(CollectorName.KERNEL)[0].value == "first"
    assert calls[4] - calls[3] >= 2 * (calls[2] - calls[1]) * 0.9, "each pause is longer than the one before"


def test_a_run_that_could_read_nothing_is_not_ok_and_a_part_that_failed_is(running: Running) -> None:
    """Unavailable brings no data; a problem beside data is told and is no failure of the collector."""
    running.add(collector(lambda: Unavailable("EACCES"), CollectorName.STORE, target="/a"))
    running.add(collector(lambda: Collected((), "a third of it"), CollectorName.STORE, target="/b"))
    running.start()
    until(lambda: all(health.seconds is not None for health in running.health()), "both ran")
    assert (health_of(running, CollectorName.STORE, "/a").ok, health_of(running, CollectorName.STORE, "/a").problem) == (False, "EACCES")
    assert (health_of(running, CollectorName.STORE, "/b").ok, health_of(running, CollectorName.STORE, "/b").problem) == (
        True,
        "a third of it",
    )
    assert [reading.target for reading in running.latest(CollectorName.STORE)] == ["/b"]


def test_before_its_first_answer_it_is_not_ok_and_has_no_age(running: Running, gate: threading.Event) -> None:
    """Nothing is made up: no time, no cost, and the reason."""
    running.add(collector(lambda: Collected(gate.wait())))
    running.start()
    until(lambda: health_of(running, CollectorName.KERNEL).running_since_ns is not None, "it runs")
    health = health_of(running, CollectorName.KERNEL)
    assert (health.ok, health.sampled_ns, health.seconds, health.problem) == (False, None, None, "has not come back yet")


def test_an_answer_may_say_when_it_wants_to_come_again(running: Running) -> None:
    """An hour of interval, but a hundredth of a second was asked for."""
    counted = iter(range(1_000_000))
    running.add(collector(lambda: Collected(next(counted), next_seconds=0.01), interval=3600.0))
    running.start()
    until(lambda: running.latest(CollectorName.KERNEL) and running.latest(CollectorName.KERNEL)[0].value >= 2, "it came again")


def test_who_comes_back_under_the_name_of_one_that_hangs_is_one_thread_more_at_most(running: Running, gate: threading.Event) -> None:
    """A root that comes and goes while its filesystem hangs does not pile up threads, and is named each time."""
    entered: list[int] = []

    def hangs() -> Collected[None]:
        entered.append(1)
        gate.wait()
        return Collected(None)

    running.start()
    before = threading.active_count()
    for _ in range(5):
        running.add(collector(hangs, CollectorName.STORE, target="/slow", deadline=0.05))
        until(lambda: health_of(running, CollectorName.STORE, "/slow").problem not in (None, "has not come back yet"), "it is overdue")
        running.remove(CollectorName.STORE, "/slow")
    assert len(entered) == 1
    until(lambda: threading.active_count() <= before + 1, "those that waited behind it have gone")
    gate.set()
    running.add(collector(hangs, CollectorName.STORE, target="/slow"))
    until(lambda: running.latest(CollectorName.STORE), "once it answers, the newcomer runs")


def test_a_single_look_runs_in_order_and_waits_for_nobody_beyond_the_deadline(running: Running, gate: threading.Event) -> None:
    """Runs before locks, whatever the order they were added in; one that hangs is named and the rest is there."""
    order: list[str] = []
    running.add(collector(lambda: Collected(order.append("locks")), CollectorName.LOCKS))
    running.add(collector(lambda: Collected(gate.wait()), CollectorName.STORE, target="/slow", deadline=0.1))
    running.add(collector(lambda: Collected(order.append("runs")), CollectorName.RUNS))
    begun = time.monotonic()
    running.run_once()
    assert time.monotonic() - begun < 10
    assert order == ["runs", "locks"]
    assert "has not answered" in str(health_of(running, CollectorName.STORE, "/slow").problem)
    running.run_once(names=(CollectorName.RUNS,), within_seconds=5)
    assert order == ["runs", "locks", "runs"]


def test_the_process_ends_while_collectors_hang() -> None:
    """Daemon threads that wait in the kernel keep nobody from exiting."""
    code = (
        "import os, sys; from diag.node.collecting import *; from hwr.outcomes import CollectorName as N\n"
        "read, write = os.pipe()\n"
        "hangs = Collector(name=N.STORE, collect=lambda: os.read(read, 1), interval_seconds=1, deadline_seconds=0.1)\n"
        "running = Running(); running.add(hangs)\n"
        "running.start(); running.run_once(within_seconds=0.2); running.stop(); print(running.health()[0].problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "has not answered" in done.stdout


def test_what_was_spent_too_much_is_paid_back_by_waiting() -> None:
    """A share of one per cent: after a second's work nothing may be spent for a hundred seconds; saving has an end."""
    clock = Clock()
    allowance = Allowance(0.01, 0.05, clock=clock)
    assert allowance.left() == pytest.approx(0.05)
    allowance.spend(1.05)
    clock.go(99)
    assert allowance.left() < 0
    clock.go(2)
    assert allowance.left() > 0
    clock.go(1e6)
    assert allowance.left() == pytest.approx(0.05)


def test_a_call_aside_that_hangs_is_one_call_and_its_answer_is_not_lost(gate: threading.Event) -> None:
    """Asked again it is not begun again; the answer that came late says so; others are not kept; an error is the asker's."""
    asides = Asides("test")
    calls: list[int] = []

    def slow() -> str:
        calls.append(1)
        gate.wait()
        return "late"

    assert isinstance(asides.ask("a", slow, 0.0), Waiting)
    assert isinstance(asides.ask("a", slow, 0.0), Waiting)
    assert asides.ask("b", lambda: 7, 30.0) == Answer(7)
    assert list(asides.waiting()) == ["a"]
    gate.set()
    assert asides.ask("a", slow, 30.0) == Answer("late", late=True)
    assert calls == [1]
    with pytest.raises(ZeroDivisionError):
        asides.ask("c", lambda: 1 // 0, 30.0)
    assert asides.fetch("c", 0.0) is None


def test_gaps_are_said_once_and_many_problems_are_few_words() -> None:
    """A thousand unreadable files are three and a number."""
    gaps = Gaps()
    for _ in range(3):
        gaps.note("io of other users' workers", "CAP_SYS_PTRACE")
    assert gaps.texts == ("io of other users' workers: needs CAP_SYS_PTRACE",)
    assert joined_problem([]) is None
    assert joined_problem([f"p{number}" for number in range(5)] * 2) == "p0; p1; p2 (and 2 more)"
