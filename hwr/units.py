"""Words for sizes, times and names.

Owns the constants of size, the formatting of figures for people, canonical JSON, and the escaping of text from outside.
Promises that escaped text is printable on one line, holds no lone surrogate, and can be sent to a terminal.
Refuses I/O.
"""

from __future__ import annotations

import json
import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
NS_PER_S: Final = 1_000_000_000

# A key is the SHA-256 of a canonical identity; 12 digits tell artifacts apart for a person.
SHORT_KEY_DIGITS: Final = 12


def bytes_text(count: float) -> str:
    """Format a byte count with a binary prefix, three significant digits."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{_decimals(size)}f} {unit}"
        size /= 1024
    return f"{size:.{_decimals(size)}f} TiB"


def seconds_text(seconds: float) -> str:
    """Format a duration the way that a person reads it: 12 ms, 3.4 s, 4m05s."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def rate_text(count: float, seconds: float) -> str:
    """Format a byte rate in GB/s (powers of ten, as bandwidth is quoted)."""
    return f"{count / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def short_key(key: str) -> str:
    """Return the digits of an artifact key that people read."""
    return key[:SHORT_KEY_DIGITS]


def printable(text: str, limit: int = 4096) -> str:
    """Escape what could break a line, a terminal or UTF-8, and cut the text to `limit` characters.

    Control characters, separators other than the blank, bidirectional overrides and lone surrogates become
    `\\xNN`, `\\uNNNN` or `\\UNNNNNNNN`.
    """
    if len(text) > limit:
        text = text[:limit] + "…"
    if text.isprintable():  # false for every character escaped below; the usual case costs one C call
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def canonical_json(value: object) -> bytes:
    """Encode JSON with sorted keys, compact, ASCII; refuse NaN, infinities and keys that are not strings.

    Raises:
        ValueError: NaN or an infinity.
        TypeError: a key that is not a string, or a value that JSON does not have.
    """
    _refuse_other_keys(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


_BLANKS: Final = re.compile(r"\s+")


def one_line(text: str, limit: int = 300) -> str:
    """Fold a foreign message (an exception of a library) to one printable line."""
    return printable(_BLANKS.sub(" ", text).strip(), limit)


def _decimals(size: float) -> int:
    return 0 if abs(size) >= 99.5 else 1 if abs(size) >= 9.95 else 2


def _escaped(character: str) -> str:
    point = ord(character)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _refuse_other_keys(value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON has string keys only, not {key!r}")
            _refuse_other_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_other_keys(item)
