"""What an option's value may be.

Owns the reading of a single value: its type, its range, its normal form, and its form as text.
Promises one normal form for each accepted value, and refusals that name the option as it was written.
Refuses disk, environment and libraries: a path is only looked at as text.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from hwr.errors import OptionError, OptionTypeError
from hwr.units import GIB, one_line

# 2**63 bytes: no file, mapping or memory limit of the kernel (a signed 64-bit offset) reaches further.
MOST_GIB: Final = 2.0**33
LEAST_GIB: Final = 1 / GIB
# About 31 years: its nanoseconds, and a sum of several, still fit 64 bits.
MOST_SECONDS: Final = 1e9
# Counts of layers, ranks and ports; what reads them may keep them in 32 bits.
MOST_WHOLE: Final = 2**31 - 1

_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off"})
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")


class Kind(Protocol):
    """How the values of one option are read; `label` is the option as the user wrote it."""

    @property
    def metavar(self) -> str:
        """The placeholder that help shows."""

    def read(self, label: str, value: object) -> Any:
        """Return the normal form of a typed value.

        Raises:
            OptionError: the value is not allowed.
            OptionTypeError: a value of that type is not allowed.
        """

    def from_text(self, label: str, text: str) -> object:
        """Return what `read` accepts for text of a command line or the environment."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One member of a closed set, spelt exactly."""

    members: type[StrEnum]

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.members) + "}"

    def read(self, label: str, value: object) -> StrEnum:
        if isinstance(value, str) and value in {str(member) for member in self.members}:
            return self.members(value)
        raise OptionError(option=label, problem=f"{_shown(value)} is not one of its values", remedy=f"Allowed: {', '.join(self.members)}.")

    def from_text(self, label: str, text: str) -> object:
        return text.strip()


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false; on the command line a flag of its own for either."""

    @property
    def metavar(self) -> str:
        return "BOOL"

    def read(self, label: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise OptionTypeError(option=label, problem=f"takes a bool, not {_typed(value)}", remedy="Allowed: true, false.")

    def from_text(self, label: str, text: str) -> object:
        word = text.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise OptionError(
            option=label, problem=f"{_shown(text)} is neither true nor false", remedy="Allowed: true, false (or 1, 0, yes, no, on, off)."
        )


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number; a bool is not one, nor is text outside a command line or the environment."""

    least: int
    most: int = MOST_WHOLE
    optional: bool = False
    metavar: str = "N"

    def read(self, label: str, value: object) -> int | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionTypeError(option=label, problem=f"takes a whole number, not {_typed(value)}", remedy=self._allowed())
        if not self.least <= value <= self.most:
            raise OptionError(option=label, problem=f"{_shown(value)} is out of range", remedy=self._allowed())
        return int(value)

    def from_text(self, label: str, text: str) -> object:
        if _WHOLE.fullmatch(text.strip()) is None:
            raise OptionError(option=label, problem=f"{_shown(text)} is not a usable whole number", remedy=self._allowed())
        return int(text)

    def _allowed(self) -> str:
        return f"Allowed: a whole number from {self.least} to {self.most}."


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number with a unit: an int, a float or numeric text; its normal form is float.

    `least` is the smallest value above zero: what is below it would be rounded to a zero that means something else.
    """

    unit: str
    least: float
    most: float
    zero: bool = False
    optional: bool = False
    metavar: str = "F"

    def read(self, label: str, value: object) -> float | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise OptionTypeError(option=label, problem=f"takes a number, not {_typed(value)}", remedy=self._allowed())
        number = self._number(label, value)
        if number == 0 and self.zero:
            return 0.0  # also for -0.0
        if not math.isfinite(number) or not self.least <= number <= self.most:
            raise OptionError(option=label, problem=f"{_shown(value)} is out of range", remedy=self._allowed())
        return number

    def from_text(self, label: str, text: str) -> object:
        return text

    def _number(self, label: str, value: int | float | str) -> float:
        # float() also takes 1_000 and digits of any script: nobody means those in a limit.
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise OptionError(option=label, problem=f"{_shown(value)} is not a number", remedy=self._allowed())
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except ValueError:
            raise OptionError(option=label, problem=f"{_shown(value)} is not a number", remedy=self._allowed()) from None

    def _allowed(self) -> str:
        zero = "0, or " if self.zero else ""
        return f"Allowed: {zero}a finite number above 0 in {self.unit}, from {self.least:.3g} to {self.most:.3g}; fractions are fine."


def gib(*, zero: bool, optional: bool) -> Number:
    """Return the kind of a size in GiB, at least one byte unless it may be zero."""
    return Number(unit="GiB", least=LEAST_GIB, most=MOST_GIB, zero=zero, optional=optional, metavar="GIB")


def seconds() -> Number:
    """Return the kind of a timeout: finite and above zero; a nanosecond is the least that a clock can tell."""
    return Number(unit="seconds", least=1e-9, most=MOST_SECONDS, metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class PathText:
    """A path, only as text; blank text is no path. Relative paths stay relative to the working directory."""

    metavar: str = "PATH"

    def read(self, label: str, value: object) -> Path | None:
        if value is None:
            return None
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
        if not isinstance(text, str):
            raise OptionTypeError(option=label, problem=f"takes a path, not {_typed(value)}", remedy="Allowed: text or a pathlib.Path.")
        if "\0" in text or not _encodable(text):
            raise OptionError(
                option=label, problem=f"{_shown(text)} cannot be a path", remedy="Give a path without NUL or lone surrogates."
            )
        return Path(text) if text.strip() else None

    def from_text(self, label: str, text: str) -> object:
        return text


@dataclass(frozen=True, slots=True)
class Word:
    """A short name; with `optional`, blank text and None are no name."""

    pattern: str
    allowed: str
    optional: bool = False
    metavar: str = "NAME"

    def read(self, label: str, value: object) -> str | None:
        if self.optional and (value is None or (isinstance(value, str) and not value.strip())):
            return None
        if not isinstance(value, str):
            raise OptionTypeError(option=label, problem=f"takes text, not {_typed(value)}", remedy=f"Allowed: {self.allowed}.")
        if re.fullmatch(self.pattern, value) is None:
            raise OptionError(option=label, problem=f"{_shown(value)} is not a usable name", remedy=f"Allowed: {self.allowed}.")
        return str(value)

    def from_text(self, label: str, text: str) -> object:
        return text


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    return one_line(repr(value), 80)


def _typed(value: object) -> str:
    return f"{type(value).__name__} ({_shown(value)})"
