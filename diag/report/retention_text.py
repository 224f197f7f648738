"""One retention run for people.

Owns the lines of the report: the verdict first, then what was measured, what grew, where, and what the verdict does not say. Promises
that nothing unknown is shown as 0, that a run which did not come to its end says so before anything else, and printable lines.
Refuses to judge: whatever it says of the figures, the analysis says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from diag.probes.matrix import CALL
from hwr.units import bytes_text, one_line, seconds_text

UNKNOWN: Final = "-"
GROWTH: Final = (("private", "private_bytes"), ("anonymous", "anonymous_bytes"), ("RSS", "rss_bytes"), ("descriptors", "fd_count"))
CLASSES: Final = (
    ("interpreter", "interpreter, in use"),
    ("malloc_in_use", "malloc, in use"),
    ("allocator_free", "malloc, held free"),
    ("other_anonymous", "other anonymous"),
    ("file", "pages of files"),
    ("locked", "locked"),
)
NOTE: Final = "True of this case, size, offset and these versions only; no root cause, no estimate per request: docs/retention.md"
_HEADLINES: Final = {
    "timeout": "not measured: the time was over",
    "signal": "not measured: the probe was ended",
    "broken": "not measured: the measurement is broken",
    "unusable": "not measured: nothing can be measured here",
    "usage": "not measured: the arguments were refused",
}
_STACKS: Final = 3
_OFTEN: Final = 0.05  # blocks a call: below it is what a cache fills once
_FRAMES: Final = 8


def lines(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report."""
    yield from _verdict(run)
    if run.get("python"):
        yield ""
        yield from _measured(run)
    analysis = run.get("analysis")
    if analysis:
        yield ""
        yield from _growth(analysis)
        yield from _classes(analysis)
        yield from _attribution(run)
    for warning in run.get("warnings") or ():
        yield f"warning: {one_line(str(warning), 1000)}"
    if analysis:
        yield NOTE


def case_text(run: Mapping[str, Any]) -> str:
    """Say what was measured: `get_tensor, 64 elements at offset 0, 1,000,000 calls`."""
    asked = run["arguments"]
    tensor = f"{_count(asked.get('tensor_elements'))} elements at offset {_count(asked.get('offset_bytes') or 0)}"
    what = asked.get("call") if asked.get("mode") == CALL else tensor
    return one_line(f"{asked.get('mode')}, {what}, {_count(asked.get('iterations'))} calls", 500)


def _verdict(run: Mapping[str, Any]) -> Iterator[str]:
    ending, analysis = run.get("ending") or {}, run.get("analysis")
    if ending.get("status") in _HEADLINES:
        yield f"{_HEADLINES[ending['status']]} ({case_text(run)})"
        yield from (f"  {one_line(line, 500)}" for line in str(ending.get("message") or "").splitlines())
    else:
        yield f"{analysis['verdict'] if analysis else 'not judged'}: {case_text(run)}"
    if not analysis:
        return
    so_far = "per call" if run.get("complete", True) else "per call, so far"
    for sentence in analysis.get("basis") or ():
        yield f"  {one_line(str(sentence), 500)}"
    yield ""
    yield f"{so_far:28}{'estimate':>12}{'low':>12}{'high':>12}{'control':>12}{'resolution':>12}"
    yield _interval("interpreter blocks", analysis.get("blocks_per_call"), 3)
    for size, count in (analysis.get("blocks_by_size") or {}).items():
        yield f"    {one_line(f'of {size} bytes'):24}{float(count):>12.3f}"
    if analysis.get("malloc_bytes_per_call") is not None:
        yield _interval("malloc bytes", analysis["malloc_bytes_per_call"], 1)
    yield _interval("anonymous bytes", analysis.get("bytes_per_call"), 1)


def _interval(what: str, found: Mapping[str, Any] | None, digits: int) -> str:
    shown = ""
    for name in ("estimate", "low", "high", "control", "resolution"):
        value = (found or {}).get(name)
        shown += f"{UNKNOWN if value is None else format(round(value, digits) + 0.0, f'.{digits}f'):>12}"
    return f"  {what:26}{shown}"


