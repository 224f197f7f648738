"""/proc/pressure: how much of the time somebody waited for processor, memory or I/O.

Owns the three files' lines. Promises totals in seconds since boot and averages as shares of 1. Refuses to call a kernel
without pressure accounting (CONFIG_PSI, `psi=0`) a quiet one: it is Unavailable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.procfs.text import complete_lines, number

RESOURCES: Final = ("cpu", "memory", "io")
KINDS: Final = ("some", "full")
_US_PER_S: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PressureLine:
    """One kind: `some` (at least one task waited) or `full` (all did)."""

    total_s: float
    avg10: float | None = None
    avg60: float | None = None
    avg300: float | None = None


def parse_pressure(text: bytes) -> Mapping[str, PressureLine] | Unavailable:
    """Parse one file; lines of other kinds are skipped."""
    found: dict[str, PressureLine] = {}
    for line in complete_lines(text):
        words = line.split()
        kind = words[0].decode("ascii", "replace") if words else ""
        pairs = dict(word.partition(b"=")[::2] for word in words[1:])
        total = number(pairs.get(b"total"))
        if kind in KINDS and total is not None:
            averages = (_share(pairs.get(name)) for name in (b"avg10", b"avg60", b"avg300"))
            found[kind] = PressureLine(total / _US_PER_S, *averages)
    return found or Unavailable("pressure: no whole line")


def _share(word: bytes | None) -> float | None:
    whole, dot, part = (word or b"").partition(b".")
    hundredths, rest = number(whole), number(part)
    if not dot or hundredths is None or rest is None or len(part) != 2:
        return None
    return (hundredths + rest / 100) / 100


def read_pressure(resource: str, proc_root: Path = PROC_ROOT) -> Mapping[str, PressureLine] | Unavailable:
    """Read the pressure on one resource."""
    text = read_text(proc_root / "pressure" / resource)
    return text if isinstance(text, Unavailable) else parse_pressure(text)
