"""Retention runs as curves: what is drawn, before anything draws it.

Owns the way from runs to panels of lines: loop minus baseline over calls, the control as a second line, `closed` as a mark; a matrix is
a panel for each element count and offset, with a colour for each mode. Promises that a figure which a run does not have is left out and
never 0. Refuses to know a drawing library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from diag.probes.matrix import CONTROL
from diag.probes.retention_files import Collected, NotOfThisKind, Run, read_run
from hwr.errors import Unavailable
from hwr.units import KIB, MIB, one_line


class Measure(StrEnum):
    """What is drawn."""

    ANONYMOUS = "anonymous"
    PRIVATE = "private"
    RSS = "rss"
    BLOCKS = "blocks"


_KEYS: Final = {
    Measure.ANONYMOUS: "anonymous_bytes",
    Measure.PRIVATE: "private_bytes",
    Measure.RSS: "rss_bytes",
    Measure.BLOCKS: "allocated_blocks",
}
_NAMES: Final = {
    Measure.ANONYMOUS: "anonymous memory",
    Measure.PRIVATE: "private memory",
    Measure.RSS: "resident memory",
    Measure.BLOCKS: "interpreter blocks",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One run: `points` are calls and the figure minus the baseline's; `closed` is the same after everything was let go of."""

    mode: str
    label: str
    points: tuple[tuple[int, float], ...]
    closed: tuple[int, float] | None = None
    is_control: bool = False
    repetition: int = 1


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share axes; `row` and `column` place it among the others."""

    title: str
    lines: tuple[Line, ...]
    row: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Drawing:
    """All panels, the words of the axes, and what was left out. Figures are in `unit`."""

    title: str
    y_label: str
    panels: tuple[Panel, ...]
    left_out: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of panels."""
        return 1 + max(panel.row for panel in self.panels)

    @property
    def columns(self) -> int:
        """Columns of panels."""
        return 1 + max(panel.column for panel in self.panels)


def drawing_of(collected: Collected, measure: Measure) -> Drawing | Unavailable:
    """Arrange what was collected; Unavailable if no run has two samples of this measure."""
    panels, left_out = _run_panel(collected, measure) if len(collected.runs) == 1 else _matrix_panels(collected, measure)
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return Unavailable(left_out[0] if left_out else "it has no samples")
    unit, scale = _unit(measure, panels)
    return Drawing(
        title=_title(collected),
        y_label=f"{_NAMES[measure]} above the baseline{unit}",
        panels=tuple(_scaled(panel, scale) for panel in panels),
        left_out=tuple(left_out),
    )


def _run_panel(collected: Collected, measure: Measure) -> tuple[list[Panel], list[str]]:
    (run,) = collected.runs
    left_out: list[str] = list(collected.unread)
    lines = list(_line(run, measure, left_out, label=_label(run)))
    control = _control_of(run, collected)
    if control is not None:
        lines += _line(control, measure, left_out, label=f"{control.mode} (control)", is_control=True)
    title = (
        f"{run.tensor_elements} elements, offset {run.offset_bytes}"
        if run.case.has_tensor
        else one_line(str(run.data["arguments"].get("call")))
    )
    return [Panel(title, tuple(lines))], left_out


def _matrix_panels(collected: Collected, measure: Measure) -> tuple[list[Panel], list[str]]:
    left_out: list[str] = list(collected.unread)
    elements = sorted({run.tensor_elements for run in collected.runs})
    offsets = sorted({run.offset_bytes for run in collected.runs})
    panels = []
    for row, offset in enumerate(offsets):
        for column, count in enumerate(elements):
            lines: list[Line] = []
            seen: dict[str, int] = {}
            for run in sorted(collected.runs, key=lambda run: (run.mode == CONTROL, run.name)):
                if (run.tensor_elements, run.offset_bytes) == (count, offset):
                    seen[run.mode] = seen.get(run.mode, 0) + 1
                    control = run.mode == CONTROL
                    label = f"{run.mode} (control)" if control else _label(run)
                    lines += _line(run, measure, left_out, label=label, is_control=control, repetition=seen[run.mode])
            panels.append(Panel(f"{count} elements, offset {offset}", tuple(lines), row, column))
    return panels, left_out


def _label(run: Run) -> str:
    return run.mode if run.complete else f"{run.mode} (did not end)"


def _line(run: Run, measure: Measure, left_out: list[str], *, label: str, is_control: bool = False, repetition: int = 1) -> Iterator[Line]:
    key = _KEYS[measure]
    by_phase: dict[str, list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        by_phase.setdefault(str(sample["phase"]), []).append(sample)
    baseline = (by_phase.get("baseline") or [{}])[-1].get(key)
    loop = [(int(sample["iterations"]), sample[key]) for sample in by_phase.get("loop", ()) if sample.get(key) is not None]
    if baseline is None or not loop:
        what = "no baseline" if "baseline" not in by_phase else f"no {_NAMES[measure]}" if baseline is None else "no loop sample"
        left_out.append(one_line(f"{run.name or run.mode}: {what}"))
        return
    points = ((0, 0.0), *((calls, float(value - baseline)) for calls, value in loop))
    end = (by_phase.get("closed") or [{}])[-1].get(key)
    closed = None if end is None else (loop[-1][0], float(end - baseline))
    yield Line(run.mode, label, points, closed, is_control, repetition)


def _control_of(run: Run, collected: Collected) -> Run | None:
    embedded = run.data.get("control")
    if isinstance(embedded, dict):
        return Run("its control", embedded)
    name = run.data.get("control_file")
    if not isinstance(name, str) or "/" in name or not name.endswith(".json"):
        return None
    try:
        return read_run((collected.path if collected.path.is_dir() else collected.path.parent) / name)
    except NotOfThisKind:
        return None


def _unit(measure: Measure, panels: Iterable[Panel]) -> tuple[str, int]:
    if measure is Measure.BLOCKS:
        return "", 1
    largest = max(
        abs(value) for panel in panels for line in panel.lines for _, value in (*line.points, *((line.closed,) if line.closed else ()))
    )
    return (", MiB", MIB) if largest >= 4 * MIB else (", KiB", KIB)


def _scaled(panel: Panel, scale: int) -> Panel:
    lines = tuple(
        Line(
            line.mode,
            line.label,
            tuple((calls, value / scale) for calls, value in line.points),
            None if line.closed is None else (line.closed[0], line.closed[1] / scale),
            line.is_control,
            line.repetition,
        )
        for line in panel.lines
    )
    return Panel(panel.title, lines, panel.row, panel.column)


def _title(collected: Collected) -> str:
    versions = sorted({f"safetensors {run.data.get('safetensors')}, torch {run.data.get('torch')}" for run in collected.runs})
    return one_line(" and ".join(versions[:3]), 160)
