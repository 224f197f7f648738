"""Where along an axis the blocks per call change.

Owns the bisection. Promises every step between two measured values whose figures differ, down to neighbours, each measured a second time
in fresh processes, and the absolute place of the tensor on both sides of it. Refuses to call a step found that does not come again.

Between two values with the same figure it looks no further: a step up and back down between them stays unseen. Blocks are exact, so that
no control and no interval is needed; what a run counts beside the calls is far below a block a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hwr.errors import Unavailable

# A call keeps whole blocks. 10,000 calls and a few hundred blocks of bookkeeping differ by less than this.
SAME_BLOCKS: Final = 0.1
# A figure that changes everywhere is no step function; each value is a process of two seconds.
MAX_POINTS: Final = 400


class Axis(StrEnum):
    """What varies."""

    ELEMENTS = "elements"
    OFFSET = "offset"


@dataclass(frozen=True, slots=True)
class Point:
    """One measured value of the axis: blocks per call, and the absolute begin and end of the tensor in the file."""

    value: int
    blocks_per_call: float
    begin: int | None = None
    end: int | None = None

    def same(self, other: Point) -> bool:
        """Say whether the two keep the same number of blocks a call."""
        return abs(self.blocks_per_call - other.blocks_per_call) < SAME_BLOCKS

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"value": self.value, "blocks_per_call": self.blocks_per_call, "begin": self.begin, "end": self.end}


@dataclass(frozen=True, slots=True)
class Step:
    """Two neighbours that differ; `again` are their figures in the second measurement, in the same order."""

    below: Point
    at: Point
    again: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.at.value != self.below.value + 1 or self.below.same(self.at):
            raise ValueError("no step")

    @property
    def reproduced(self) -> bool:
        """Whether both sides came out the same a second time."""
        if self.again is None:
            return False
        return all(abs(now - then.blocks_per_call) < SAME_BLOCKS for now, then in zip(self.again, (self.below, self.at), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "below": self.below.to_json(),
            "at": self.at.to_json(),
            "again": None if self.again is None else list(self.again),
            "reproduced": self.reproduced,
        }


@dataclass(frozen=True, slots=True)
class Found:
    """What the search came to. `problem` says why it is inconclusive, None where it is not."""

    axis: Axis
    low: int
    high: int
    points: tuple[Point, ...]
    steps: tuple[Step, ...]
    problem: str | None = None

    @property
    def retained(self) -> bool:
        """Whether any value keeps blocks."""
        return any(point.blocks_per_call >= SAME_BLOCKS for point in self.points)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "axis": self.axis.value,
            "low": self.low,
            "high": self.high,
            "conclusive": self.problem is None,
            "problem": self.problem,
            "thresholds": [step.to_json() for step in self.steps],
            "points": [point.to_json() for point in self.points],
        }


def find(axis: Axis, low: int, high: int, measure: Callable[[int], Point | Unavailable]) -> Found:
    """Find every step between `low` and `high`; `measure` runs one value in a fresh process."""
    if low >= high:
        raise ValueError(f"no range: {low} to {high}")
    points: dict[int, Point] = {}
    steps: list[Step] = []

    def ended(problem: str | None) -> Found:
        return Found(axis, low, high, tuple(points[value] for value in sorted(points)), tuple(steps), problem)

    for value in (low, high):
        found = measure(value)
        if isinstance(found, Unavailable):
            return ended(f"{axis} {value}: {found.reason}")
        points[value] = found
    open_ranges = [(low, high)]
    while open_ranges:
        left, right = open_ranges.pop()  # the leftmost one: the right half was put below it
        if points[left].same(points[right]):
            continue
        if right - left == 1:
            step = _again(points[left], points[right], measure)
            if isinstance(step, Unavailable):
                return ended(step.reason)
            steps.append(step)
            if not step.reproduced:
                return ended(f"the step between {axis} {left} and {right} did not come again")
            continue
        if len(points) >= MAX_POINTS:
            return ended(f"the figure still changes after {MAX_POINTS} values: it does not go in steps")
        middle = (left + right) // 2
        found = measure(middle)
        if isinstance(found, Unavailable):
            return ended(f"{axis} {middle}: {found.reason}")
        points[middle] = found
        open_ranges += [(middle, right), (left, middle)]
    return ended(None)


def _again(below: Point, at: Point, measure: Callable[[int], Point | Unavailable]) -> Step | Unavailable:
    figures = []
    for point in (below, at):
        found = measure(point.value)
        if isinstance(found, Unavailable):
            return Unavailable(f"{point.value}, measured a second time: {found.reason}")
        figures.append(found.blocks_per_call)
    return Step(below, at, (figures[0], figures[1]))
