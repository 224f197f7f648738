"""What a retention run says: retained, flat, or inconclusive.

Owns the verdict, its two measures and the classes of what grew. Promises that `retained` needs growth that goes on to the end and cannot
be the instrument's or the control's; that `flat` comes with the most that it could have missed; that everything else is inconclusive.
Refuses the word for a defect, causes, portable thresholds, and figures for requests: growth after objects died is evidence about a
dependency or an allocator in this one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from diag.analysis.statistics import Interval, Series, slope
from hwr.outcomes import RetentionClass, RetentionVerdict
from hwr.units import bytes_text

# What two readings cannot tell apart. Bytes: a page at each end, and one pool of CPython's allocator (16 KiB) that is taken as a
# whole. Blocks: what a collection and free lists move from one sample to the next; most of it was 60 in 100,000 calls of anything.
BYTES_RESOLUTION: Final = (16 << 10) + 2 * (4 << 10)
BLOCKS_RESOLUTION: Final = 256
# Flat is what stays below so many resolutions, or below this a call: far less than one smallest object (16 bytes).
FLAT_RESOLUTIONS: Final = 4
FLAT_BYTES_PER_CALL: Final = 1.0
FLAT_BLOCKS_PER_CALL: Final = 0.01
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
    anonymous, blocks = _series(samples, "anonymous_bytes"), _series(samples, "allocated_blocks")
    against = control.get("samples") if control is not None and control.get("complete") else None
    bytes_measure, byte_word, byte_basis = _measured(anonymous, against, "anonymous_bytes", _series(samples, "malloc_free_bytes"))
    blocks_measure, block_word, block_basis = _measured(blocks, against, "allocated_blocks", None)
    verdict, basis = _together(byte_word, block_word), (*block_basis, *byte_basis)
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
        blocks_per_call=blocks_measure,
        bytes_per_call=bytes_measure,
        growth={"loop": _growth(baseline, last), "closed": _growth(baseline, closed)},
        classes=_classes(baseline, last),
        released_at_close_bytes=released,
        blocks_by_size=_blocks_by_size(run, anonymous),
    )


Word = RetentionVerdict | None


def _together(bytes_word: Word, blocks_word: Word) -> RetentionVerdict:
    words = {word for word in (bytes_word, blocks_word) if word is not None}
    if RetentionVerdict.RETAINED in words:
        return RetentionVerdict.RETAINED
    return RetentionVerdict.FLAT if words == {RetentionVerdict.FLAT} and bytes_word is not None else RetentionVerdict.INCONCLUSIVE


def _measured(
    series: Series | None, control_samples: Sequence[Mapping[str, Any]] | None, name: str, free: Series | None
) -> tuple[Measure | None, Word, tuple[str, ...]]:
    """Return a measure, its verdict, and why; `free` is what malloc holds free, where that is known."""
    blocks = name == "allocated_blocks"
    if series is None:
        return None, None, ("Interpreter blocks are not counted here (PYTHONMALLOC=malloc, or another interpreter).",) if blocks else ()
    control = None if control_samples is None else _series(control_samples, name)
    resolution = BLOCKS_RESOLUTION if blocks else BYTES_RESOLUTION
    interval = slope(series, control, resolution=resolution)
    per_call = resolution / series.total_calls
    measure = Measure(
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        control=None if control is None else control.net / control.total_calls,
        resolution=per_call,
    )
    limit = max(FLAT_RESOLUTIONS * per_call, FLAT_BLOCKS_PER_CALL if blocks else FLAT_BYTES_PER_CALL)
    drift = 0.0 if control is None else control.net / control.total_calls
    word, why = _judged(series, interval, resolution, limit, drift, free)
    shown = _blocks if blocks else _bytes
    figure = f"{shown(interval.estimate)} a call ({shown(interval.low)} to {shown(interval.high)})"
    return measure, word, (f"{'Interpreter blocks' if blocks else 'Anonymous memory'}: {figure}: {why}.",)


def _judged(
    series: Series, interval: Interval, resolution: float, limit: float, drift: float, free: Series | None
) -> tuple[RetentionVerdict, str]:
    excess = series.net - drift * series.total_calls
    late = series.late - drift * series.total_calls / 2
    if interval.low > 0 and late > resolution:
        return RetentionVerdict.RETAINED, "it grows to the end"
    if excess <= resolution and series.peak - max(0, series.net) > resolution:
        return RetentionVerdict.FLAT, "it rose meanwhile and fell back to the baseline"
    if excess <= resolution or interval.high <= limit:
        return RetentionVerdict.FLAT, "no growth that this run could tell"
    if late <= resolution and free is not None and excess - free.net <= resolution:
        return RetentionVerdict.FLAT, "it grew, then stopped; what grew was freed, malloc holds it for the next who asks"
    if late <= resolution and excess <= FLAT_RESOLUTIONS * resolution:
        return RetentionVerdict.FLAT, "a little at first, and nothing in the second half of the calls"
    if late <= resolution:
        return RetentionVerdict.INCONCLUSIVE, "it grew, then stopped: repeat with a longer warm-up"
    return RetentionVerdict.INCONCLUSIVE, "too uneven to tell: repeat with more calls or on a quieter machine"


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
    return {size: rate for size, rate in per_call.items() if abs(rate) * anonymous.total_calls > BLOCKS_RESOLUTION}


def _bytes(count: float) -> str:
    return f"{count:.2f} B" if abs(count) < 1024 else bytes_text(count)


def _blocks(count: float) -> str:
    return f"{count:.4g}"
