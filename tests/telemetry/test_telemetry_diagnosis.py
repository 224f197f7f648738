"""A diagnosis is told as everything else: an operation with a deadline, and the last report's figures by who holds them."""

from __future__ import annotations

import json

from telemetry_samples import RES

from hwr.outcomes import Operation, RetentionClass, RetentionVerdict
from hwr.telemetry import events as E
from hwr.telemetry.catalogue import Observed
from hwr.telemetry.hub import Hub
from hwr.telemetry.metrics import METRICS
from hwr.telemetry.state import WorkerState

BY_NAME = {metric.name: metric for metric in METRICS}


def begun() -> E.RetentionRunBegun:
    return E.RetentionRunBegun(mode="get_tensor", elements=64, offset_bytes=0, iterations=1000, deadline_seconds=120.0)


def values(state: WorkerState, name: str) -> dict[str, object]:
    return dict(BY_NAME[name].values(Observed(state=state, up=True)))


def test_a_running_probe_is_an_operation_with_a_deadline_that_moves() -> None:
    hub = Hub(RES, realtime_offset_ns=0)
    op = hub.new_operation()
    hub.emit(begun(), op=op)
    operation = hub.state.ops[op]
    assert operation.operation == Operation.PROBE
    assert operation.deadline_ns == operation.begun_ns + 120_000_000_000
    assert set(values(hub.state, "hwr_operation_deadline_timestamp_seconds")) == {"probe"}
    hub.emit(E.RetentionRunProgress(done_iterations=100, planned_iterations=1000), op=op)
    assert operation.progress_ns == hub.state.progress_ns == hub.state.last_ns
    hub.emit(E.RetentionRunEnded(verdict=RetentionVerdict.RETAINED, blocks_per_call=1.0, calls=1000, seconds=3.0), op=op)
    assert (hub.state.ops, hub.state.last_good_seconds) == ({}, {"probe": 3.0})
    assert hub.state.malformed == 0


def test_progress_of_nobodys_run_moves_nothing() -> None:
    hub = Hub(RES, realtime_offset_ns=0)
    hub.emit(E.RetentionRunProgress(done_iterations=100, planned_iterations=1000), op="nobody's")
    assert hub.state.progress_ns is None


def test_the_last_report_is_a_gauge_by_class_and_what_is_unknown_is_absent() -> None:
    hub = Hub(RES, realtime_offset_ns=0)
    assert values(hub.state, "hwr_retention_bytes") == {}
    full = {f"{kind.value}_bytes": number for number, kind in enumerate(RetentionClass) if kind is not RetentionClass.FILE}
    hub.emit(E.RetentionReported(mode="get_tensor", before_bytes=1, after_gc_bytes=2, file_backed_bytes=4, **full))
    assert values(hub.state, "hwr_retention_bytes") == {
        kind.value: 4 if kind is RetentionClass.FILE else number for number, kind in enumerate(RetentionClass)
    }
    hub.emit(E.RetentionReported(mode="reuse", file_backed_bytes=-4096))
    assert values(hub.state, "hwr_retention_bytes") == {"file": -4096}
    assert WorkerState.from_json(json.loads(json.dumps(hub.state.to_json()))).retention == {"file": -4096}
