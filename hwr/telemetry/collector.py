"""The collector: the catalogue over observed workers, on any prometheus_client registry.

Owns the way from `Metric.values` to exposition families. Promises no duplicate series (a newer worker of an engine and rank
replaces the older), only declared label values, closed counters at 0 from the start, unknown gauges absent, and counts over all
workers that do not fall when one of them is replaced. Refuses multiprocess mode and the global registry.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hwr.telemetry.metrics import LABEL_CHARACTERS, METRICS
from hwr.telemetry.node_metrics import NODE_METRICS, Figures
from hwr.telemetry.state import Histogram
from hwr.telemetry.totals import Process, Series, Totals
from hwr.units import printable

TOP_ARTIFACTS: Final = 50
_log = logging.getLogger("hwr.telemetry")


class HwrCollector(Collector):
    """Expose every metric of the catalogue for the workers that `workers()` returns at each scrape.

    `node()` gives the figures of the node, for a reader that has looked at one. `base` is what the `totals()` of the reader before
    this one were: its sums go on where that one's ended.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Observed]],
        node: Callable[[], Figures] | None = None,
        base: Mapping[str, float] | None = None,
    ) -> None:
        self._workers, self._node = workers, node
        self._totals = Totals(base or {})
        self._lock = threading.Lock()

    def totals(self) -> dict[str, float]:
        """Return what the sums over workers consist of, for the next reader."""
        with self._lock:
            return self._totals.to_json()

    def collect(self) -> Iterator[Family]:
        """Yield one family a metric, also those without samples."""
        observed = self._workers()
        workers = _newest_of_each_rank(worker for worker in observed if worker.shown)
        families = [_worker_family(metric, workers) for metric in METRICS if metric.scope is Scope.WORKER]
        with self._lock:  # scrapes may overlap
            families += _summed_families(self._totals.sums(_counts_of_each(observed)))
        if self._node is not None:
            figures = self._node()
            families += [_node_family(metric, figures) for metric in NODE_METRICS]
        yield from families


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
        engine = worker.engine if worker.engine is not None else str(res.get("hwr.engine", "default"))
        key = (printable(engine, LABEL_CHARACTERS), _rank(res.get("hwr.rank", 0)))
        held = newest.get(key)
        if held is None or _identity(worker) >= _identity(held):
            newest[key] = worker
    return newest


def _rank(value: Any) -> str:
    return str(value) if type(value) is int and 0 <= value < 1 << 31 else "unknown"


def _identity(worker: Observed) -> tuple[int, int]:
    """Return what tells two processes of one node apart: the later started is the greater."""
    start, pid = worker.state.res.get("process.start_ns"), worker.state.res.get("process.pid")
    return (start if type(start) is int else 0, pid if type(pid) is int else 0)


_SUMMED: Final = tuple(metric for metric in METRICS if metric.scope is Scope.PROCESS)


def _counts_of_each(workers: Iterable[Observed]) -> dict[Process, dict[Series, float]]:
    return {
        (_run(worker), _rank(worker.state.res.get("hwr.rank", 0)), *_identity(worker)): {
            (metric.name, *key): float(value)
            for metric in _SUMMED
            for key, value in _complete(metric, _values(metric, worker)).items()
            if value
        }
        for worker in workers
    }


def _run(worker: Observed) -> str:
    """Return what is the same of a process whoever reads it: the names that its journal has, not those that a reader gives."""
    res = worker.state.res
    return printable(f"{res.get('hwr.run_id')}/{res.get('hwr.engine')}", 4 * LABEL_CHARACTERS)


def _summed_families(sums: Mapping[Series, float]) -> Iterator[Family]:
    for metric in _SUMMED:
        family: Family = _empty(metric, [label.name for label in metric.labels])
        for key in _complete(metric, {}):
            _add(metric, family, list(key), sums.get((metric.name, *key), 0.0))
        yield family


def _node_family(metric: Metric, figures: Figures) -> Family:
    told = metric.values(figures)
    if metric.kind is Kind.INFO:
        family: Family = _empty(metric, [])
        for labels in told.values():
            _add(metric, family, [], labels)
        return family
    family = _empty(metric, [label.name for label in metric.labels])
    for key, value in told.items():
        if _is_number(value):  # unlike a worker's, a node's counters are the kernel's, and are not there until they were read
            _add(metric, family, key.split("|") if metric.labels else [], value)
    return family


def _worker_family(metric: Metric, workers: dict[tuple[str, str], Observed]) -> Family:
    own = [label.name for label in metric.labels if metric.kind not in (Kind.STATESET, Kind.INFO)]  # these bring theirs along
    family: Family = _empty(metric, ["engine", "rank", *own])
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
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # a state read from somebody's file: this metric is unknown
        _log.debug("%s: not computable from this journal", metric.name, exc_info=True)
        return {}


def _complete(metric: Metric, told: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return values by label tuple: only declared values, all of them for what exists from the start."""
    if metric.kind in (Kind.STATESET, Kind.INFO):
        return {(): told[""]} if "" in told else {}
    if any(label.values is None for label in metric.labels):
        numbers = [(key, value) for key, value in told.items() if _is_number(value)]
        largest = sorted(numbers, key=lambda item: item[1], reverse=True)[:TOP_ARTIFACTS]
        return {tuple(key.split("|")): value for key, value in largest}
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
