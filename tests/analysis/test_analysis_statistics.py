"""Slopes of cumulative series: exact where the series is, honest where it is not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.analysis.statistics import Interval, Series, slope


def series(increments: list[int], calls: int = 1000, start: int = 1 << 27) -> Series:
    """Return a series of these increments, one each `calls` calls."""
    values = [start]
    for growth in increments:
        values.append(values[-1] + growth)
    return Series(tuple(range(0, calls * len(values), calls)), tuple(values))


@given(rate=st.integers(-5000, 5000), count=st.integers(1, 40), calls=st.integers(1, 100_000))
def test_a_constant_slope_is_found_exactly(rate: int, count: int, calls: int) -> None:
    """Where every increment is the same there is nothing to be unsure of."""
    found = slope(series([rate * calls] * count, calls), resolution=0)
    assert found == Interval(rate, rate, rate)


@given(increments=st.lists(st.integers(-(1 << 20), 1 << 20), min_size=1, max_size=30), resolution=st.integers(0, 1 << 20))
def test_an_interval_holds_its_estimate_and_is_no_narrower_than_the_instrument(increments: list[int], resolution: int) -> None:
    """Whatever the series: low <= estimate <= high, and the resolution on both sides."""
    one = series(increments)
    found = slope(one, resolution=resolution)
    assert found.estimate == pytest.approx(sum(increments) / one.total_calls)
    by = resolution / one.total_calls
    assert found.high - found.estimate >= by * 0.999 - 1e-9
    assert found.estimate - found.low >= by * 0.999 - 1e-9
    assert slope(one, resolution=resolution) == found, "the same samples give the same interval"


def test_the_control_is_subtracted() -> None:
    """What the control grows by as well is nobody's."""
    found = slope(series([8000] * 10), series([3000] * 10), resolution=0)
    assert found == Interval(5.0, 5.0, 5.0)


def test_the_interval_covers_the_true_slope_as_often_as_it_says() -> None:
    """Ten increments with a long tail, as page-wise growth has: 95 % is the aim, 85 % would be a broken interval."""
    draw, hits, runs = random.Random(7), 0, 300
    for _ in range(runs):
        found = slope(series([round(draw.expovariate(1 / 64_000)) for _ in range(10)]), resolution=0)
        hits += found.low <= 64 <= found.high
    assert 0.85 <= hits / runs <= 0.99


def test_few_increments_give_their_envelope() -> None:
    """Two increments are no sample to draw from: the interval is what they were."""
    found = slope(series([1000, 5000]), resolution=0)
    assert (found.estimate, found.low, found.high) == (3.0, 1.0, 5.0)


def test_late_growth_is_that_of_the_second_half() -> None:
    """It tells growth that goes on from growth that stopped."""
    assert series([100, 100, 0, 0]).late == 0
    assert series([100, 100, 50, 50]).late == 100
    assert series([100]).late == 100
    assert series([1, 2, 4]).late == 6, "an odd count: the middle increment belongs to the second half"


@pytest.mark.parametrize(("calls", "values"), [((0,), (1,)), ((0, 0), (1, 2)), ((0, 5), (1,)), ((5, 0), (1, 2))])
def test_what_is_no_series_is_refused(calls: tuple[int, ...], values: tuple[int, ...]) -> None:
    """A baseline alone, calls that do not rise, values without calls."""
    with pytest.raises(ValueError, match="series"):
        Series(calls, values)
