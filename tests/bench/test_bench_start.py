"""What the start of a command costs over the start of an interpreter with argparse."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from figures import record

import diag

pytestmark = pytest.mark.bench

RATIO_BUDGET = 1.5
ROUNDS = 40
REPOSITORY = Path(diag.__file__).resolve().parents[1]

# What the installer writes for a console script.
COMMAND = "import sys\nfrom diag.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
# The same parser, written with nothing but argparse.
BARE = """
import argparse
import sys


def main():
    parser = argparse.ArgumentParser(
        prog="hwr-diag",
        allow_abbrev=False,
        description="Scripted answers about memory and stalls. The report goes to standard output, progress and notes to standard error.",
        epilog="Exit status: 0 fine, 1 findings, 2 usage, 3 could not measure, 4 timeout, 70 internal error, 128+N ended by signal N.",
    )
    parser.add_argument("--version", action="store_true", help="show program's version number and exit")
    commands = parser.add_subparsers(metavar="VERB")
    commands.add_parser("retention", help="measure what stays in memory per call of a library, and say what it follows", add_help=False)
    parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
"""


def test_the_help_of_hwr_diag(tmp_path: Path) -> None:
    """`hwr-diag --help` and a bare argparse script of the same parser, in the same interpreter, in turn."""
    scripts = {"ours": tmp_path / "ours.py", "bare": tmp_path / "bare.py"}
    scripts["ours"].write_text(COMMAND)
    scripts["bare"].write_text(BARE)
    environment = {"PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8", "COLUMNS": "100"}
    seconds: dict[str, list[float]] = {name: [] for name in scripts}
    said = {}
    for _ in range(ROUNDS + 1):  # the first one writes bytecode
        for name, script in scripts.items():
            begun = time.perf_counter()
            done = subprocess.run(
                [sys.executable, script, "--help"], env=environment, capture_output=True, text=True, check=True, timeout=60
            )
            seconds[name].append(time.perf_counter() - begun)
            said[name] = done.stdout
    assert "retention" in said["ours"]
    assert len(said["bare"].splitlines()) >= len(said["ours"].splitlines()) - 1
    ours, bare = (statistics.median(seconds[name][1:]) for name in ("ours", "bare"))
    record("start of hwr-diag --help", ours * 1e3, "ms")
    record("start of a bare argparse script", bare * 1e3, "ms")
    record("start of hwr-diag --help over a bare argparse script", ours / bare, "ratio", f"<= {RATIO_BUDGET}", ours / bare <= RATIO_BUDGET)
