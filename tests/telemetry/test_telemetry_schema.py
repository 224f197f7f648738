"""The committed schemas and reference say what the classes say, and our own check agrees with jsonschema."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import referencing
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from telemetry_samples import EMITTED, RES, play, sample

from hwr.telemetry import events as E
from hwr.telemetry.event import Begin, End, Event, Progress
from hwr.telemetry.hub import Hub
from hwr.telemetry.schema import event_schema, index_schema, problems

REPOSITORY = Path(__file__).parents[2]
SCHEMAS = REPOSITORY / "docs" / "schema"
VALIDATORS = {kind.NAME: Draft202012Validator(event_schema(kind)) for kind in E.all_events()}


def written(kind: type[Event], chance: random.Random) -> dict[str, Any]:
    hub = Hub(RES, realtime_offset_ns=0)
    hub.emit(sample(kind, chance), op="0a1b" if issubclass(kind, Begin | End | Progress) else None)
    return dict(json.loads(hub.ring[0]))


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_reference_is_what_the_code_says(generate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """METRICS.md, EVENTS.md and docs/schema have not drifted; if they have, `python docs/generate.py` mends them."""
    code = generate.main(["--check"])
    assert (code, capsys.readouterr().err) == (0, "")


def test_a_drift_is_named(generate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed, a missing and a left-over file are each named, and writing mends all three."""
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--root", str(tmp_path), "--check"]) == 0
    capsys.readouterr()
    (tmp_path / "METRICS.md").write_text("old")
    (tmp_path / "docs/schema/events/hwr.store.lock.begin.json").unlink()
    (tmp_path / "docs/schema/events/hwr.gone.event.json").write_text("{}")
    assert generate.main(["--root", str(tmp_path), "--check"]) == 1
    named = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert named == ["METRICS.md", "docs/schema/events/hwr.gone.event.json", "docs/schema/events/hwr.store.lock.begin.json"]
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--root", str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("kind", E.all_events(), ids=lambda kind: kind.NAME)
def test_each_schema_is_one(kind: type[Event]) -> None:
    """A schema is valid in its dialect and has the class's docstring."""
    schema = event_schema(kind)
    Draft202012Validator.check_schema(schema)
    assert schema["description"]
    assert json.loads((SCHEMAS / "events" / f"{kind.NAME}.json").read_text()) == schema


@pytest.mark.parametrize("kind", EMITTED, ids=lambda kind: kind.NAME)
def test_what_is_written_is_valid(kind: type[Event]) -> None:
    """Whatever an event of a class holds, its record fits the schema."""
    for seed in range(20):
        record = written(kind, random.Random(seed))
        assert problems(record) == []
        assert VALIDATORS[kind.NAME].is_valid(record)


def test_checkpoints_and_notices_are_valid() -> None:
    """So do the two events that a hub writes by itself."""
    hub = Hub(RES, realtime_offset_ns=0)
    assert problems(json.loads(hub._segment_head(1))) == []
    play(hub, 50, random.Random(1))
    record = json.loads(hub._segment_head(2))
    assert record["attrs"]["state"]["seq"] == record["seq"] == hub.state.seq
    assert problems(record) == []
    assert VALIDATORS[E.SegmentOpened.NAME].is_valid(record)
    assert problems({**record, "res": None}) != []


MUTATIONS = st.sampled_from([None, True, 1, 0, -1, 1.0, 2.5, "", "x", [], ["a"], [1], {}, {"a": 1}, "ok", 10**30])


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EMITTED), st.integers(0, 50), st.data())
def test_our_check_agrees_with_jsonschema(kind: type[Event], seed: int, data: st.DataObject) -> None:
    """Change, remove or add a key anywhere: both say the same."""
    record = written(kind, random.Random(seed))
    changed = copy.deepcopy(record)
    table = data.draw(st.sampled_from([changed, changed["attrs"]]))
    key = data.draw(st.sampled_from([*table, "unknown", "cut"]))
    if data.draw(st.booleans()) and key != "event":
        table.pop(key, None)
    elif key != "event":
        table[key] = data.draw(MUTATIONS)
    assert (problems(changed) == []) is VALIDATORS[kind.NAME].is_valid(changed), (changed, problems(changed))


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)),
    st.sampled_from(sorted(VALIDATORS)),
)
def test_the_check_takes_anything(value: Any, name: str) -> None:
    """It answers whatever it is given, and says something about what is no record."""
    assert problems(value)
    assert problems({"event": value})
    assert problems({"event": name, "attrs": value})


def test_problems_are_named() -> None:
    """Each problem names the field, what is there, and what should be."""
    record = written(E.LockEnded, random.Random(3))
    record["attrs"] |= {"lock": "padlock", "seconds": "1"}
    del record["op"]
    assert problems(record) == [
        "op: is missing",
        "attrs.seconds: '1' is not of type number or null",
        "attrs.lock: 'padlock' is none of domain_init, build, artifact, admission, pin",
    ]
    assert problems({"event": "hwr.later.event.come"}) == ["event: 'hwr.later.event.come' is not an event of schema version 1"]


def test_the_index_finds_each_schema() -> None:
    """The index alone validates any record, with the files that it refers to."""
    assert json.loads((SCHEMAS / "index.json").read_text()) == index_schema()
    base = (SCHEMAS / "index.json").as_uri()

    def retrieve(uri: str) -> referencing.Resource[Any]:
        return referencing.Resource.from_contents(json.loads(Path(uri.removeprefix("file://")).read_text()))

    registry: referencing.Registry[Any] = referencing.Registry(retrieve=retrieve)  # type: ignore[call-arg]
    index = Draft202012Validator({**index_schema(), "$id": base}, registry=registry)
    record = written(E.LeaseOpened, random.Random(1))
    assert index.is_valid(record)
    assert not index.is_valid({**record, "event": "hwr.store.lease.close"})
    assert not index.is_valid({**record, "event": "hwr.store.lease.unknown"})
