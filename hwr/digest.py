"""Digests of weights.

Owns the arithmetic: BLAKE3 over units, a tensor's digest over its units' digests, a content digest over tensors.
Promises that a content digest does not depend on files, order, offsets or fillers (invariant D1), and that one pass over the bytes
gives every digest there is. Refuses I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from blake3 import blake3

from hwr.units import MIB, canonical_json

ALGORITHM: Final = "blake3-units-64MiB-v1"
# Large enough for BLAKE3's threads to pay off, small enough that a mismatch names a useful place and memory stays bounded.
UNIT_BYTES: Final = 64 * MIB


def unit_ranges(nbytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the units of something `nbytes` long; nothing has no units."""
    for at in range(0, nbytes, UNIT_BYTES):
        yield start + at, min(UNIT_BYTES, nbytes - at)


def of_bytes(data: Any) -> str:
    """Return the hex digest of one unit."""
    return blake3(data).hexdigest()


def of_units(digests: Iterable[str]) -> str:
    """Return the digest of a tensor or a file from those of its units, in order."""
    hasher = blake3()
    for digest in digests:
        hasher.update(bytes.fromhex(digest))
    return hasher.hexdigest()


def of_content(tensors: Iterable[tuple[str, str, str, tuple[int, ...], str]], aliases: Mapping[str, str]) -> str:
    """Return the content digest over (name, kind, dtype, shape, tensor digest) of all tensors, and the names that share one."""
    rows = sorted([name, kind, dtype, list(shape), digest] for name, kind, dtype, shape, digest in tensors)
    return of_bytes(canonical_json({"algorithm": ALGORITHM, "tensors": rows, "aliases": dict(aliases)}))
