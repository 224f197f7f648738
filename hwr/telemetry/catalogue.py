"""The words of a metric declaration.

Owns the types with which `metrics.py` declares every metric once, as data. Promises that a declaration that breaks a naming rule
cannot be constructed. Refuses values: those come from the state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hwr.telemetry.state import Histogram, WorkerState


class Kind(StrEnum):
    """The types of the exposition format that we use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    STATESET = "stateset"
    INFO = "info"


class Scope(StrEnum):
    """Whose fact it is: a worker's carries engine and rank; those summed over workers and those of the node carry neither."""

    WORKER = "worker"
    PROCESS = "process"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Label:
    """A label; `values` is its closed set, None for one of the four that are bounded otherwise (engine, rank, domain, artifact)."""

    name: str
    values: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Observed:
    """A worker as a reader sees it: its events folded, and whether it lives. `heartbeat_ns` is CLOCK_BOOTTIME; None is unknown.

    `engine` is the reader's name for it, where that is not the journal's; `stall` what a reader that judges concludes. One that is not
    `shown` has no series of its own; what it counted is in the sums over workers.
    """

    state: WorkerState
    up: bool | None
    heartbeat_ns: int | None = None
    engine: str | None = None
    stall: str | None = None
    shown: bool = True


# Label values joined by `|`, in the order of the metric's labels; the empty text for a metric without labels.
Values = Mapping[str, float | Histogram | Mapping[str, str] | str]

_NAME: Final = re.compile(r"hwr_[a-z0-9]+(_[a-z0-9]+)*\Z")
_BAD_UNITS: Final = ("millisecond", "_ms", "percent", "_kb", "_mb", "_gb")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `values` is a pure function of one observed worker; for the node's, of figures prepared by metric name.

    A counter or histogram whose labels are all closed exists from the start at 0; a gauge is absent until `values` has it.
    """

    name: str
    kind: Kind
    help: str
    values: Callable[[Any], Values]
    labels: tuple[Label, ...] = ()
    unit: str = ""
    scope: Scope = Scope.WORKER
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        base = self.name.removesuffix("_total")
        if not _NAME.match(self.name) or any(word in self.name for word in _BAD_UNITS):
            raise ValueError(f"{self.name}: not a name by our rules")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and only counters, end in _total")
        if self.unit and not base.endswith(f"_{self.unit}"):
            raise ValueError(f"{self.name}: the name ends in its unit, {self.unit}")
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds):
            raise ValueError(f"{self.name}: histograms, and only histograms, have bounds")
        if self.kind is Kind.STATESET and (len(self.labels) != 1 or self.labels[0].name != self.name or not self.labels[0].values):
            raise ValueError(f"{self.name}: a StateSet has one closed label of its own name")

    def series(self) -> int:
        """How many series one worker has of it, at most; bounded labels count once, and an Info has one."""
        if self.kind is Kind.INFO:
            return 1
        count = 1
        for label in self.labels:
            count *= len(label.values) if label.values else 1
        return count * (len(self.bounds) + 3 if self.bounds else 1)
