"""What a retention run says: retained, flat, or inconclusive.

Owns the verdict, its measures and the classes of what grew. Promises that `retained` needs growth that goes on to the end and cannot be
the instrument's or the control's; that `flat` means less than one smallest object a call, whatever the interval could still hide; that
everything else is inconclusive. Refuses the word for a defect, causes, portable thresholds, and figures for requests: growth after
objects died is evidence about a dependency or an allocator in this one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from diag.analysis.statistics import LEAST_INCREMENTS, Interval, Series, slope
from hwr.outcomes import RetentionClass, RetentionVerdict
from hwr.units import bytes_text


@dataclass(frozen=True, slots=True)
class _Kind:
    """A measure: its figure in the samples, what two readings cannot tell apart, and below what rate a call is flat in any case.

    `largest`: where the resolution over the calls allows no smaller claim than this, flat would say nothing.
    """

    sample: str
    title: str
    resolution: int
    flat: float
    largest: float
    exact: bool  # counted by the allocator itself, and no page of it


# Most of what a collection and free lists moved from one sample to the next was 60 blocks, in 100,000 calls of anything; a smallest
# object is one block of 16 bytes.
_BLOCKS: Final = _Kind("allocated_blocks", "Interpreter blocks", resolution=256, flat=0.01, largest=0.5, exact=True)
# malloc's own count of what it handed out: buffers of the interpreter and of this probe come and go in it.
_MALLOC: Final = _Kind("malloc_in_use_bytes", "malloc in use", resolution=8 << 10, flat=1.0, largest=16.0, exact=True)
# A page at each end, and one pool of CPython's allocator (16 KiB) that is taken as a whole.
_BYTES: Final = _Kind("anonymous_bytes", "Anonymous memory", resolution=(16 << 10) + 2 * (4 << 10), flat=1.0, largest=16.0, exact=False)
FLAT_RESOLUTIONS: Final = 4

_CLASSES: Final = {
    RetentionClass.INTERPRETER: "interpreter_bytes",
    RetentionClass.MALLOC_IN_USE: "malloc_in_use_bytes",
    RetentionClass.ALLOCATOR_FREE: "malloc_free_bytes",
    RetentionClass.FILE: "file_bytes",
    RetentionClass.LOCKED: "locked_bytes",
}
GROWTH_KEYS: Final = ("private_bytes", "anonymous_bytes", "rss_bytes", "fd_count")


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure per call, the control's growth subtracted; `control` is that growth, None without a control."""

    estimate: float
    low: float
    high: float
    control: float | None
    resolution: float


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a run says. `growth` and `classes` are bytes (descriptors: a count), None where they are not known."""

    verdict: RetentionVerdict
    basis: tuple[str, ...]
    calls: int
    blocks_per_call: Measure | None
    malloc_bytes_per_call: Measure | None
    bytes_per_call: Measure | None
    growth: dict[str, dict[str, int | None]]
    classes: dict[str, int | None]
    released_at_close_bytes: int | None
    blocks_by_size: dict[str, float] | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "verdict": self.verdict.value, "basis": list(self.basis)}


def judge(run: Mapping[str, Any], control: Mapping[str, Any] | None = None) -> Analysis:
    """Judge a run object (docs/schema/hwr-diag); a control counts if it is complete and measures something else than the run does."""
    samples = run.get("samples") or []
    closed = next((sample for sample in samples if sample["phase"] == "closed"), None)
    against = control.get("samples") if control is not None and control.get("complete") else None
    anonymous = _series(samples, _BYTES.sample)
    found = {kind.sample: _measured(kind, samples, against) for kind in (_BLOCKS, _MALLOC, _BYTES)}
    words = {name: word for name, (_, word, _) in found.items() if word is not None}
    verdict = _together(words)
    basis = tuple(why for _, _, why in found.values() if why)
    if not run.get("complete", True):
        done = 0 if anonymous is None else anonymous.total_calls
        verdict = RetentionVerdict.INCONCLUSIVE
        basis = (f"The run ended after {done:,} of {run['arguments']['iterations']:,} calls; what came before is no verdict.", *basis)
    baseline, last = _at(samples, "baseline"), _at(samples, "loop")
    released = None if closed is None or last is None else last["anonymous_bytes"] - closed["anonymous_bytes"]
    return Analysis(
        verdict=verdict,
        basis=basis,
        calls=0 if anonymous is None else anonymous.total_calls,
        blocks_per_call=found[_BLOCKS.sample][0],
        malloc_bytes_per_call=found[_MALLOC.sample][0],
        bytes_per_call=found[_BYTES.sample][0],
        growth={"loop": _growth(baseline, last), "closed": _growth(baseline, closed)},
        classes=_classes(baseline, last),
        released_at_close_bytes=released,
        blocks_by_size=_blocks_by_size(run, anonymous),
    )


def _together(words: Mapping[str, RetentionVerdict]) -> RetentionVerdict:
    """One measure is enough for retained; flat needs all that there are, anonymous memory among them."""
    if RetentionVerdict.RETAINED in words.values():
        return RetentionVerdict.RETAINED
    flat = _BYTES.sample in words and set(words.values()) == {RetentionVerdict.FLAT}
    return RetentionVerdict.FLAT if flat else RetentionVerdict.INCONCLUSIVE


def _measured(
    kind: _Kind, samples: Sequence[Mapping[str, Any]], control_samples: Sequence[Mapping[str, Any]] | None
) -> tuple[Measure | None, RetentionVerdict | None, str]:
    """Return a measure, its verdict, and why; None where there is nothing to judge."""
    series = _series(samples, kind.sample)
    if series is None:
        return (
            None,
            None,
            "Interpreter blocks are not counted here (PYTHONMALLOC=malloc, or another interpreter)." if kind is _BLOCKS else "",
        )
    control = None if control_samples is None else _series(control_samples, kind.sample)
    interval = slope(series, control, resolution=kind.resolution)
    drift = 0.0 if control is None else control.net / control.total_calls
    word, why = _judged(kind, series, interval, drift, _series(samples, "malloc_free_bytes"))
    measure = Measure(
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        control=None if control is None else drift,
        resolution=kind.resolution / series.total_calls,
    )
    shown = _count if kind is _BLOCKS else _bytes
    figure = f"{shown(interval.estimate)} a call ({shown(interval.low)} to {shown(interval.high)})"
    return measure, word, f"{kind.title}: {figure}: {why}."


def _judged(kind: _Kind, series: Series, interval: Interval, drift: float, free: Series | None) -> tuple[RetentionVerdict, str]:
    """Judge one series; `drift` a call is the control's, `free` what malloc holds free."""
    resolution, calls = kind.resolution, series.total_calls
    excess, late = series.net - drift * calls, series.late - drift * calls / 2
    settled = series.settled(resolution + abs(drift) * calls / 3)
    limit = max(FLAT_RESOLUTIONS * resolution / calls, kind.flat)
    told_apart = kind.exact or len(series.values) > LEAST_INCREMENTS
    if interval.low > 0 and late > resolution:
        if told_apart:
            return RetentionVerdict.RETAINED, "it grows to the end"
        return RetentionVerdict.INCONCLUSIVE, "it grows, in too few samples to tell from noise: sample more often"
    tail = series.from_lowest()
    if tail is not None and late > resolution and told_apart and slope(tail, resolution=resolution).low > max(0.0, drift):
        return RetentionVerdict.RETAINED, "it fell at first, and grows to the end from there"
    if limit > kind.largest:
        return RetentionVerdict.INCONCLUSIVE, f"too few calls to tell: at least {_needed_calls(kind):,} are needed"
    if interval.high <= limit:
        return RetentionVerdict.FLAT, "no growth that this run could tell"
    if settled and excess <= resolution:
        return RetentionVerdict.FLAT, "it rose meanwhile, fell back to the baseline and stayed there"
    if settled and excess <= FLAT_RESOLUTIONS * resolution:
        return RetentionVerdict.FLAT, "a little at first, and nothing towards the end"
    if settled and kind is _BYTES and free is not None and excess - free.net <= resolution:
        return RetentionVerdict.FLAT, "it grew, then stopped; what grew was freed, malloc holds it for the next who asks"
    if settled:
        return RetentionVerdict.INCONCLUSIVE, "it grew, then stopped: repeat with a longer warm-up"
    return RetentionVerdict.INCONCLUSIVE, "too uneven to tell: repeat with more calls or on a quieter machine"


