"""Draw retention runs: what is held above the baseline over the calls, and after everything was let go of.

Owns the arguments, and the choice between a file and the terminal. Promises to draw what was measured and no line beyond it.
Refuses to judge.
"""

from __future__ import annotations

import argparse

from diag.cli.values import path

_LEAST_COLUMNS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument(
        "path", metavar="PATH", type=path, help="a run's JSON, its .samples.jsonl, or a directory of `run -o` or `matrix -o`"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=path, help="draw into FILE.png or FILE.svg, by matplotlib; without it in the terminal"
    )
    parser.add_argument(
        "--measure",
        choices=("anonymous", "private", "rss", "blocks"),
        default="anonymous",
        help="what is drawn (default: anonymous; private and rss are context only)",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw, and return the exit status."""
    import shutil
    import sys

    from diag.probes.retention_files import collect
    from diag.report.exits import Exit
    from diag.report.retention_draw import drawn_file, drawn_text
    from diag.report.retention_plot import Measure, drawing_of
    from diag.report.streams import note, out
    from hwr.errors import OptionError, Unavailable

    drawing = drawing_of(collect(arguments.path, samples=True), Measure(arguments.measure))
    if isinstance(drawing, Unavailable):
        raise OptionError(
            option=f"PATH {arguments.path}",
            problem=f"nothing to draw: {drawing.reason}",
            remedy="Draw another measure (--measure), or another run.",
        )
    if arguments.output is not None:
        drawn_file(drawing, arguments.output)
        for sentence in drawing.left_out:
            note(f"left out: {sentence}")
    else:
        colour = sys.stdout.isatty()
        out(drawn_text(drawing, max(_LEAST_COLUMNS, shutil.get_terminal_size().columns), colour=colour))
    return int(Exit.FINE)
