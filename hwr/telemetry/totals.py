"""Counts summed over all workers that were ever seen.

Owns the sums and their form on a disk. Promises that no sum falls while a worker is replaced, vanishes, comes back or begins anew, nor when
the reader itself is replaced by one that is given `to_json` of the last; and that nothing counts twice (N3). Refuses to grow: of workers
that are not seen any more only the newest are kept apart.

A sum that falls by a part would read as a restart of everything, and `rate()` would count the rest again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

Series = tuple[str, ...]  # metric, label values
Process = tuple[str, str, int, int]  # run, rank, start, pid

# A worker that is not seen for a while (its directory could not be read, or not yet) comes back within this many others.
KEPT_GONE: Final = 128
_RETIRED: Final = "retired"
_LAST: Final = "last"


class Totals:
    """The sums, fed with what each worker counts now."""

    def __init__(self, base: Mapping[str, float]) -> None:
        """Go on from `base`, the `to_json` of another; what is in it and cannot be understood is left out."""
        self._retired: dict[Series, float] = {}
        self._last: dict[Process, dict[Series, float]] = {}
        for key, count in base.items():
            self._take(key, count)
        # Read anew, a long journal may come in pieces: until it has caught up its counts are below those that it had.
        self._catching_up = set(self._last)

    def sums(self, counts: Mapping[Process, Mapping[Series, float]]) -> dict[Series, float]:
        """Take what each visible worker has counted, and return the sums over all."""
        for process, now in counts.items():
            before = self._last.pop(process, {})  # and in again below: the order is that of the last sight
            fell = any(now.get(series, 0.0) < count for series, count in before.items())
            if not fell:
                self._catching_up.discard(process)
                self._last[process] = dict(now)
            elif process in self._catching_up:
                self._last[process] = {series: max(now.get(series, 0.0), before.get(series, 0.0)) for series in {**before, **now}}
            else:  # the same process, configured again: it counts from 0
                self._retire(before)
                self._last[process] = dict(now)
        gone = [process for process in self._last if process not in counts]
        for process in gone[: max(0, len(gone) - KEPT_GONE)]:
            self._retire(self._last.pop(process))
            self._catching_up.discard(process)
        sums = dict(self._retired)
        for held in self._last.values():
            for series, count in held.items():
                sums[series] = sums.get(series, 0.0) + count
        return sums

    def to_json(self) -> dict[str, float]:
        """Return everything as one flat table."""
        flat = {json.dumps([_RETIRED, *series]): count for series, count in self._retired.items()}
        for process, held in self._last.items():
            for series, count in held.items():
                flat[json.dumps([_LAST, *process, *series])] = count
        return flat

    def _retire(self, counts: Mapping[Series, float]) -> None:
        for series, count in counts.items():
            self._retired[series] = self._retired.get(series, 0.0) + count

    def _take(self, key: str, count: float) -> None:
        try:
            parts = json.loads(key)
        except (ValueError, RecursionError):
            return
        match parts:
            case ["retired", str() as metric, *labels] if all(type(label) is str for label in labels):
                self._retired[(metric, *labels)] = count
            case ["last", str() as run, str() as rank, int() as start, int() as pid, str() as metric, *labels] if all(
                type(label) is str for label in labels
            ):
                self._last.setdefault((run, rank, start, pid), {})[(metric, *labels)] = count
