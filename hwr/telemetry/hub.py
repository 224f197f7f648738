"""The hub: where every room's events go.

Owns the order of one process's events, the state folded from them, and their delivery: journal, logging, listeners.
Promises that emitting never raises, never waits for another process, and works from threads, finalizers and forked children;
disabled means no file and no thread. Refuses to interpret: the fold does that.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

from hwr.errors import EXIT_TIMEOUT, HwrError
from hwr.outcomes import FailureCode, Outcome
from hwr.telemetry import logs
from hwr.telemetry.clock import boot_ns, rfc3339
from hwr.telemetry.encode import SCHEMA_VERSION, encode, encode_checkpoint
from hwr.telemetry.event import Begin, End, Event, Progress, attributes
from hwr.telemetry.events import EventsDropped, SegmentOpened
from hwr.telemetry.fold import apply
from hwr.telemetry.journal import JournalWriter
from hwr.telemetry.state import WorkerState

RING_EVENTS: Final = 2000
Listener = Callable[[Event, dict[str, Any]], None]

_parent: ContextVar[str | None] = ContextVar("hwr_parent_operation", default=None)


class Hub:
    """Collect the events of one process."""

    def __init__(self, res: dict[str, Any], *, realtime_offset_ns: int) -> None:
        self.res = res
        self.state = WorkerState(res=res)
        self.ring: deque[bytes] = deque(maxlen=RING_EVENTS)
        self._offset_ns = realtime_offset_ns
        self._journal: JournalWriter | None = None
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Event, dict[str, Any]]] = deque()
        self._busy = False
        self._abandoned = False
        self._seq = 0
        self._ops = 0
        self._prefix = os.urandom(4).hex()

    def open_journal(self, make: Callable[[Callable[[int], bytes]], JournalWriter]) -> None:
        """Start writing to a journal; events so far are in the ring and in the checkpoint only.

        Raises:
            OSError: no segment can be made.
        """
        with self._lock:
            self._journal = make(self._segment_head)

    def abandon(self) -> None:
        """Close the parent's journal in a forked child, without the lock: whoever held it does not exist here.

        A span that was open across the fork ends nowhere: its begin stands in the parent's journal, and so will its end.
        """
        self._abandoned = True
        self._lock = threading.RLock()
        if self._journal is not None:
            self._journal.close()
        _parent.set(None)

    def close_journal(self) -> None:
        """Close the journal's descriptor; later events go to the ring."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def sync(self) -> None:
        """Make the journal durable, before something that may take the node down."""
        with self._lock:
            if self._journal is not None:
                self._journal.sync()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event, record)` for each event; return what ends it. A listener must not raise."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(item for item in self._listeners if item is not listener)

        return stop

    def new_operation(self) -> str:
        """Return an id for a begin/end pair."""
        with self._lock:
            self._ops += 1
            return f"{self._prefix}{self._ops:08x}"

    def snapshot(self) -> WorkerState:
        """Return a copy of the state, consistent and detached."""
        with self._lock:
            busy, self._busy = self._busy, True  # what a finalizer emits meanwhile waits: the state stands still while it is copied
            try:
                state = copy.deepcopy(self.state)
                if self._journal is not None and self._journal.dropped:  # lost, and not told yet: told with the next written event
                    cause = self._journal.drop_cause
                    state.dropped[cause] = state.dropped.get(cause, 0) + self._journal.dropped
            finally:
                self._busy = busy
        self._drain()
        return state

    def emit(self, event: Event, *, op: str | None = None, parent: str | None = None) -> None:
        """Deliver an event. An event emitted while another is written (a finalizer, a log handler) follows it."""
        if self._abandoned:
            return
        # The record is built outside the lock: its times are those of the call.
        now = boot_ns()
        record: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "ts": rfc3339(now + self._offset_ns),
            "mono_ns": now,
            "seq": 0,
            "event": event.NAME,
            "sev": logs.severity_of(event).value,
        }
        if op is not None:
            record["op"] = op
        above = parent if parent is not None else _parent.get()
        if above is not None and above != op:
            record["parent"] = above
        record["attrs"] = attributes(event)
        self._drain((event, record))

    def _drain(self, *more: tuple[Event, dict[str, Any]]) -> None:
        delivered: list[tuple[Event, dict[str, Any]]] = []
        with self._lock:
            # Within the lock: no other thread may deliver it, since the line must be out before this thread goes on (R6).
            self._waiting.extend(more)
            if self._busy:  # this thread is writing further up its stack, and goes on with what waits
                return
            self._busy = True
            try:
                while self._waiting:
                    event, record = self._waiting.popleft()
                    self._deliver(event, record, delivered)
            finally:
                self._busy = False
            listeners = self._listeners
        # Outside the lock: a log handler may be slow, or emit; listeners first, so that what it emits comes to them afterwards.
        for one, written in delivered:
            for listener in listeners:
                listener(one, written)
            logs.project(one, written["attrs"])

    def _deliver(self, event: Event, record: dict[str, Any], delivered: list[tuple[Event, dict[str, Any]]]) -> None:
        self._seq += 1
        record["seq"] = self._seq
        journal = self._journal
        line = encode(record)
        written = True
        if journal is None:
            self.ring.append(line)
        else:
            written = journal.write(line)
        # After the write: a segment that begins with this line has the state before it in its checkpoint.
        apply(self.state, record)
        delivered.append((event, record))
        if written and journal is not None and journal.dropped:
            self._tell_drops(journal, record, delivered)

    def _tell_drops(self, journal: JournalWriter, like: dict[str, Any], delivered: list[tuple[Event, dict[str, Any]]]) -> None:
        """Write how many events were lost; if that is lost too, the count stays and the number is used again."""
        count = journal.dropped
        event = EventsDropped(count=count, cause=journal.drop_cause)
        record = {"v": SCHEMA_VERSION, "ts": like["ts"], "mono_ns": like["mono_ns"], "seq": self._seq + 1}
        record |= {"event": event.NAME, "sev": event.SEV.value, "attrs": attributes(event)}
        if journal.write(encode(record)):
            self._seq += 1
            journal.dropped -= count
            apply(self.state, record)
            delivered.append((event, record))
        else:
            journal.dropped = count

    def _segment_head(self, number: int) -> bytes:
        """Return the first line of a segment: the resource and the state so far; its `seq` is that of the last event in that state."""
        event = SegmentOpened(segment=number)
        now = boot_ns()
        attrs = {"segment": number, "state": self.state.to_json() if self.state.seq else None}
        return encode_checkpoint(
            {
                "v": SCHEMA_VERSION,
                "ts": rfc3339(now + self._offset_ns),
                "mono_ns": now,
                "seq": self.state.seq,
                "event": event.NAME,
                "sev": event.SEV.value,
                "res": self.res,
                "attrs": attrs,
            }
        )


class Span:
    """A begin event, what happens meanwhile, and the end event: written whatever happens.

    Leaving the block writes the end with its outcome; an exception makes it `failed` or `timeout` with the exception's code.
    """

    def __init__(self, hub: Hub | None, begin: Begin, end: dict[str, Any]) -> None:
        self._hub, self._begin = hub, begin
        self._facts = end
        self._op: str | None = None
        self._begun_ns = 0
        self._token: Any = None
        self.seconds = 0.0

    def __enter__(self) -> Span:
        self._begun_ns = boot_ns()
        if self._hub is not None:
            self._op = self._hub.new_operation()
            self._hub.emit(self._begin, op=self._op)
            self._token = _parent.set(self._op)
        return self

    def add(self, **facts: Any) -> None:
        """Set fields of the end event."""
        self._facts.update(facts)

    def failed(self, error: HwrError) -> None:
        """Say that it ended in this failure although no exception leaves the block."""
        self._facts.update(_failure(error))

    def progress(self, event: Progress) -> None:
        """Say how far it is."""
        if self._hub is not None:
            self._hub.emit(event, op=self._op)

    @property
    def elapsed(self) -> float:
        """Seconds since the begin event."""
        return (boot_ns() - self._begun_ns) / 1e9

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.seconds = self.elapsed
        if self._hub is None:
            return
        with contextlib.suppress(ValueError):  # closed from another context: a generator's
            _parent.reset(self._token)
        facts: dict[str, Any] = {"outcome": Outcome.OK, **self._facts}
        if error is not None:
            facts.update(_failure(error))
        end: type[End] = self._begin.END
        facts.setdefault("seconds", self.seconds)
        self._hub.emit(end(**facts), op=self._op)


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, HwrError):
        outcome = Outcome.TIMEOUT if error.exit_code == EXIT_TIMEOUT else Outcome.FAILED
        return {"outcome": outcome, "error_code": error.code.value, "error_reason": error.reason or None}
    if not isinstance(error, Exception):  # an interrupt or an exit: somebody wanted it
        return {"outcome": Outcome.CANCELLED, "error_reason": type(error).__name__}
    return {"outcome": Outcome.FAILED, "error_code": FailureCode.INTERNAL.value, "error_reason": type(error).__name__}
