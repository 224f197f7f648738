"""The bisection: every step of a step function, twice, or the reason why there is no answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diag.probes.threshold import MAX_POINTS, Axis, Point, Step, find
from hwr.errors import Unavailable

Measure = Callable[[int], Point | Unavailable]


def counted(function: Callable[[int], float]) -> tuple[Measure, list[int]]:
    """Return a measure of a function, and the values that it was asked for."""
    asked: list[int] = []

    def measure(value: int) -> Point:
        asked.append(value)
        return Point(value, function(value), 168, 168 + 4 * value)

    return measure, asked


def integers_above_256(elements: int) -> float:
    """What a reader keeps that never gives back the integers it makes: one block for each bound above 256."""
    begin, end = 168, 168 + 4 * elements
    return (begin > 256) + (end > 256)


def test_a_step_is_found_between_neighbours_with_the_place_on_both_sides() -> None:
    measure, asked = counted(integers_above_256)
    found = find(Axis.ELEMENTS, 1, 4096, measure)
    (step,) = found.steps
    assert (step.below.value, step.at.value) == (22, 23)
    assert (step.below.end, step.at.end) == (256, 260)
    assert (step.below.blocks_per_call, step.at.blocks_per_call) == (0, 1)
    assert found.problem is None
    assert len(asked) <= 2 + 12 + 2


@pytest.mark.parametrize("edges", [(5,), (5, 6), (2, 4096), (100, 1000, 3000)])
def test_every_step_between_the_ends_is_found_in_order(edges: tuple[int, ...]) -> None:
    measure, _ = counted(lambda value: sum(value >= edge for edge in edges))
    found = find(Axis.OFFSET, 1, 4096, measure)
    assert tuple(step.at.value for step in found.steps) == edges
    assert all(step.reproduced for step in found.steps)


def test_no_step_costs_two_runs() -> None:
    measure, asked = counted(lambda _: 2.0)
    found = find(Axis.ELEMENTS, 1, 4096, measure)
    assert (found.steps, found.problem, asked) == ((), None, [1, 4096])
    assert found.retained


def test_what_bookkeeping_moves_is_no_step() -> None:
    measure, asked = counted(lambda value: 1 + (value % 7) / 100)
    assert find(Axis.ELEMENTS, 1, 100, measure).steps == ()
    assert asked == [1, 100]


def test_a_step_that_does_not_come_again_is_inconclusive() -> None:
    seen: set[int] = set()

    def measure(value: int) -> Point:
        first = value not in seen
        seen.add(value)
        return Point(value, float(value >= 40 and first))

    found = find(Axis.OFFSET, 0, 64, measure)
    assert found.problem is not None
    assert "did not come again" in found.problem
    assert [step.reproduced for step in found.steps] == [False]


@pytest.mark.parametrize("fails_at", [1, 64, 32])
def test_a_value_that_cannot_be_measured_is_inconclusive_with_its_reason(fails_at: int) -> None:
    def measure(value: int) -> Point | Unavailable:
        return Unavailable("no blocks are counted") if value == fails_at else Point(value, float(value >= 20))

    found = find(Axis.ELEMENTS, 1, 64, measure)
    assert found.problem == f"elements {fails_at}: no blocks are counted"
    assert not found.to_json()["conclusive"]


def test_a_figure_that_changes_everywhere_ends_and_is_inconclusive() -> None:
    measure, asked = counted(lambda value: float(value))
    found = find(Axis.OFFSET, 0, 1 << 20, measure)
    assert found.problem is not None
    assert "does not go in steps" in found.problem
    assert len(asked) < 3 * MAX_POINTS


def test_what_is_no_step_cannot_be_called_one() -> None:
    with pytest.raises(ValueError):
        Step(Point(1, 0.0), Point(3, 1.0))
    with pytest.raises(ValueError):
        Step(Point(1, 1.0), Point(2, 1.0))
