"""Rules of the house that telemetry keeps: names, pairs, and nothing that changes what it looks at (R26)."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

import hwr
from hwr.outcomes import Operation
from hwr.telemetry import events as E
from hwr.telemetry.catalogue import Kind, Metric, Scope
from hwr.telemetry.event import Begin, End, Event, Progress
from hwr.telemetry.fold import _OWN, _STEPS
from hwr.telemetry.metrics import METRICS
from hwr.telemetry.node_metrics import NODE_METRICS
from hwr.telemetry.state import PHASE_OF_OPERATION

SOURCES = sorted(Path(hwr.__file__).parent.rglob("*.py"))
CATALOGUE = (*METRICS, *NODE_METRICS)
PARENTS_OF_EVENTS = (Event, Begin, End, Progress)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(Path(hwr.__file__).parent).as_posix())
def test_r26_nothing_is_collected_trimmed_or_dropped(path: Path) -> None:
    """R26: no call of gc.collect or malloc_trim, and no word of drop_caches outside a docstring, anywhere in hwr/."""
    assert _offences(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import gc\ngc.collect()",
        "from gc import collect",
        "import gc as g\ng.collect(2)",
        "libc.malloc_trim(0)",
        "getattr(libc, 'malloc_trim')(0)",
        "open('/proc/sys/vm/drop_caches', 'w')",
    ],
)
def test_r26_the_lint_can_fail(code: str) -> None:
    """R26: each way to do it is seen."""
    assert _offences(ast.parse(code))


def _offences(tree: ast.AST) -> list[str]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("collect", "malloc_trim"):
            # Prometheus collectors have a method of that name; none of ours is called on an object named so.
            if node.attr == "malloc_trim" or (isinstance(node.value, ast.Name) and node.value.id in _gc_names(tree)):
                found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "gc" and any(name.name in ("collect", "*") for name in node.names):
            found.append(f"line {node.lineno}: from gc import")
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and re.search("drop_caches|malloc_trim", str(node.value)):
            found.append(f"line {node.lineno}: {node.value!r}")
    return found


def _gc_names(tree: ast.AST) -> set[str]:
    imports = [name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    return {"gc", *(name.asname for name in imports if name.name == "gc" and name.asname)}


@pytest.mark.parametrize("kind", E.all_events(), ids=lambda kind: kind.__name__)
def test_events_are_named_by_the_rule(kind: type[Event]) -> None:
    """`hwr.<room>.<noun>.<verb>`, a docstring, frozen, slotted, and field types that a schema can say."""
    assert re.fullmatch(r"hwr(\.[a-z][a-z0-9_]*){3}", kind.NAME)
    assert kind.__doc__
    assert kind.__doc__.rstrip().endswith(".")
    assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__slots__
    assert dataclasses.fields(kind) is not None
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for name, hint in typing.get_type_hints(kind).items():
        if name.endswith("_bytes") or name == "bytes":
            assert hint in (int, int | None), name
        if name.endswith("seconds"):
            assert hint in (float, float | None), name


def test_every_class_has_a_name_of_its_own() -> None:
    """No two classes share a name, and none is forgotten."""
    classes = [kind for kind in vars(E).values() if isinstance(kind, type) and issubclass(kind, Event) and kind not in PARENTS_OF_EVENTS]
    assert len({kind.NAME for kind in classes}) == len(classes) == len(E.all_events())


def test_begin_and_end_belong_together() -> None:
    """A begin has an end of the same room and noun, an end exactly one begin, a progress a begin; verbs say which is which."""
    begins = [kind for kind in E.all_events() if issubclass(kind, Begin)]
    ends = [kind for kind in E.all_events() if issubclass(kind, End)]
    assert sorted(kind.END.NAME for kind in begins) == sorted(kind.NAME for kind in ends)
    for kind in begins:
        assert kind.END.NAME.removesuffix("end") + "begin" == kind.NAME
        assert kind.OPERATION is None or kind.OPERATION in Operation
    nouns = {kind.NAME.rpartition(".")[0] for kind in begins}
    for kind in E.all_events():
        if issubclass(kind, Progress):
            noun, _, verb = kind.NAME.rpartition(".")
            assert (noun in nouns, verb) == (True, "progress")


def test_what_an_end_needs_is_known_when_it_begins() -> None:
    """A failure comes early: a field that an end event must have is one of its begin event, or has its value before the block."""
    known_before = {(E.ResolutionEnded, "result"), (E.ResolutionEnded, "mode")}
    for kind in E.all_events():
        if not issubclass(kind, Begin):
            continue
        given = {field.name for field in dataclasses.fields(kind)}
        for field in dataclasses.fields(kind.END):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            assert not required or field.name in given or (kind.END, field.name) in known_before, (kind.END, field.name)


def test_every_event_means_something_to_the_fold() -> None:
    """The fold knows every class; an operation that changes the phase has its word."""
    assert set(_STEPS) == {kind.NAME for kind in E.all_events()}
    assert set(_OWN) <= set(E.all_events())
    # Those of a worker that serves, and a tool's: the phase stays.
    without = {Operation.TRANSFER, Operation.ALLGATHER, Operation.COLLECTIVE, Operation.PROBE}
    assert set(PHASE_OF_OPERATION) == set(Operation) - without


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_metrics_are_named_by_the_rule(metric: Metric) -> None:
    """The prefix, base units at the end of the name, help that ends in a full stop, labels from closed sets."""
    base = metric.name.removesuffix("_total")
    for unit in ("bytes", "seconds"):
        if f"_{unit}" in metric.name:
            assert base.endswith(f"_{unit}")
    if metric.kind is Kind.INFO:
        assert base.endswith("_info")
    if "timestamp" in metric.name:
        assert base.endswith("_timestamp_seconds")
        assert metric.kind is Kind.GAUGE
    assert metric.help.endswith(".")
    for label in metric.labels:
        assert label.values is not None or label.name == "artifact" or (label.name == "domain" and metric.scope is Scope.NODE)
        assert label.name not in {"pid", "path", "tensor", "model", "message", "le", "engine", "rank"}
        assert len(set(label.values or ())) == len(label.values or ())


def test_metric_names_are_unique_and_not_prefixes_of_samples() -> None:
    """No two metrics expose one sample name."""
    names = [metric.name for metric in CATALOGUE]
    for metric in CATALOGUE:
        if metric.kind is Kind.HISTOGRAM:
            names += [f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")]
    assert len(names) == len(set(names))


def test_a_declaration_that_breaks_a_rule_cannot_be_made() -> None:
    """The catalogue refuses it."""
    for name, kind, rest in (
        ("hwr_things", Kind.COUNTER, {}),
        ("hwr_things_total", Kind.GAUGE, {}),
        ("hwr_wait_milliseconds", Kind.GAUGE, {}),
        ("hwr:things", Kind.GAUGE, {}),
        ("things", Kind.GAUGE, {}),
        ("hwr_wait", Kind.GAUGE, {"unit": "seconds"}),
        ("hwr_wait_seconds", Kind.HISTOGRAM, {}),
        ("hwr_phase", Kind.STATESET, {}),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            Metric(name, kind, "Help.", lambda _: {}, **rest)  # type: ignore[arg-type]


def test_series_of_a_rank_fit_the_budget() -> None:
    """At most 350 series a rank, and 3,000 for an agent with eight ranks, an artifact, a store, and what it says of the node."""
    rank = sum(metric.series() for metric in METRICS if metric.scope is Scope.WORKER)
    sums = sum(metric.series() for metric in METRICS if metric.scope is Scope.PROCESS)
    assert rank <= 350
    assert 8 * rank + sums + sum(metric.series() for metric in NODE_METRICS) <= 3000


def test_importing_telemetry_loads_nothing_heavy(python: Callable[..., str]) -> None:
    """Importing `hwr.telemetry` loads no torch, safetensors or Textual, starts no thread, touches no file."""
    code = """
import sys, threading, logging
before = set(logging.root.manager.loggerDict)
import hwr.telemetry, hwr.telemetry.schema, hwr.telemetry.reader
heavy = {"torch", "safetensors", "textual", "rich", "numpy", "transformers", "jsonschema", "psutil"} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
"""
    python(code)
