"""The `hwr` command.

Owns the choice of the command and the one place where failures become two lines and an exit status: 0 fine, 1 typed failure, 2 usage,
3 could not measure, 4 timeout, 70 internal, 128+N signal. Promises that help loads neither torch nor Textual.
Refuses tracebacks for what has a name.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from hwr import telemetry
from hwr.cli import demo, publish, run, store
from hwr.cli.arguments import HwrParser
from hwr.errors import EXIT_INTERNAL, HwrError
from hwr.outcomes import Role
from hwr.telemetry.failures import record_failure
from hwr.units import one_line

PLUGINS = "hwr.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = chosen.command
    show_logs(getattr(chosen, "log_level", None))
    try:
        return command(chosen)
    except HwrError as error:
        return report_failure(error, getattr(chosen, "run_dir", None))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; so may the interpreter's own complaint about it
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001  (the last line of defence: a name, a place to look, a status)
        where = telemetry.journal_directory()
        print(f"hwr: internal error: {type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        print(f"Please report it with the journal{f' in {where}' if where else ''}; the traceback follows.", file=sys.stderr)
        import traceback

        traceback.print_exception(error)
        return EXIT_INTERNAL


def build_parser() -> HwrParser:
    """Return the parser with every command, those of other distributions included."""
    parser = HwrParser(
        prog="hwr", description="Host Weight Runtime: final weights on the node, memory-mapped, saying what happens to them."
    )
    parser.add_argument("--version", action="version", version=f"hwr {metadata.version('hwr-suite')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (run, publish, store, demo):
        module.add_command(commands)
    for plugin in metadata.entry_points(group=PLUGINS):
        plugin.load()(commands)
    return parser


def show_logs(level: str | None) -> None:
    """Show the log projection only to those who ask: without a handler, Python would print warnings beside our two lines."""
    logger = logging.getLogger("hwr")
    if level is None:
        logger.addHandler(logging.NullHandler())
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def report_failure(error: HwrError, run_dir: str | None = None) -> int:
    """Say it in two lines, leave it in the journal, and return its status."""
    if not telemetry.journal_directory():
        telemetry.configure(run_dir=run_dir, role=Role.TOOL)
    record_failure(error, fatal=True)
    print(f"hwr: {error.cause}", file=sys.stderr)
    if error.way_out:
        print(error.way_out, file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
