"""Emitting never raises, never deadlocks, keeps its order; the log lines are the same events (R6)."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from telemetry_samples import RES

from hwr import telemetry
from hwr.errors import DomainUnavailable, LockTimeout
from hwr.telemetry import events as E
from hwr.telemetry.hub import Hub, Span
from hwr.telemetry.journal import JournalWriter
from hwr.telemetry.reader import read_state


class Lines(logging.Handler):
    """Keep what is logged; do something while it is."""

    def __init__(self, meanwhile: object = None) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.meanwhile = meanwhile

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if callable(self.meanwhile):
            self.meanwhile()

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextlib.contextmanager
def listening(handler: Lines, level: int = logging.INFO, name: str = "hwr") -> Iterator[Lines]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_r6_two_begin_lines_and_one_end_line_if_the_second_of_two_fails() -> None:
    """R6: the line precedes the call, synchronously: what is written when the second call fails shows it."""
    during: list[list[str]] = []
    with listening(Lines()) as lines, telemetry.record():
        with telemetry.span(E.RestoreBegun(key="ab" * 32)) as span:
            during.append(lines.texts())
            span.add(tensors=3)
        with contextlib.suppress(DomainUnavailable), telemetry.span(E.RestoreBegun(key="cd" * 32)):
            during.append(lines.texts())
            raise DomainUnavailable(root="/x", problem="gone", reason="io")
    first, second = during
    assert first == ["restore begins key=abababababab"]
    assert len(second) == 3
    assert second[2] == "restore begins key=cdcdcdcdcdcd"
    assert second[1].startswith("restore done tensors=3 in ")
    begins = [text for text in lines.texts() if " begins " in text]
    ends = [text for text in lines.texts() if " done " in text]
    assert (len(begins), len(ends)) == (2, 1)
    assert lines.texts()[3].startswith("restore failed error.code=domain_unavailable error.reason=io in ")


def test_r6_loggers_and_levels() -> None:
    """R6: one logger a room, the event's own level, a failed pair at least a warning; the record carries the event."""
    with listening(Lines(), logging.DEBUG) as lines, telemetry.record() as recording:
        telemetry.emit(E.LifecycleAdvanced(state="carrier_owned"))
        telemetry.emit(E.EndpointOpened(address="::1", port=1))
        telemetry.emit(E.LeaseCloseRefused(key="k", lease="l", live_tensors=2))
        telemetry.emit(E.SourceRejected(reason="truncated", file="f", problem="p", missing_bytes=2048))
        telemetry.emit(E.LockEnded(lock="build", outcome="timeout", seconds=1.0))
    assert [(record.name, record.levelname) for record in lines.records] == [
        ("hwr.runtime", "DEBUG"),
        ("hwr.telemetry", "INFO"),
        ("hwr.store", "WARNING"),
        ("hwr.checkpoint", "ERROR"),
        ("hwr.store", "WARNING"),
    ]
    assert lines.texts()[0] == "lifecycle advance state=carrier_owned"
    assert lines.texts()[3] == "source reject reason=truncated file=f problem=p missing=2.00 KiB"
    assert lines.texts()[4] == "lock timed out lock=build in 1 s"
    assert [record.hwr_event for record in lines.records] == recording.names()  # type: ignore[attr-defined]
    assert recording.records[4]["sev"] == "WARN"


def test_r6_no_handler_and_no_level_of_ours(python: object, tmp_path: Path) -> None:
    """R6: we install nothing: no logger of ours has a handler or a level after telemetry was used."""
    code = """
import logging, sys
from hwr import telemetry
from hwr.telemetry import events as E
telemetry.configure(run_dir=sys.argv[1])
telemetry.emit(E.StepsEnded(steps=1))
telemetry.close()
ours = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] == "hwr"]
assert len(ours) > 1
assert not any(logger.handlers or logger.level or not logger.propagate for logger in ours)
assert not logging.root.handlers
"""
    assert callable(python)
    python(code, tmp_path)


def test_an_event_of_a_log_handler_follows(tmp_path: Path) -> None:
    """A handler that emits: its event comes after the one it was told of, and nothing deadlocks or recurses."""
    directory = telemetry.configure(run_dir=tmp_path)
    assert directory is not None
    handler = Lines()
    handler.meanwhile = lambda: telemetry.emit(E.StepsEnded(steps=1)) if len(handler.records) < 5 else None
    with listening(handler, name="hwr.runtime"), telemetry.record() as recording:
        telemetry.emit(E.StepsBegun(steps=1))
    assert recording.names()[:2] == ["hwr.runtime.steps.begin", "hwr.runtime.steps.end"]
    assert [record["seq"] for record in recording.records] == sorted(record["seq"] for record in recording.records)
    assert read_state(directory).seq_gaps == 0


def test_a_log_handler_that_emits_when_nothing_can_be_written(tmp_path: Path) -> None:
    """The one warning that no journal is written may itself lead to events: there is one hub, not one for each."""
    (tmp_path / "file").write_text("")
    handler = Lines(lambda: telemetry.emit(E.StepsEnded(steps=1)))
    with listening(handler, name="hwr.telemetry"):
        assert telemetry.configure(run_dir=tmp_path / "file") is None
    assert len(handler.records) == 1
    state = telemetry.snapshot()
    assert state is not None
    assert state.events["hwr.runtime.steps.end"] == 1


def test_a_log_handler_that_raises_stops_nobody() -> None:
    """What the host's handler raises does not reach whoever emits."""

    def fail() -> None:
        raise ValueError("the host's")

    with listening(Lines(fail)), telemetry.record() as recording, telemetry.span(E.RestoreBegun(key="k")):
        pass
    assert recording.names() == ["hwr.loader.restore.begin", "hwr.loader.restore.end"]


