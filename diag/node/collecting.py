"""Reading in the background: each thing on its own, and nothing that hangs keeps another.

Owns the threads of the collectors, their times and their health. Promises the newest value of each with the time it is of, a failure that
has a name and leaves the older value where it is (N1), and an end that waits for nobody who hangs. Refuses to know what is read, and to
log: health is a value that views show.

Threads and no child processes: a read that waits for FUSE, NFS or an mmap lock is killable, so that the process ends all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from diag.node.snapshot import CollectorHealth
from hwr.errors import Unavailable
from hwr.outcomes import CollectorName
from hwr.telemetry.clock import boot_ns
from hwr.units import NS_PER_S, one_line, seconds_text

# A collector that fails is asked again after twice its interval, four times, … up to this.
MAX_BACKOFF_SECONDS: Final = 30.0
# What `stop` waits, all together, for those who are about to come back.
STOP_SECONDS: Final = 1.0
# So that whoever is waited for in vain is overdue by its own clock too, which began a moment later.
OVERDUE_SECONDS: Final = 0.1
# A run that takes longer than its interval still leaves the processor to others between two runs.
LEAST_PAUSE: Final = 0.1

# Who needs whose data, for a single look: stores are known from runs, locks and users from both.
_ORDER: Final = (
    (CollectorName.RUNS,),
    (CollectorName.PROCESSES, CollectorName.STORE, CollectorName.KERNEL),
    (CollectorName.LOCKS, CollectorName.MEMORY, CollectorName.PAGE_CACHE, CollectorName.CGROUP),
    (CollectorName.MAPPERS,),
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Collected(Generic[T]):
    """What one run brought. `problem` says what part of it failed; `next_seconds` when to come again, if not after the interval."""

    value: T
    problem: str | None = None
    next_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector(Generic[T]):
    """One thing to read, again and again. `collect` may raise, and may hang; Unavailable is a run that could read nothing.

    `interval_seconds` counts from begin to begin. A run that takes longer than `deadline_seconds` is reported as hanging.
    """

    name: CollectorName
    collect: Callable[[], Collected[T] | Unavailable]
    interval_seconds: float
    deadline_seconds: float
    target: str = ""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """The newest value of a collector, and when it was read (CLOCK_BOOTTIME)."""

    value: T
    begun_ns: int
    ended_ns: int
    target: str = ""


class Allowance:
    """A share of time that may be spent; what was spent too much is paid back by waiting. For one thread."""

    def __init__(self, share: float, burst_seconds: float, *, clock: Callable[[], int] = boot_ns) -> None:
        self._share, self._burst, self._clock = share, burst_seconds, clock
        self._left, self._at = burst_seconds, clock()

    def left(self) -> float:
        """Return the seconds that may be spent now; below 0, nothing may."""
        now = self._clock()
        self._left = min(self._burst, self._left + self._share * (now - self._at) / NS_PER_S)
        self._at = now
        return self._left

    def spend(self, seconds: float) -> None:
        """Note what was spent."""
        self._left -= seconds


class Gaps:
    """What this reader may not read, and what would open it; each said once."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def note(self, what: str, opened_by: str) -> None:
        """Note one; both are words of ours, never of outside."""
        self._found.setdefault(f"{what}: needs {opened_by}")

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them, in the order in which they were met."""
        return tuple(self._found)


class _Runner:
    """One collector with its thread. The lock lets one run be under way at a time, also when a successor was added meanwhile."""

    def __init__(self, collector: Collector[Any], clock: Callable[[], int], one_at_a_time: threading.Lock) -> None:
        self.collector, self.one_at_a_time = collector, one_at_a_time
        self._clock = clock
        self._stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.reading: Reading[Any] | None = None
        self.failures = 0
        self._problem: str | None = None
        self._ok = False
        self._seconds: float | None = None
        self._running_since: int | None = None

    def start(self) -> None:
        if self.thread is None:
            self.thread = self._thread(self._loop)

    def once(self) -> threading.Thread:
        return self._thread(self.run)

    def stop(self) -> None:
        self._stopped.set()

    @property
    def overdue_seconds(self) -> float | None:
        """How long the present run has taken, if that is too long."""
        since = self._running_since  # read once: the other thread may end its run at any moment
        if since is None:
            return None
        seconds = (self._clock() - since) / NS_PER_S
        return seconds if seconds > self.collector.deadline_seconds else None

    def health(self) -> CollectorHealth:
        overdue, since = self.overdue_seconds, self._running_since
        problem, deadline = self._problem, self.collector.deadline_seconds
        if overdue is not None:
            problem = f"has not answered for {seconds_text(overdue)} (deadline {seconds_text(deadline)})"
        elif self._seconds is None and problem is None:
            problem = "has not come back yet"
        return CollectorHealth(
            name=self.collector.name,
            target=self.collector.target,
            ok=self._ok and overdue is None,
            problem=problem,
            sampled_ns=None if self.reading is None else self.reading.ended_ns,
            seconds=self._seconds,
            running_since_ns=since,
            deadline_seconds=deadline,
        )

    def run(self) -> float:
        """Run the collector once; return after how many seconds from now it wants to run again."""
        self._running_since = begun = self._clock()
        while not self.one_at_a_time.acquire(timeout=1.0):  # a predecessor hangs in there
            if self._stopped.is_set():
                return 0.0
        try:
            return self._run(begun)
        finally:
            self._running_since = None
            self.one_at_a_time.release()

    def _run(self, begun: int) -> float:
        collector = self.collector
        found: Collected[Any] | Unavailable
        try:
            found = collector.collect()
        except Exception as error:  # noqa: BLE001  (whatever it is, it costs nobody else's data, and it is named)
            found = Unavailable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        ended = self._clock()
        self._seconds = took = (ended - begun) / NS_PER_S
        if isinstance(found, Unavailable):
            self.failures += 1
            self._ok, self._problem = False, one_line(found.reason)
            backoff = min(MAX_BACKOFF_SECONDS, collector.interval_seconds * 2.0 ** min(self.failures, 16))
            return max(collector.interval_seconds, backoff)
        self.failures = 0
        self.reading = Reading(found.value, begun, ended, collector.target)
        self._ok, self._problem = True, None if found.problem is None else one_line(found.problem)
        wanted = collector.interval_seconds if found.next_seconds is None else found.next_seconds
        return max(wanted - took, wanted * LEAST_PAUSE)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._stopped.wait(self.run())

    def _thread(self, target: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"hwr-{self.collector.name}", daemon=True)
        thread.start()
        return thread


class Running:
    """The collectors of an agent. Any thread may ask; adding, removing, starting and stopping are one thread's."""

    def __init__(self, *, clock: Callable[[], int] = boot_ns) -> None:
        self._clock = clock
        self._runners: dict[tuple[CollectorName, str], _Runner] = {}
        self._locks: dict[tuple[CollectorName, str], threading.Lock] = {}
        self._started = False

    def add(self, collector: Collector[Any]) -> None:
        """Add a collector, and start it if the others are; one of the same name and target is replaced and its value forgotten."""
        key = (collector.name, collector.target)
        self.remove(*key)
        # One that hangs keeps its lock: whoever comes back under its name waits there and is named, and threads do not pile up.
        runner = _Runner(collector, self._clock, self._locks.setdefault(key, threading.Lock()))
        self._runners = {**self._runners, key: runner}  # whoever iterates meanwhile keeps the old one
        if self._started:
            runner.start()

    def remove(self, name: CollectorName, target: str = "") -> None:
        """Take a collector out, with its value; a run that is under way is left alone."""
        runner = self._runners.get((name, target))
        if runner is not None:
            runner.stop()
            self._runners = {key: other for key, other in self._runners.items() if other is not runner}
            if not runner.one_at_a_time.locked():
                self._locks.pop((name, target), None)

    def targets(self, name: CollectorName) -> tuple[str, ...]:
        """Return the targets of the collectors of a name."""
        return tuple(target for known, target in self._runners if known == name)

    def start(self) -> None:
        """Start a thread for each."""
        self._started = True
        for runner in self._runners.values():
            runner.start()

    def stop(self) -> None:
        """Let every thread end after its run, and wait a moment for those who do not hang."""
        self._started = False
        until = time.monotonic() + STOP_SECONDS
        for runner in self._runners.values():
            runner.stop()
        for runner in self._runners.values():
            if runner.thread is not None and runner.overdue_seconds is None:
                runner.thread.join(max(0.0, until - time.monotonic()))

    def run_once(self, names: Collection[CollectorName] | None = None, within_seconds: float | None = None) -> None:
        """Run each collector (of these names) once, those first whose data others need; none is waited for beyond its deadline.

        `within_seconds` bounds the whole: what has not answered by then is named in `health`, and may answer later.
        """
        until = None if within_seconds is None else time.monotonic() + within_seconds
        for stage in _ORDER:
            wanted = [runner for (name, _), runner in self._runners.items() if name in stage and (names is None or name in names)]
            threads = [(runner, runner.once()) for runner in wanted]
            begun = time.monotonic()
            for runner, thread in threads:
                last = begun + runner.collector.deadline_seconds + OVERDUE_SECONDS
                thread.join(max(0.0, (last if until is None else min(last, until)) - time.monotonic()))

    def latest(self, name: CollectorName) -> tuple[Reading[Any], ...]:
        """Return the newest value of each collector of a name, in the order they were added."""
        readings = (runner.reading for (known, _), runner in self._runners.items() if known == name)
        return tuple(reading for reading in readings if reading is not None)

    def health(self) -> tuple[CollectorHealth, ...]:
        """Return how each collector does."""
        return tuple(runner.health() for runner in self._runners.values())


def joined_problem(problems: Sequence[str], shown: int = 3) -> str | None:
    """Join what parts of a run complained of; a thousand of them are three and a number."""
    unique = list(dict.fromkeys(problems))
    if not unique:
        return None
    more = f" (and {len(unique) - shown} more)" if len(unique) > shown else ""
    return "; ".join(unique[:shown]) + more
