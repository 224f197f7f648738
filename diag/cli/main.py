"""The `hwr-diag` command.

Owns the table of verbs and the way from a command line to the one that was asked for. Promises that only that verb's module is
imported, and none for help; that a verb's 1 means findings, so that a typed failure is "could not measure"; and an orderly end on SIGTERM
and SIGINT. Refuses to know what the verbs do.
"""

from __future__ import annotations

import argparse
import sys

from hwr.usage import HwrParser, open_streams

TYPE_CHECKING = False  # what typing calls so: importing it would cost as much as argparse
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

PROGRAM = "hwr-diag"

# A verb's name, its module and its line in the help. The module has `add_arguments(parser)`, which sets the default `command`, a
# callable from the parsed namespace to an exit status.
VERBS: Mapping[str, tuple[str, str]] = {
    "retention": ("diag.cli.retention", "measure what stays in memory per call of a library, and say what it follows"),
}


def main(arguments: Sequence[str] | None = None, verbs: Mapping[str, tuple[str, str]] = VERBS) -> int:
    """Run a verb and return its exit status."""
    closed = sys.stdout is None
    open_streams()
    chosen = parsed(sys.argv[1:] if arguments is None else arguments, verbs)
    # Here, because they load the journal's and the metrics' libraries, which help and usage errors do without.
    from hwr.ending import ended, show_logs, telemetry_wanted, terminated
    from hwr.errors import EXIT_NOT_MEASURED

    if closed:
        from diag.report.streams import refuse_output

        refuse_output()
    command: Callable[[argparse.Namespace], int] = chosen.command
    show_logs(None, program=PROGRAM)
    status = 0
    with terminated() as stop:
        status = ended(lambda: command(chosen), enabled=telemetry_wanted(None), program=PROGRAM, failure_status=EXIT_NOT_MEASURED)
    return stop.exit_code or status


def parsed(arguments: Sequence[str], verbs: Mapping[str, tuple[str, str]] = VERBS) -> argparse.Namespace:
    """Return the parsed command line; help, version and what is wrong end the process here, as in argparse."""
    name = arguments[0] if arguments else ""
    if name not in verbs:
        _answered_or_refused(arguments[:1], verbs)
    return verb_parser(name, verbs).parse_args(arguments[1:])


def verb_parser(name: str, verbs: Mapping[str, tuple[str, str]] = VERBS) -> HwrParser:
    """Return the parser of a verb, whose module is imported now."""
    from importlib import import_module

    module = import_module(verbs[name][0])
    parser = HwrParser(prog=f"{PROGRAM} {name}", description=(module.__doc__ or "").partition("\n\n")[0])
    module.add_arguments(parser)
    return parser


def _answered_or_refused(word: Sequence[str], verbs: Mapping[str, tuple[str, str]]) -> NoReturn:
    """Answer `--help` and `--version`, and refuse everything else: what stands behind the first word is a verb's, unknown here."""
    frame = _frame(verbs)
    _, unknown = frame.parse_known_args(word)
    frame.error(f"unrecognized arguments: {unknown[0]}" if unknown else "the following arguments are required: VERB")


def _frame(verbs: Mapping[str, tuple[str, str]]) -> HwrParser:
    parser = HwrParser(
        prog=PROGRAM,
        description="Scripted answers about memory and stalls. The report goes to standard output, progress and notes to standard error.",
        epilog="Exit status: 0 fine, 1 findings, 2 usage, 3 could not measure, 4 timeout, 70 internal error, 128+N ended by signal N.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(metavar="VERB")
    for name, (_, text) in verbs.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


class _Version(argparse.Action):
    """As argparse's own, but the version is looked up when it is asked for: reading the metadata takes as long as starting."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib import metadata

        parser._print_message(f"{PROGRAM} {metadata.version('hwr-suite')}\n", sys.stdout)
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
