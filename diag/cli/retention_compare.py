"""Put the runs of two environments side by side: what differs between them, and in which cases.

Owns the arguments and the ending. Promises 3 where the answer is not whole (a case is on one side only, or cannot be told, or a file could
not be read), else 1 where a case differs, else 0. Refuses to measure.
"""

from __future__ import annotations

import argparse

from diag.cli.values import path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("before", metavar="BEFORE", type=path, help="a run's JSON, or a directory of `run -o` or `matrix -o`")
    parser.add_argument("after", metavar="AFTER", type=path, help="what it is compared with")
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
    return int(of_findings(findings) if found.complete else Exit.NOT_MEASURED)
