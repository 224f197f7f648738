"""The collector: the catalogue over observed workers, on any prometheus_client registry.

Owns the way from `Metric.values` to exposition families. Promises no duplicate series (a newer worker of an engine and rank
replaces the older), only declared label values, closed counters at 0 from the start, and unknown gauges absent.
Refuses multiprocess mode and the global registry.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hwr.telemetry import process
from hwr.telemetry.catalogue import Kind, Metric, Observed, Scope
from hwr.telemetry.metrics import METRICS
from hwr.telemetry.state import Histogram

TOP_ARTIFACTS: Final = 50
_log = logging.getLogger("hwr.telemetry")


class HwrCollector(Collector):
    """Expose every metric of the catalogue for the workers that `workers()` returns at each scrape."""

    def __init__(self, workers: Callable[[], Sequence[Observed]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Family]:
        """Yield one family a metric, also those without samples."""
        workers = _newest_of_each_rank(self._workers())
        for metric in METRICS:
            yield _family(metric, workers)


def this_process() -> Sequence[Observed]:
    """Return this process as its own telemetry knows it; nobody when telemetry is off."""
    state = process.snapshot()
    return () if state is None else (Observed(state=state, up=True, heartbeat_ns=process.heartbeat_ns()),)


def worker_collector() -> HwrCollector:
    """Return a collector for this process, to be registered on a registry of the caller's."""
    return HwrCollector(this_process)


def _newest_of_each_rank(workers: Iterable[Observed]) -> dict[tuple[str, str], Observed]:
    newest: dict[tuple[str, str], Observed] = {}
    for worker in workers:
        res = worker.state.res
        key = (str(res.get("hwr.engine", "default")), str(res.get("hwr.rank", 0)))
        held = newest.get(key)
        if held is None or res.get("process.start_ns", 0) >= held.state.res.get("process.start_ns", 0):
            newest[key] = worker
    return newest


def _family(metric: Metric, workers: dict[tuple[str, str], Observed]) -> Family:
    own = [label.name for label in metric.labels if metric.kind is not Kind.STATESET]
    labels = ["engine", "rank", *own] if metric.scope is Scope.WORKER else own
    family: Family = _empty(metric, labels)
    if metric.scope is Scope.PROCESS:
        totals: dict[tuple[str, ...], float] = {}
        for worker in workers.values():
            for key, value in _complete(metric, _values(metric, worker)).items():
                totals[key] = totals.get(key, 0.0) + float(value)
        for key, total in totals.items():
            _add(metric, family, list(key), total)
        return family
    for rank, worker in workers.items():
        for key, value in _complete(metric, _values(metric, worker)).items():
            _add(metric, family, [*rank, *key], value)
    return family


def _empty(metric: Metric, labels: list[str]) -> Any:
    name = metric.name.removesuffix("_total").removesuffix("_info")
    kinds: dict[Kind, Any] = {
        Kind.COUNTER: CounterMetricFamily,
        Kind.GAUGE: GaugeMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
        Kind.STATESET: StateSetMetricFamily,
        Kind.INFO: InfoMetricFamily,
    }
    return kinds[metric.kind](name, metric.help, labels=labels)


def _values(metric: Metric, worker: Observed) -> dict[str, Any]:
    try:
        return dict(metric.values(worker))
    except (KeyError, TypeError, ValueError, AttributeError):  # a state read from somebody's file: this metric is unknown
        _log.debug("%s: not computable from this journal", metric.name, exc_info=True)
        return {}


def _complete(metric: Metric, told: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return values by label tuple: only declared values, all of them for what exists from the start."""
    if metric.kind in (Kind.STATESET, Kind.INFO):
        return {(): told[""]} if "" in told else {}
    if any(label.values is None for label in metric.labels):
        largest = sorted(told.items(), key=lambda item: item[1], reverse=True)[:TOP_ARTIFACTS]
        return {tuple(key.split("|")): value for key, value in largest if _is_number(value)}
    complete: dict[tuple[str, ...], Any] = {}
    for key in itertools.product(*(label.values or () for label in metric.labels)):
        value = told.get("|".join(key))
        if metric.kind is Kind.HISTOGRAM:
            complete[key] = value if isinstance(value, Histogram) else Histogram.empty(metric.bounds)
        elif _is_number(value):
            complete[key] = value
        elif metric.kind is Kind.COUNTER:
            complete[key] = 0.0
    return complete


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _add(metric: Metric, family: Any, labels: list[str], value: Any) -> None:
    if metric.kind is Kind.HISTOGRAM:
        family.add_metric(labels, value.cumulative(), value.total)
    elif metric.kind is Kind.STATESET:
        family.add_metric(labels, {state: state == value for state in metric.labels[0].values or ()})
    else:
        family.add_metric(labels, value)
