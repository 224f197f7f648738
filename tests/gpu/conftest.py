"""What a run on a device measured, as one JSON line a test at the end."""

from __future__ import annotations

import json

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the properties that the tests recorded, of failed ones too."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ()) if report.when == "call"]
    told = [report for report in reports if report.user_properties and "gpu" in report.keywords]
    if told:
        terminalreporter.section("figures")
        for report in told:
            terminalreporter.write_line(json.dumps({"test": report.nodeid.rpartition("::")[2], **dict(report.user_properties)}))
