"""Figures of benchmarks: measured, compared with their budget, printed and kept; never a reason to fail."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure; `budget` is a number or how a person reads it, `within` is None where there is none."""

    name: str
    figure: float
    unit: str
    budget: float | str
    within: bool | None


figures: list[Figure] = []


def record(name: str, figure: float, unit: str, budget: float | str = "", verdict_ok: bool | None = None) -> None:
    """Keep a figure for the table at the end of the run."""
    figures.append(Figure(name=name, figure=figure, unit=unit, budget=budget, within=verdict_ok))


def table() -> str:
    """Return all figures as lines of equal columns."""
    words = {True: "ok", False: "OVER", None: "-"}
    rows = [("figure", "measured", "unit", "budget", "verdict")]
    rows += [(one.name, f"{one.figure:.4g}", one.unit, str(one.budget) or "-", words[one.within]) for one in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def write(path: Path) -> None:
    """Write all figures as JSON."""
    path.write_text(json.dumps({"schema_version": 1, "figures": [asdict(one) for one in figures]}, indent=2) + "\n")
