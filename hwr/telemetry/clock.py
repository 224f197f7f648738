"""The clocks of telemetry.

Owns CLOCK_BOOTTIME readings and RFC 3339 text. Promises that every duration comes from one monotonic clock that counts
suspended time too and is the same in every process of the node. Refuses wall-clock intervals.
"""

from __future__ import annotations

import functools
import time


def boot_ns() -> int:
    """Nanoseconds since the node booted (CLOCK_BOOTTIME): comparable between processes, not between nodes."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def realtime_offset_ns() -> int:
    """What must be added to `boot_ns` to get wall-clock time, as of now."""
    return time.time_ns() - boot_ns()


def rfc3339(epoch_ns: int) -> str:
    """Format UTC with microseconds, the way OpenTelemetry's log model reads it."""
    seconds, rest = divmod(epoch_ns, 1_000_000_000)
    return f"{_to_the_second(seconds)}.{rest // 1000:06d}Z"


@functools.lru_cache(maxsize=4)  # events come many to a second
def _to_the_second(seconds: int) -> str:
    t = time.gmtime(seconds)
    return f"{t.tm_year:04d}-{t.tm_mon:02d}-{t.tm_mday:02d}T{t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d}"