def _needed_calls(kind: _Kind) -> int:
    return int(FLAT_RESOLUTIONS * kind.resolution / kind.largest)


def _series(samples: Sequence[Mapping[str, Any]], name: str) -> Series | None:
    rows = [(sample["iterations"], sample[name]) for sample in samples if sample["phase"] in ("baseline", "loop")]
    if len(rows) < 2 or any(value is None for _, value in rows):
        return None
    return Series(tuple(calls for calls, _ in rows), tuple(value for _, value in rows))


def _at(samples: Sequence[Mapping[str, Any]], phase: str) -> Mapping[str, Any] | None:
    return next((sample for sample in reversed(samples) if sample["phase"] == phase), None)


def _growth(baseline: Mapping[str, Any] | None, later: Mapping[str, Any] | None) -> dict[str, int | None]:
    return {name: _difference(baseline, later, name) for name in GROWTH_KEYS}


def _difference(baseline: Mapping[str, Any] | None, later: Mapping[str, Any] | None, name: str) -> int | None:
    before, after = (None if sample is None else sample.get(name) for sample in (baseline, later))
    return None if before is None or after is None else after - before


def _classes(baseline: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> dict[str, int | None]:
    """Split what grew in the loop; what no allocator that can be asked accounts for is `other_anonymous`."""
    found = {kind: _difference(baseline, last, name) for kind, name in _CLASSES.items()}
    anonymous = _difference(baseline, last, "anonymous_bytes")
    known = [found[kind] for kind in (RetentionClass.INTERPRETER, RetentionClass.MALLOC_IN_USE, RetentionClass.ALLOCATOR_FREE)]
    # Never below nothing: objects also fill pages that were there already.
    other = None if anonymous is None or None in known else max(0, anonymous - sum(value or 0 for value in known))
    return {kind.value: other if kind is RetentionClass.OTHER_ANONYMOUS else found[kind] for kind in RetentionClass}


def _blocks_by_size(run: Mapping[str, Any], anonymous: Series | None) -> dict[str, float] | None:
    classes = run.get("size_classes")
    if not classes or anonymous is None:
        return None
    per_call = {size: (counts["loop"] - counts["baseline"]) / anonymous.total_calls for size, counts in classes.items()}
    return {size: rate for size, rate in per_call.items() if abs(rate) * anonymous.total_calls > _BLOCKS.resolution}


def _bytes(count: float) -> str:
    return f"{count:.2f} B" if abs(count) < 1024 else bytes_text(count)


def _count(count: float) -> str:
    return f"{count:.4g}"
