"""J4: whatever an event holds, its line is JSON of at most 64 KiB that no terminal minds."""

from __future__ import annotations

import json
import math
from pathlib import PurePosixPath
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import RES

from hwr.outcomes import Phase
from hwr.telemetry import events as E
from hwr.telemetry.encode import MAX_LINE_BYTES, decode, encode
from hwr.telemetry.event import attributes, clean
from hwr.telemetry.hub import Hub
from hwr.telemetry.schema import problems


class Odd:
    """An object of somebody else's whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def lines_of(hub: Hub) -> list[bytes]:
    return list(hub.ring)


def emitted(event: Any) -> bytes:
    hub = Hub(RES, realtime_offset_ns=0)
    hub.emit(event)
    return lines_of(hub)[0]


@pytest.mark.parametrize(
    ("raw", "written"),
    [
        ("\ud800 alone", "\\ud800 alone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("two\nlines\r", "two\\x0alines\\x0d"),
        ("\x00", "\\x00"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\u2028", "\\u2028"),
        ("Grüße 世界", "Grüße 世界"),
    ],
)
def test_j4_text_is_escaped_once(raw: str, written: str) -> None:
    """J4: control characters, overrides and lone surrogates become their names; other text stays."""
    line = emitted(E.EndpointFailed(address=raw, port=1, problem=raw))
    record = json.loads(line)
    assert record["attrs"]["address"] == record["attrs"]["problem"] == written
    assert decode(line) == record
    assert line.count(b"\n") == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_j4_no_number_is_null(value: float) -> None:
    """J4: NaN and the infinities become null, for the live state as for the journal."""
    event = E.LeaseClosed(key="k", lease="l", held_seconds=value)
    assert attributes(event)["held_seconds"] is None
    assert json.loads(emitted(event))["attrs"]["held_seconds"] is None
    assert clean([value, {"x": value}]) == [None, {"x": None}]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64, 10**300, -(10**300), 10**400])
def test_j4_integers_beyond_64_bits(value: int) -> None:
    """J4: what JSON cannot hold exactly is the nearest number, and null beyond those."""
    line = emitted(E.SourceRejected(reason="lfs_pointer", file="f", problem="p", expected_bytes=value))
    told = json.loads(line)["attrs"]["expected_bytes"]
    assert told is None if abs(value) > 1e308 else told == float(value)


def test_j4_objects_of_others() -> None:
    """J4: an event never raises for what it was given: a path, bytes, a text that raises, a list that holds itself."""
    ring: list[Any] = []
    ring.append(ring)
    cyclic: dict[Any, Any] = {3: ring, Odd(): 1}
    cyclic["self"] = cyclic
    for value in (PurePosixPath("/a"), b"\xff", Odd(), ring, cyclic, Phase.READY, {1, 2}, True):
        assert decode(emitted(E.ShardsIgnored(names=value))) is not None  # type: ignore[arg-type]


class Real(float):
    """A float of another library, as NumPy's."""


class Whole(int):
    """An int of another library."""


def test_j4_numbers_of_others() -> None:
    """J4: subclasses of numbers are written as numbers."""
    record = json.loads(emitted(E.LeaseClosed(key="k", lease="l", held_seconds=Real(1.5))))
    assert record["attrs"]["held_seconds"] == 1.5
    record = json.loads(emitted(E.StepsBegun(steps=Whole(3))))
    assert record["attrs"]["steps"] == 3


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda x: st.lists(x) | st.dictionaries(st.text(st.characters()), x),
    )
)
def test_j4_any_value(value: Any) -> None:
    """J4: any value becomes printable JSON, and what is clean stays as it is."""
    done = clean(value)
    assert clean(done) == done
    text = orjson.dumps(done).decode()
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in text)


def test_a_line_is_at_most_64_kib_and_says_what_was_cut() -> None:
    """A list of 100,000 is cut to its first entries; `cut` has the length, and every projection sees the same."""
    hub = Hub(RES, realtime_offset_ns=0)
    seen: list[dict[str, Any]] = []
    hub.listen(lambda _, record: seen.append(record))
    hub.emit(E.MissExplained(key="k" * 64, sections=("source",) * 100_000, candidates=7))
    (line,) = lines_of(hub)
    record = json.loads(line)
    assert len(line) <= MAX_LINE_BYTES
    assert record["attrs"]["cut"] == {"sections": 100_000}
    assert record["attrs"]["candidates"] == 7
    assert 0 < len(record["attrs"]["sections"]) <= 100
    assert seen == [record]
    assert hub.state.lookup_misses == {"source": len(record["attrs"]["sections"])}
    assert problems(record) == []


@given(
    st.lists(st.text(st.characters(), max_size=5000), max_size=60).map(lambda texts: [text * 9 for text in texts]),
    st.text(st.characters(), max_size=5000),
)
def test_no_line_is_longer_than_64_kib(names: list[str], problem: str) -> None:
    """However long the parts are, the line has room for them, or says that they went."""
    record = {
        "v": 1,
        "seq": 1,
        "mono_ns": 1,
        "event": "x",
        "op": "o" * 12,
        "attrs": {"names": clean(names), "problem": clean(problem * 10)},
    }
    before = set(record["attrs"])
    line = encode(record)
    assert len(line) <= MAX_LINE_BYTES
    told = json.loads(line)["attrs"]
    assert before <= told.keys() | told.get("cut", {}).keys() or "attrs" in told["cut"]


NO_RECORDS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"event":1}',
    b"\xff\xfe",
    b'{"event":"x","attrs":[],"mono_ns":1,"seq":1}',
    b'{"event":"x","attrs":{},"mono_ns":1.5,"seq":1}',
    b'{"event":"x","attrs":{},"mono_ns":true,"seq":1}',
    b'{"event":"x","attrs":{},"mono_ns":1,"seq":1}}',
)


@pytest.mark.parametrize("line", NO_RECORDS)
def test_what_is_no_record_reads_as_none(line: bytes) -> None:
    """The reader guesses at nothing."""
    assert decode(line) is None


def test_a_reader_escapes_what_the_writer_should_have() -> None:
    """J4: a line that was not written by us brings nothing raw to a terminal either."""
    line = b'{"event":"x","seq":1,"mono_ns":1,"attrs":{"a":"\\u001b[31m","b":"\xc2\x9b","\\n":"\\t"}}'
    record = decode(line)
    assert record is not None
    assert record["attrs"] == {"a": "\\x1b[31m", "b": "\\x9b", "\\x0a": "\\x09"}


def test_only_a_checkpoint_may_be_longer() -> None:
    """A longer line is none of ours, also when it names the checkpoint somewhere."""
    filler = "x" * MAX_LINE_BYTES
    for event, known in (("hwr.journal.segment.open", True), ("hwr.worker.process.start", False)):
        line = orjson.dumps({"hwr.journal.segment.open": 1, "event": event, "seq": 1, "mono_ns": 1, "attrs": {"a": filler}})
        assert (decode(line) is not None) is known
