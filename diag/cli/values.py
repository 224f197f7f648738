"""What a word on the command line may be.

Owns the kinds of values that several verbs take: whole numbers, seconds, paths, the target of `--call`. Promises one reading and one
refusal of each. Refuses blanks: an empty variable in a script is no wish for a default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

_WHOLE: Final = re.compile(r"\d{1,18}", re.ASCII)


def whole(least: int, *, multiple: int = 1) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`."""

    def read(text: str) -> int:
        value = int(text) if _WHOLE.fullmatch(text) else -1
        if value < least or value % multiple:
            which = f"multiple of {multiple}" if multiple > 1 else f"whole number of at least {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {which}")
        return value

    return read


def wholes(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return what reads whole numbers between commas, none twice."""
    one = whole(least)

    def read(text: str) -> tuple[int, ...]:
        found = tuple(one(part) for part in text.split(","))
        if len(set(found)) != len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names a number twice")
        return found

    return read


def seconds(text: str) -> float:
    """Read a time of more than nothing."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def word(text: str) -> str:
    """Read anything but blanks."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is blank")
    return text


def path(text: str) -> Path:
    """Read a path."""
    return Path(word(text))


def call(text: str) -> str:
    """Read what `--call` names, as the probe does."""
    from diag.probes.hwr_retention import target

    return target(text)
