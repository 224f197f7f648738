"""The options of a command line.

Owns how the option table becomes arguments of a parser. Promises that every command spells an option alike, full name first.
Refuses to judge values: the options do.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from hwr.options import BY_NAME, COMMAND_LINE, CONCERNS, OPTIONS, Option, Options, compose


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