def _measured(run: Mapping[str, Any]) -> Iterator[str]:
    allocator, file = run.get("allocator") or {}, run.get("file") or {}
    cpus = ",".join(map(str, run.get("cpu_affinity") or ())) or UNKNOWN
    yield one_line(
        f"measured with {run.get('implementation') or 'Python'} {run.get('python') or UNKNOWN}, torch {run.get('torch') or UNKNOWN}, "
        f"safetensors {run.get('safetensors') or UNKNOWN}, {allocator.get('libc') or 'C library not known'}, "
        f"Linux {run.get('kernel') or UNKNOWN}, CPUs {cpus}",
        500,
    )
    if run.get("executable"):
        yield f"interpreter   {one_line(str(run['executable']), 500)}"
    for name, value in (allocator.get("environment") or {}).items():
        yield f"allocator     {one_line(f'{name}={value}')}"
    if file:
        place = f"bytes {_count(file.get('begin'))} to {_count(file.get('end'))}"
        yield f"file          {_count(file.get('header_bytes'))} bytes of header, the tensor at {place} of {_count(file.get('file_bytes'))}"
    loop = next((sample for sample in reversed(run.get("samples") or []) if sample.get("phase") == "loop"), None)
    if loop is not None:
        done = f"{_count(loop.get('iterations'))} calls in {seconds_text(loop.get('loop_seconds') or 0.0)}"
        preparation = run.get("preparation_seconds")
        prepared = "" if preparation is None else f", prepared in {seconds_text(preparation)}"
        yield f"time          {done}{prepared}; {seconds_text((run.get('run') or {}).get('seconds') or 0.0)} in all"
    yield f"control       {_control(run.get('control'))}"


def _control(control: Mapping[str, Any] | None) -> str:
    if control is None:
        return "none"
    if not control.get("complete"):
        return "not measured"
    return case_text(control)


def _growth(analysis: Mapping[str, Any]) -> Iterator[str]:
    growth, released = analysis.get("growth") or {}, analysis.get("released_at_close_bytes")
    yield f"{'growth since the baseline':28}{'loop':>14}{'closed':>14}"
    for name, key in GROWTH:
        shown = [_signed((growth.get(phase) or {}).get(key), is_bytes=key != "fd_count") for phase in ("loop", "closed")]
        yield f"  {name:26}{shown[0]:>14}{shown[1]:>14}"
        if key == "anonymous_bytes" and released is not None:
            yield f"    {'by closing alone':24}{'':14}{_signed(-released):>14}"


def _classes(analysis: Mapping[str, Any]) -> Iterator[str]:
    classes = analysis.get("classes")
    if not classes:
        return
    yield "of it, after the loop"
    for key, name in CLASSES:
        yield f"  {name:26}{_signed(classes.get(key)):>14}"


def _attribution(run: Mapping[str, Any]) -> Iterator[str]:
    stacks = run.get("attribution")
    if stacks is None:
        return
    yield "allocated in a repetition under memray and not freed by its end, innermost frame first"
    often = [stack for stack in stacks if (stack.get("count_per_call") or 0) >= _OFTEN]
    if not often:
        yield f"  no stack has {_OFTEN:g} blocks a call or more"
    for stack in often[:_STACKS]:
        yield f"  {stack['count_per_call']:.3f} blocks, {stack.get('bytes_per_call') or 0:.1f} bytes a call"
        yield from (f"    {one_line(str(frame), 200)}" for frame in (stack.get("stack") or ())[:_FRAMES])


def _signed(value: int | None, *, is_bytes: bool = True) -> str:
    if value is None:
        return UNKNOWN
    text = bytes_text(abs(value)) if is_bytes else f"{abs(value):,}"
    return f"{'-' if value < 0 else '+' if value else ''}{text}"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else UNKNOWN
