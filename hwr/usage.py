"""How a command begins: its command line and its streams.

Owns the parser that refuses in two lines, and what a command does about standard streams that are closed or lose their reader.
Promises to cost a start hardly more than argparse does: everything else is imported where something is refused.
Refuses abbreviations: a script that relies on one breaks when an option is added.
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # what typing calls so: importing it would cost as much as argparse
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn, TextIO

_UNKNOWN = "unrecognized arguments: "
_INVALID = "invalid choice: "
_PIPE = 128 + 13  # SIGPIPE, which the interpreter ignores and a shell would show so


class HwrParser(argparse.ArgumentParser):
    """A parser without abbreviations that ends with the cause in one line, the way out in the next, and status 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line; name the argument or command that was probably meant."""
        from hwr.errors import EXIT_USAGE
        from hwr.options import nearest
        from hwr.units import one_line

        cause, way_out, near = message, f"Try: {self.prog} --help", None
        if message.startswith(_UNKNOWN):
            unknown = message.removeprefix(_UNKNOWN)
            cause = f"no such argument: {unknown or repr(unknown)}"
            word = unknown.partition(" ")[0].partition("=")[0]
            near = nearest(word, _option_strings(self)) if word.startswith("-") else None
        elif _INVALID in message:
            word = message.partition(_INVALID)[2].partition(" (")[0].strip("'\"")
            near = nearest(word, _commands(self))
        way_out = f"Did you mean {near}? {way_out}" if near else way_out
        print(f"{self.prog}: {one_line(cause, 1000)}", one_line(way_out, 1000), sep="\n", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or version, quietly if nobody reads it to its end."""
        try:
            super()._print_message(message, file)
            sys.stdout.flush()
        except BrokenPipeError:
            sys.exit(reader_left())


def open_streams() -> None:
    """Stand in for standard streams that were closed before we started: `print` would take another one for them."""
    import os

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the life of the process)


def reader_left() -> int:
    """Fall silent since whoever read our output has gone, and return the exit status for it."""
    discard(sys.stdout)
    discard(sys.stderr)  # it may be the same pipe, and there is nobody to complain to
    return _PIPE


def discard(stream: TextIO) -> None:
    """Let a stream that failed lead nowhere: what its buffer holds would fail once more as the interpreter ends, with status 120."""
    import os

    try:
        descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    except (OSError, ValueError):  # no descriptor of its own: somebody's stand-in
        return


def _option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags of a parser and of its commands: the parser that complains is not always the one that was meant."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _option_strings(command)


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices
