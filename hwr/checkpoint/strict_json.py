"""JSON from outside, strictly and within bounds.

Owns the walk through one JSON object, for headers and indexes alike. Promises that a name given twice, a constant that
is not JSON and half a surrogate pair are refused, and that nothing is built that was not asked for or is larger than
its caller allows. Refuses I/O, and to know what the names mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from hwr.units import one_line

ENTRY_LIMIT_CHARS: Final = 1 << 16  # one tensor's entry: 64 dimensions (the most torch has) of 20 digits are 1,400


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_no_constant)
_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_FLAT_OBJECT: Final = re.compile(rf"\{{[^{{}}]{{0,{ENTRY_LIMIT_CHARS}}}\}}")
_LONG_NUMBER: Final = re.compile(r"[0-9]{20}")  # 2^63 - 1 has 19
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class JsonReader:
    """Walk one JSON object from member to member, so that nothing is built that was not asked for.

    `members` yields a name; the caller then takes that member's value with one of the other methods. Every method
    raises `ValueError` for what is not strict JSON, is given twice, or is longer than the caller allows.
    """

    __slots__ = ("_position", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def members(self) -> Iterator[str]:
        """Yield the names of the object that begins here; a name that was there already is refused."""
        seen: set[str] = set()
        self._expect("{")
        if self._peek() == "}":
            self._position += 1
            return
        while True:
            name = self.string()
            if name in seen:
                raise ValueError(f"the name {one_line(name, 200)!r} is given twice")
            seen.add(name)
            self._expect(":")
            yield name
            if self._peek() == "}":
                self._position += 1
                return
            self._expect(",")

    def string(self) -> str:
        """Take a string without lone surrogates."""
        if self._peek() != '"':
            raise self._unexpected("a string")
        value, self._position = _DECODER.raw_decode(self._text, self._position)
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError("a string holds half of a surrogate pair")
        return str(value)

    def string_map_or_null(self, limit_names: int) -> dict[str, str]:
        """Take an object of at most `limit_names` strings, or null for an empty one."""
        self._peek()
        if self._text.startswith("null", self._position):
            self._position += 4
            return {}
        found: dict[str, str] = {}
        for name in self.members():
            if len(found) == limit_names:
                raise ValueError(f"more than {limit_names} names")
            found[name] = self.string()
        return found

    def entry(self) -> dict[str, Any]:
        """Take an object that holds no other, of at most `ENTRY_LIMIT_CHARS` characters, its numbers of at most 19 digits."""
        self._peek()
        match = _FLAT_OBJECT.match(self._text, self._position)
        if match is None:
            found = self._text[self._position : self._position + 12]
            raise ValueError(f"its entry is not a flat object of at most {ENTRY_LIMIT_CHARS} characters, but begins with {found!r}")
        # Only the matched text is decoded: a brace inside a string cannot lead the decoder any further. Nothing legal
        # holds a minus sign, and Python would read -0 as 0.
        text = match[0]
        if "-" in text or _LONG_NUMBER.search(text):
            raise ValueError("a number is negative or has 20 digits or more")
        value: dict[str, Any] = _guarded(text, 0)[0]
        self._position = match.end()
        return value

    def any_value(self, limit_chars: int) -> Any:
        """Take a value of any kind of at most `limit_chars` characters."""
        self._peek()
        value, taken = _guarded(self._text[self._position : self._position + limit_chars], 0)
        self._position += taken
        return value

    def end(self) -> None:
        """Refuse anything but blanks after the object."""
        if self._peek():
            raise self._unexpected("the end")

    def _peek(self) -> str:
        found = self._text[self._position : self._position + 1]
        if found and found not in " \t\n\r":  # compact JSON has no blanks: this is the usual way out
            return found
        match = _BLANKS.match(self._text, self._position)
        self._position = match.end() if match else self._position
        return self._text[self._position : self._position + 1]

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._unexpected(repr(character))
        self._position += 1

    def _unexpected(self, wanted: str) -> ValueError:
        found = self._text[self._position : self._position + 12]
        return ValueError(f"{wanted} should stand at character {self._position}, not {found!r}" if found else f"it ends before {wanted}")


def _guarded(text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
