"""The options of a command line.

Owns how the option table becomes arguments of a parser, and a parser that refuses in two lines.
Promises that every command spells an option alike, full name first, and that values are judged by the options alone.
Refuses abbreviations: a script that relies on one breaks when an option is added.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from hwr.errors import EXIT_USAGE
from hwr.options import BY_NAME, COMMAND_LINE, CONCERNS, OPTIONS, Option, Options, compose, nearest
from hwr.units import one_line

_UNKNOWN = "unrecognized arguments: "


class HwrParser(argparse.ArgumentParser):
    """A parser without abbreviations that ends with the cause in one line, the way out in the next, and status 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        cause, way_out = message, f"Try: {self.prog} --help"
        if message.startswith(_UNKNOWN):
            unknown = message.removeprefix(_UNKNOWN)
            cause = f"no such argument: {unknown or repr(unknown)}"
            word = unknown.partition(" ")[0].partition("=")[0]
            near = nearest(word, _option_strings(self)) if word.startswith("-") else None
            way_out = f"Did you mean {near}? {way_out}" if near else way_out
        print(f"{self.prog}: {one_line(cause, 1000)}", one_line(way_out, 1000), sep="\n", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def add_options(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add the options (or those of `names`) to a parser, a group a concern; what is not given stays out of the namespace."""
    for name in names or ():
        BY_NAME[name]  # a typing mistake in a command is a KeyError at once, not a missing option
    for concern, holder in CONCERNS.items():
        chosen = [row for row in OPTIONS if row.concern == concern and (names is None or row.name in names)]
        if chosen:
            group = parser.add_argument_group(holder.TITLE)
            for row in chosen:
                _add(group, row)


def composed(namespace: argparse.Namespace, environ: Mapping[str, str] | None = None, *, server: bool = False) -> Options:
    """Compose the options from a parsed command line and the layers below it.

    Raises:
        OptionError: a name or a value is not allowed, values contradict each other, or the file cannot be used.
        OptionTypeError: a value of the file has a type that the option does not take.
    """
    given = {name: value for name, value in vars(namespace).items() if name in BY_NAME}
    return compose(given, environ=environ, server=server, layer=COMMAND_LINE)


def _add(group: argparse._ArgumentGroup, row: Option) -> None:
    text = f"{row.help} (default: {row.shown(row.default)}; {row.variable})".replace("%", "%%")
    common: dict[str, Any] = {"dest": row.name, "default": argparse.SUPPRESS}
    if row.is_flag:
        group.add_argument(*row.flags, action="store_const", const=True, help=text, **common)
        group.add_argument(*row.off, action="store_const", const=False, help=f"the opposite of {row.flag}", **common)
    else:
        group.add_argument(*row.flags, metavar=row.kind.metavar, help=text, **common)


def _option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags of a parser and of its commands: the parser that complains is not always the one that was meant."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _option_strings(command)
