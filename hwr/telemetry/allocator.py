"""What the interpreter and the C allocator hold.

Owns one reading, taken once a minute by the beating thread. Promises exact counts of blocks and glibc's own figures where there is
glibc 2.33 or later. Refuses to collect garbage or trim: nothing is done to look better (R26).
"""

from __future__ import annotations

import ctypes
import gc
import sys

from hwr.telemetry.events import AllocatorSampled


def allocator_sample() -> AllocatorSampled:
    """Read what the interpreter and glibc hold; nothing is collected or trimmed."""
    told = _mallinfo2()
    return AllocatorSampled(
        python_blocks=sys.getallocatedblocks(),
        gc_collections=tuple(generation["collections"] for generation in gc.get_stats()),
        in_use_bytes=told.get("uordblks"),
        free_bytes=told.get("fordblks"),
        mapped_bytes=told.get("hblkhd"),
    )


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo2(ctypes.Structure):
    """mallinfo(3): all fields are size_t, bytes except for counts of blocks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def _mallinfo2() -> dict[str, int]:
    try:
        call = ctypes.CDLL(None).mallinfo2  # glibc >= 2.33; musl has none
    except (AttributeError, OSError):
        return {}
    call.restype = _MallInfo2
    told = call()
    return {name: int(getattr(told, name)) for name in _FIELDS}
