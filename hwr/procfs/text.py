"""The words that all /proc texts are made of.

Owns complete lines, decimal numbers, kilobyte amounts, names and their escapes.
Promises to tell a whole word from a torn one: a line without its newline, a number without its unit and a number with
anything else in it are not read, so that a cut text never yields a wrong value. Refuses I/O.
"""

from __future__ import annotations

import re
from typing import Final

from hwr.units import KIB

# 2^64 - 1 has 20 digits; nothing in /proc is longer.
_MAX_DIGITS: Final = 20
_MAX_HEX_DIGITS: Final = 16
_HEX_DIGITS: Final = b"0123456789abcdef"

# fs/seq_file.c mangles what would break a field (mountinfo: blank, tab, newline, backslash, hash) to three octal digits;
# fs/proc/array.c writes a process name's newline and backslash as \n and \\.
_OCTAL: Final = re.compile(rb"\\([0-3][0-7]{2})")
_NAME_ESCAPE: Final = re.compile(rb"\\(\\|n|[0-3][0-7]{2})")


def complete_lines(text: bytes) -> list[bytes]:
    """Split into lines and drop a last one that has no newline: it was cut."""
    return text.split(b"\n")[:-1]


def keyed_lines(text: bytes) -> dict[bytes, bytes]:
    """Read `Key: value` lines; the first of equal keys counts, the value keeps its blanks (a name may end in one)."""
    found: dict[bytes, bytes] = {}
    for line in complete_lines(text):
        key, colon, value = line.partition(b":")
        if colon:
            found.setdefault(key, value)
    return found


def number(word: bytes | None) -> int | None:
    """Read an unsigned decimal number, blanks around it allowed."""
    digits = (word or b"").strip()
    return int(digits) if digits.isdigit() and len(digits) <= _MAX_DIGITS else None


def hexadecimal(word: bytes) -> int | None:
    """Read an unsigned hexadecimal number in lower case; `int` alone would take signs and underscores."""
    return int(word, 16) if word and len(word) <= _MAX_HEX_DIGITS and not word.strip(_HEX_DIGITS) else None


def numbers(text: bytes | None) -> tuple[int, ...] | None:
    """Read unsigned decimal numbers between blanks; None if there is none, or if one word is something else."""
    read = [number(word) for word in (text or b"").split()]
    whole = tuple(value for value in read if value is not None)
    return whole if whole and len(whole) == len(read) else None


def kilobytes(value: bytes | None) -> int | None:
    """Read `1234 kB` (the kernel means KiB) as bytes."""
    if value is None or not value.endswith(b" kB"):
        return None
    amount = number(value[:-3])
    return None if amount is None else amount * KIB


def name_text(raw: bytes) -> str:
    """Decode a name that may hold any byte; what is not UTF-8 becomes lone surrogates, as in `os.fsdecode`."""
    return raw.decode("utf-8", "surrogateescape")


def unescape_octal(raw: bytes) -> bytes:
    r"""Undo `\040` and the like."""
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), raw)


def unescape_name(raw: bytes) -> bytes:
    r"""Undo `\n` and `\\` of a process name in `status`, and octal digits."""
    return _NAME_ESCAPE.sub(_name_byte, raw)


def _name_byte(match: re.Match[bytes]) -> bytes:
    escape = match[1]
    if escape == b"n":
        return b"\n"
    return b"\\" if escape == b"\\" else bytes([int(escape, 8)])
