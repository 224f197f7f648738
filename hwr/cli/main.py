"""The `hwr` command.

Owns the parser and the choice of the command. Promises that help loads neither torch nor Textual.
Refuses to know what the commands do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from hwr.cli import demo, publish, run, store
from hwr.ending import ended, show_logs, telemetry_wanted
from hwr.usage import HwrParser, open_streams

PLUGINS = "hwr.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    open_streams()
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = chosen.command
    show_logs(getattr(chosen, "log_level", None))
    wanted = telemetry_wanted(getattr(chosen, "telemetry", None))
    return ended(lambda: command(chosen), enabled=wanted, run_dir=getattr(chosen, "run_dir", None))


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


if __name__ == "__main__":
    sys.exit(main())
