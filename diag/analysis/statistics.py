"""How fast a cumulative series grows, and how sure that is.

Owns series, increments and the interval of a slope. Promises the same interval for the same samples (the draws are seeded), an interval
that is no narrower than what the instrument can resolve, and an envelope instead of a bootstrap where there are too few increments.
Refuses verdicts, and I/O.

Memory is a cumulative series: its samples depend on each other, its increments do so far less. So increments are resampled, not samples.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95
DRAWS: Final = 2000
# Below this many increments a bootstrap only repeats them.
LEAST_INCREMENTS: Final = 5


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate per call and what it may be: `low` <= `estimate` <= `high`."""

    estimate: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.estimate <= self.high:
            raise ValueError(f"{self.estimate} is not within {self.low} to {self.high}")

    def widened(self, by: float) -> Interval:
        """Return it with `by` more on both sides."""
        return Interval(self.estimate, self.low - by, self.high + by)


@dataclass(frozen=True, slots=True)
class Series:
    """Values after so many calls each; the first is the baseline. Calls rise strictly."""

    calls: tuple[int, ...]
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.calls) != len(self.values) or len(self.calls) < 2:
            raise ValueError("a series has a baseline and at least one more value")
        if any(later <= earlier for earlier, later in itertools.pairwise(self.calls)):
            raise ValueError("the calls of a series rise")

    @property
    def total_calls(self) -> int:
        """Calls from the baseline to the last value."""
        return self.calls[-1] - self.calls[0]

    @property
    def net(self) -> int:
        """The last value minus the baseline."""
        return self.values[-1] - self.values[0]

    @property
    def peak(self) -> int:
        """The highest value minus the baseline."""
        return max(self.values) - self.values[0]

    @property
    def late(self) -> int:
        """What was added in the second half of the calls; with a single increment, all."""
        if len(self.values) == 2:
            return self.net
        half = self.calls[0] + self.total_calls / 2
        begin = max(at for at, calls in enumerate(self.calls) if calls <= half)
        return self.values[-1] - self.values[begin]

    def settled(self, within: float) -> bool:
        """Say whether it stood still at the end: at least two values, those of the last third of the calls, and none further apart."""
        since = self.calls[0] + self.total_calls * 2 / 3
        late = [value for calls, value in zip(self.calls, self.values, strict=True) if calls >= since]
        return len(late) >= 2 and max(late) - min(late) <= within

    def from_lowest(self) -> Series | None:
        """Return it from its lowest value on, where that is not the baseline and not behind the middle; None otherwise."""
        at = self.values.index(min(self.values))
        if at == 0 or self.calls[at] > self.calls[0] + self.total_calls / 2:
            return None
        return Series(self.calls[at:], self.values[at:])

    def increments(self) -> list[tuple[int, int]]:
        """Return calls and growth from each value to the next."""
        pairs = list(zip(self.calls, self.values, strict=True))
        return [(c2 - c1, v2 - v1) for (c1, v1), (c2, v2) in itertools.pairwise(pairs)]


def slope(series: Series, control: Series | None = None, *, resolution: float) -> Interval:
    """Return growth per call, the control's subtracted; `resolution` is what two readings cannot tell apart, in units of a value.

    The estimate is all growth over all calls. The interval is a percentile bootstrap over increments at 95 %, expanded for small samples
    (T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, 5.2), then widened by the resolution.
    """
    estimate = series.net / series.total_calls - (0.0 if control is None else control.net / control.total_calls)
    increments = series.increments()
    against = [(1, 0)] if control is None else control.increments()
    fewest = len(increments) if control is None else min(len(increments), len(against))
    if fewest < LEAST_INCREMENTS:
        rates, others = ([growth / calls for calls, growth in some] for some in (increments, against))
        low, high = min(rates) - max(others), max(rates) - min(others)
    else:
        low, high = _bootstrapped(increments, against, fewest)
    calls = series.total_calls if control is None else min(series.total_calls, control.total_calls)
    return Interval(estimate, min(low, estimate), max(high, estimate)).widened(resolution / calls)


def _bootstrapped(increments: Sequence[tuple[int, int]], against: Sequence[tuple[int, int]], count: int) -> tuple[float, float]:
    draw = random.Random(0)
    rates = sorted(_rate(draw.choices(increments, k=len(increments))) - _rate(draw.choices(against, k=len(against))) for _ in range(DRAWS))
    tail = _expanded_tail(count)
    return rates[int(tail * DRAWS)], rates[min(DRAWS - 1, int((1 - tail) * DRAWS))]


def _rate(increments: Sequence[tuple[int, int]]) -> float:
    return sum(growth for _, growth in increments) / sum(calls for calls, _ in increments)


def _expanded_tail(count: int) -> float:
    """Return the share of draws to leave out on each side so that `count` increments give the coverage that many would give."""
    normal = NormalDist()
    z = normal.inv_cdf((1 + CONFIDENCE) / 2)
    freedom = count - 1
    # Student's t by Cornish and Fisher's expansion (Abramowitz and Stegun, 26.7.5): within 1 % from 4 degrees of freedom.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-((count / freedom) ** 0.5) * t)