class Finalized:
    """Emits when it is collected; holds itself, so that only the collector ends it."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.me = hub, self

    def __del__(self) -> None:
        self.hub.emit(E.StepsEnded(steps=1))


def test_events_of_finalizers(tmp_path: Path) -> None:
    """The collector may run anywhere, also inside emit and snapshot: nothing deadlocks, every event counts, the order stands."""
    telemetry.configure(run_dir=tmp_path)
    from hwr.telemetry.process import current_hub

    hub = current_hub()
    assert hub is not None
    before = gc.get_threshold()
    gc.set_threshold(1)  # at every allocation, almost
    try:
        for _ in range(300):
            Finalized(hub)
            hub.emit(E.StageEnded(stage="lookup", seconds=0.0), op="a")
            hub.snapshot()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    state = hub.snapshot()
    assert state.events["hwr.runtime.steps.end"] == 300
    assert state.seq_gaps == 0
    directory = telemetry.journal_directory()
    assert directory is not None
    assert read_state(directory) == state


def test_an_event_within_the_write_of_another_follows_it(tmp_path: Path) -> None:
    """The collector runs while a line is written, and a finalizer emits: its line comes next, with the next number."""
    hub = Hub(RES, realtime_offset_ns=0)

    class Interrupted(JournalWriter):
        def write(self, line: bytes) -> bool:
            if b"steps.begin" in line:
                hub.emit(E.StepsEnded(steps=1))
            return super().write(line)

    hub.open_journal(lambda head: Interrupted(tmp_path, head))
    hub.emit(E.StepsBegun(steps=1), op="a")
    names = [json.loads(line)["event"] for line in (tmp_path / "events.000001.jsonl").read_bytes().splitlines()]
    assert names == ["hwr.journal.segment.open", "hwr.runtime.steps.begin", "hwr.runtime.steps.end"]
    assert read_state(tmp_path) == hub.snapshot()


def test_an_event_within_a_copy_of_the_state_waits() -> None:
    """The collector runs while the state is copied: the copy is of one moment, and the event comes after it."""
    hub = Hub(RES, realtime_offset_ns=0)

    class Interrupting:
        def __deepcopy__(self, _: object) -> float:
            hub.emit(E.StageEnded(stage="publish", seconds=1.0), op="x")
            return 1.0

    hub.state.stage_seconds = {"lookup": Interrupting(), "restore": 2.0}  # type: ignore[dict-item]
    copied = hub.snapshot()
    assert copied.stage_seconds == {"lookup": 1.0, "restore": 2.0}
    assert hub.state.stage_seconds["publish"] == 1.0


def test_a_thread_has_its_line_out_before_it_goes_on() -> None:
    """R6 with threads: when emit returns, the line of this event is out, whichever thread was writing."""
    hub = Hub(RES, realtime_offset_ns=0)
    missing: list[int] = []
    seen: set[int] = set()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.add(record.hwr_attrs["port"])  # type: ignore[attr-defined]

    def emit(base: int) -> None:
        for port in range(base, base + 400):
            hub.emit(E.EndpointOpened(address="a", port=port))
            if port not in seen:
                missing.append(port)

    handler = Seen()
    logger = logging.getLogger("hwr.telemetry")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        threads = [threading.Thread(target=emit, args=(base,)) for base in (0, 1000, 2000, 3000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert missing == []


def test_spans_nest_and_tell_how_they_ended() -> None:
    """The op is shared by the pair, the parent is the span around it, a failure has its code, a timeout its own outcome."""
    hub = Hub(RES, realtime_offset_ns=0)
    records: list[dict[str, object]] = []
    hub.listen(lambda _, record: records.append(record))
    timeout = LockTimeout(path="/p", waited=1.0, lock="build", holder="nobody")

    def fail() -> None:
        with Span(hub, E.StepsBegun(steps=1), {}):
            with contextlib.suppress(LockTimeout), Span(hub, E.LookupBegun(key="k", validation="full_checksum"), {}):
                raise timeout
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    outer, inner, inner_end, outer_end = records
    assert outer["op"] == outer_end["op"] == inner["parent"] == inner_end["parent"]
    assert inner["op"] == inner_end["op"] != outer["op"]
    assert "parent" not in outer
    ended = inner_end["attrs"]
    assert isinstance(ended, dict)
    assert (ended["outcome"], ended["error.code"]) == ("timeout", "active_build_timeout")
    ended = outer_end["attrs"]
    assert isinstance(ended, dict)
    assert (ended["outcome"], ended["error.code"], ended["error.reason"]) == ("failed", "internal", "ZeroDivisionError")
    assert hub.state.ops == {}


def test_recording_works_with_telemetry_off_and_leaves_nothing(tmp_path: Path) -> None:
    """The recording aid needs no configuration, and does not undo one that is made meanwhile."""
    with telemetry.record() as recording:
        telemetry.emit(E.StepsEnded(steps=4))
    assert [event.steps for event in recording.of(E.StepsEnded)] == [4]
    assert telemetry.snapshot() is None
    with telemetry.record():
        directory = telemetry.configure(run_dir=tmp_path)
    assert telemetry.journal_directory() == directory
    assert telemetry.snapshot() is not None


def test_durable_when_asked(tmp_path: Path) -> None:
    """`sync` and `close` never raise, configured or not, once or twice."""
    from hwr.telemetry import process

    process.sync()
    telemetry.configure(run_dir=tmp_path)
    process.sync()
    telemetry.close()
    telemetry.close()
    process.sync()
    telemetry.emit(E.StepsEnded(steps=1))
