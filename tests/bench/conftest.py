"""The figures of a bench run: one table on the terminal and `bench.json` in the repository's root."""

from __future__ import annotations

from pathlib import Path

import figures
import pytest

REPOSITORY = Path(__file__).parents[2]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was measured, if anything was."""
    if figures.figures:
        figures.write(REPOSITORY / "bench.json")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print it."""
    if figures.figures:
        terminalreporter.section("bench")
        terminalreporter.write_line(figures.table())
