"""Verdicts over samples: growth that goes on is retained, growth that went back or stopped is not."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

from diag.analysis.retention import judge
from hwr.outcomes import RetentionVerdict

MIB = 1 << 20
RETAINED, FLAT, INCONCLUSIVE = RetentionVerdict.RETAINED, RetentionVerdict.FLAT, RetentionVerdict.INCONCLUSIVE


def run(
    anonymous: list[int],
    blocks: list[int] | None = None,
    *,
    free: list[int] | None = None,
    malloc: list[int] | None = None,
    closed: int | None = None,
    complete: bool = True,
) -> dict[str, Any]:
    """Return a run object whose loop samples are so far above the baseline, one each 1,000 calls."""
    count = len(anonymous)
    blocks_known = blocks is not None
    nothing = [0] * count
    rows = zip([0, *anonymous], [0, *(blocks or nothing)], [0, *(free or nothing)], [0, *(malloc or nothing)], strict=True)
    samples = [
        {
            "phase": "baseline" if at == 0 else "loop",
            "iterations": at * 1000,
            "anonymous_bytes": 150 * MIB + grown,
            "private_bytes": 160 * MIB + grown,
            "rss_bytes": 230 * MIB + grown,
            "fd_count": 5,
            "allocated_blocks": 560_000 + taken if blocks_known else None,
            "interpreter_bytes": 50 * MIB,
            "malloc_in_use_bytes": 90 * MIB + used,
            "malloc_free_bytes": held,
            "file_bytes": 80 * MIB,
            "locked_bytes": 0,
        }
        for at, (grown, taken, held, used) in enumerate(rows)
    ]
    if closed is not None:
        samples.append({**samples[-1], "phase": "closed", "anonymous_bytes": 150 * MIB + closed})
    return {"complete": complete, "arguments": {"iterations": count * 1000}, "samples": samples, "size_classes": None}


def steps(each: int, count: int = 10) -> list[int]:
    """Return a series that rises evenly."""
    return [each * (at + 1) for at in range(count)]


@pytest.mark.parametrize(
    ("told", "verdict", "why"),
    [
        (run(steps(64_000), steps(2000)), RETAINED, "grows to the end"),
        (run(steps(0), steps(0)), FLAT, "no growth"),
        (run(steps(0), steps(1000)), RETAINED, "grows to the end"),
        (run(steps(64_000), steps(0)), RETAINED, "grows to the end"),
        (run(steps(64_000)), RETAINED, "not counted here"),
        (run(steps(0)), FLAT, "not counted here"),
        (run([4096] * 10, [200] * 10), FLAT, "no growth"),
        (run([MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 0, 0, 0, 0, 0], steps(0)), FLAT, "fell back"),
        (run([MIB, 2 * MIB, 3 * MIB, 4 * MIB] + [5 * MIB] * 6, steps(0), free=[0] * 4 + [5 * MIB] * 6), FLAT, "malloc holds it"),
        (run([MIB, 2 * MIB, 3 * MIB, 4 * MIB] + [5 * MIB] * 6, steps(0)), INCONCLUSIVE, "longer warm-up"),
        (run([60_000] * 10, steps(0)), FLAT, "nothing towards the end"),
        (run([0, 0, 0, 0, 0, 0, 0, 2 * MIB, 2 * MIB, 2 * MIB], steps(0)), INCONCLUSIVE, "uneven"),
        (run(steps(64_000), steps(0), free=steps(64_000)), RETAINED, "grows to the end"),
        (run(steps(-64_000), steps(0)), FLAT, "no growth"),
        (run(steps(0), [-40_000 + 2000 * at for at in range(1, 11)]), RETAINED, "fell at first, and grows to the end"),
        (run([-MIB + 32_000 * at for at in range(1, 11)], steps(0)), RETAINED, "fell at first, and grows to the end"),
        (run(steps(0), steps(0), malloc=steps(32_000)), RETAINED, "malloc in use: 32.00 B a call"),
        (run([0, 4 * MIB] * 5, steps(0)), INCONCLUSIVE, "uneven"),
        (run([64_000, 128_000], None), INCONCLUSIVE, "too few samples"),
        (run([64_000, 128_000], [1000, 2000]), RETAINED, "grows to the end"),
        (run([0], [0]), INCONCLUSIVE, "too few calls"),
    ],
)
def test_the_verdict_follows_the_shape_of_the_growth(told: dict[str, Any], verdict: RetentionVerdict, why: str) -> None:
    """Each shape has one right answer, and the basis says which it was."""
    found = judge(told)
    assert found.verdict is verdict
    assert why in " ".join(found.basis)


@pytest.mark.parametrize(("deviation", "most_flat"), [(500 * 1024, 0.02), (200 * 1024, 0.05)])
def test_noise_is_not_called_flat_nor_retained(deviation: int, most_flat: float) -> None:
    """Readings that jump by more than what was asked for, with and without 32 bytes a call beneath: inconclusive, almost always."""
    draw, words = random.Random(5), collections.Counter()
    for rate in (0, 32):
        for _ in range(60):
            series = [round(rate * 1000 * at + draw.gauss(0, deviation)) for at in range(1, 11)]
            words[judge(run(series, steps(0))).verdict] += 1
    assert words[FLAT] / 120 <= most_flat, words
    assert words[RETAINED] / 120 <= 0.05, words


def test_a_control_that_grows_as_much_takes_the_verdict_away() -> None:
    """Growth of reuse is the interpreter's or the probe's own."""
    told, same = run(steps(64_000), steps(2000)), run(steps(64_000), steps(2000))
    assert judge(told, same).verdict is FLAT
    half = run(steps(32_000), steps(1000))
    found = judge(told, half)
    assert found.verdict is RETAINED
    assert found.bytes_per_call is not None
    assert found.bytes_per_call.estimate == pytest.approx(32)
    assert found.bytes_per_call.control == pytest.approx(32)


def test_an_incomplete_control_does_not_count() -> None:
    """Half a control says nothing about the other half."""
    found = judge(run(steps(64_000), steps(0)), run(steps(64_000), steps(0), complete=False))
    assert found.verdict is RETAINED
    assert found.bytes_per_call is not None
    assert found.bytes_per_call.control is None


def test_an_incomplete_run_has_figures_and_no_verdict() -> None:
    """What came before the end is told; it is no answer."""
    told = run(steps(64_000, 4), steps(1000, 4), complete=False)
    told["arguments"]["iterations"] = 10_000
    found = judge(told)
    assert found.verdict is INCONCLUSIVE
    assert "after 4,000 of 10,000 calls" in found.basis[0]
    assert found.growth["loop"]["anonymous_bytes"] == 256_000


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_loop_sample_there_is_nothing_to_judge(count: int) -> None:
    """Killed before the first share of calls was done: inconclusive, and no exception."""
    told = run([], None, complete=False)
    told["samples"] = told["samples"][:count]
    found = judge(told)
    assert (found.verdict, found.calls, found.bytes_per_call) == (INCONCLUSIVE, 0, None)


def test_the_report_has_both_deltas_and_what_close_gave_back() -> None:
    """Loop minus baseline, then closed minus baseline (R25)."""
    found = judge(run(steps(64_000), steps(0), closed=40_000))
    assert found.growth["loop"] == {"private_bytes": 640_000, "anonymous_bytes": 640_000, "rss_bytes": 640_000, "fd_count": 0}
    assert found.growth["closed"]["anonymous_bytes"] == 40_000
    assert found.released_at_close_bytes == 600_000
    assert found.classes["other_anonymous"] == 640_000


def test_no_verdict_uses_the_word() -> None:
    """Retention is what was measured; what it is called elsewhere is a judgement."""
    for told in (run(steps(64_000), steps(2000)), run(steps(0), steps(0))):
        assert "leak" not in str(judge(told).to_json()).lower()
