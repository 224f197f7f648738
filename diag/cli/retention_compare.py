"""Put the runs of two environments side by side: what differs between them, and in which cases.

Owns the arguments and the ending. Promises 0 where every case is the same, 1 where one differs, 3 where nothing, or not every case that
both sides have, could be compared. Refuses to measure.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("before", metavar="BEFORE", type=Path, help="a run's JSON, or a directory of `run -o` or `matrix -o`")
    parser.add_argument("after", metavar="AFTER", type=Path, help="what it is compared with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, and return the exit status."""
    from diag.probes.retention_files import collect
    from diag.report.document import document, print_document
    from diag.report.exits import Exit, of_findings
    from diag.report.retention_compare import lines, side_by_side
    from diag.report.streams import out

    found = side_by_side(collect(arguments.before, argument="BEFORE"), collect(arguments.after, argument="AFTER"))
    findings = found.findings()
    if arguments.json:
        print_document(document("retention compare", findings, **found.to_json()))
    else:
        out("\n".join(lines(found)))
    return int(of_findings(findings) if findings or found.known else Exit.NOT_MEASURED)
