"""Curves drawn: as a file by matplotlib, or as text by plotext.

Owns the look. Promises that neither library is imported before it is needed, that a missing one is said with the way to get it, that text
is as wide as asked and without colour unless asked. Refuses other formats than PNG and SVG.
"""

from __future__ import annotations

import io
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

from diag.report.document import write_bytes
from diag.report.retention_plot import Drawing, Line, Panel
from hwr.errors import EXIT_NOT_MEASURED, HwrError, OptionError
from hwr.outcomes import FailureCode

SUFFIXES: Final = (".png", ".svg")
# Okabe and Ito's palette, which people tell apart whatever their colour vision; grey is the control's.
_PALETTE: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY: Final = "#777777"
_DASHES: Final = ("solid", (0, (5, 2)), (0, (2, 2)), "dashdot")  # a repetition each
_PANEL_ROWS: Final = 14
_MARKERS: Final = ("hd", "o", "*", "+", "#", "s")
_CLOSED, _CLOSED_LABEL = "X", "closed"
_X_TICKS: Final = 4
_Y_TICKS: Final = 4


class LibraryMissing(HwrError):
    """{library} is not installed here ({problem})
    Install it: pip install 'hwr-suite[plot]'."""

    code: ClassVar[FailureCode] = FailureCode.INVALID_CONFIG
    exit_code: ClassVar[int] = EXIT_NOT_MEASURED  # as `run --attribute` ends without memray


def drawn_file(drawing: Drawing, path: Path) -> None:
    """Draw into a PNG or SVG file.

    Raises:
        OptionError: another suffix.
        LibraryMissing: matplotlib is absent.
        NotWritten: the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise OptionError(
            option=f"-o {path}", problem=f"its suffix is {suffix or 'missing'}", remedy="Name a file that ends in .png or .svg."
        )
    _needed("matplotlib")
    from matplotlib import rc_context

    image = io.BytesIO()
    # Text stays text in an SVG, and the same drawing is the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hwr-diag"}):
        _figure(drawing).savefig(image, format=suffix[1:], dpi=144, metadata={"Date": None} if suffix == ".svg" else None)
    write_bytes(path, image.getbuffer())


def drawn_text(drawing: Drawing, width: int, *, colour: bool) -> str:
    """Draw as text of at most `width` columns, a panel below the other.

    Raises:
        LibraryMissing: plotext is absent.
    """
    plotext = _needed("plotext")
    parts = [drawing.title, drawing.y_label, *(_panel_text(plotext, panel, width, colour) for panel in drawing.panels)]
    parts += [f"left out: {sentence}" for sentence in drawing.left_out]
    return "\n".join(parts)


def _figure(drawing: Drawing) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows, columns = drawing.rows, drawing.columns
    single = rows == columns == 1
    figure = Figure(figsize=(7.5, 4.8) if single else (max(6.5, 1.2 + 3.4 * columns), 1.6 + 2.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = _colours(drawing)
    handles: dict[str, Any] = {}
    for panel in drawing.panels:
        place = axes[panel.row][panel.column]
        for line in panel.lines:
            _draw_line(place, line, colours, handles)
        place.set_title(panel.title, fontsize=10)
    for place in axes.flat:
        place.axhline(0, color="black", linewidth=0.6, zorder=0)
        place.grid(True, linewidth=0.4, alpha=0.5)
        place.spines[["top", "right"]].set_visible(False)
        place.xaxis.set_major_formatter(FuncFormatter(lambda calls, _: f"{calls:,.0f}"))
        place.tick_params(labelsize=8)
        place.xaxis.set_major_locator(_locator())
    for place in axes[-1]:  # not supxlabel: the legend below the axes would lie over it
        place.set_xlabel("calls", fontsize=9)
    figure.supylabel(drawing.y_label, fontsize=10)
    figure.suptitle(drawing.title, fontsize=11)
    handles |= _further(drawing)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 2 + 2 * columns), frameon=False, fontsize=9
    )
    return figure


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=_X_TICKS + 1, steps=[1, 2, 2.5, 5, 10], integer=True)


def _draw_line(place: Any, line: Line, colours: dict[str, str], handles: dict[str, Any]) -> None:
    colour = _GREY if line.is_control else colours[line.mode]
    dash = _DASHES[(line.repetition - 1) % len(_DASHES)]
    calls, figures = zip(*line.points, strict=True)
    (curve,) = place.plot(
        calls, figures, color=colour, linestyle=dash, linewidth=1.5, marker=".", markersize=4, zorder=2 if line.is_control else 3
    )
    handles.setdefault(line.label, curve)
    if line.closed is not None:
        place.plot(
            [line.closed[0]], [line.closed[1]], color=colour, marker="X", markersize=8, markeredgecolor="white", linestyle="none", zorder=4
        )


def _further(drawing: Drawing) -> dict[str, Any]:
    """Return what a reader needs to be told besides the colours."""
    from matplotlib.lines import Line2D

    lines = [line for panel in drawing.panels for line in panel.lines]
    found: dict[str, Any] = {}
    if any(line.repetition > 1 for line in lines):
        found["repetition 2"] = Line2D([], [], color=_GREY, linestyle=_DASHES[1], linewidth=1.5)
    if any(line.closed is not None for line in lines):
        found[_CLOSED_LABEL] = Line2D([], [], color="black", marker="X", markersize=8, linestyle="none")
    return found


def _colours(drawing: Drawing) -> dict[str, str]:
    modes: dict[str, None] = {}
    for panel in drawing.panels:
        modes.update({line.mode: None for line in panel.lines if not line.is_control})
    return {mode: _PALETTE[number % len(_PALETTE)] for number, mode in enumerate(modes)}


def _panel_text(plotext: Any, panel: Panel, width: int, colour: bool) -> str:
    figure = plotext.figure
    figure.clear()
    figure.theme("default" if colour else "colorless")
    figure.plot_size(width, _PANEL_ROWS)
    figure.title(panel.title)
    figure.label("calls", "x")
    last = max(calls for line in panel.lines for calls, _ in line.points)
    ticks = sorted({last * tick // _X_TICKS for tick in range(_X_TICKS + 1)})
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    values = [value for line in panel.lines for _, value in (*line.points, *((line.closed,) if line.closed else ()))]
    steps = [min(values) + (max(values) - min(values)) * tick / _Y_TICKS for tick in range(_Y_TICKS + 1)]
    figure.ruler("y").ticks(steps, [f"{step:,.0f}" if max(values) - min(values) >= 10 else f"{step:.1f}" for step in steps])
    markers: dict[str, str] = {}
    for line in panel.lines:
        calls, figures = zip(*line.points, strict=True)
        named = line.label in markers
        marker = markers.setdefault(line.label, "." if line.is_control else _MARKERS[len(markers) % len(_MARKERS)])
        signal = figure.signal(list(calls), list(figures), marker=marker)
        signal.lines(True)
        if not named:
            signal.label(line.label)
        figure.draw(signal)
    closed = [line.closed for line in panel.lines if line.closed is not None]
    if closed:
        mark = figure.signal([calls for calls, _ in closed], [value for _, value in closed], marker=_CLOSED)
        mark.label(_CLOSED_LABEL)
        figure.draw(mark)
    return str(figure.build().string(colorless=not colour))


def _needed(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise LibraryMissing(library=library, problem=str(error)) from None
