"""Long work, as it goes on, for whoever looks at the terminal.

Owns a projection of the process's own events on standard error: bars on a terminal, plain lines elsewhere.
Promises to be a listener only: what it shows is in the journal too. Refuses standard output, which is the report's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from hwr.outcomes import Operation
from hwr.telemetry import events as E
from hwr.telemetry.event import Begin, End, Event
from hwr.telemetry.event import Progress as ProgressEvent
from hwr.telemetry.process import current_hub
from hwr.units import bytes_text, rate_text, seconds_text

_WORDS = {
    E.SourceDigestBegun: "hashing the canonical checkpoint",
    E.ChecksumBegun: "verifying every payload byte",
    E.PublicationBegun: "publishing",
    E.LockWaiting: "waiting for a lock",
}
_TOLD_SECONDS = 2.0


@contextmanager
def shown(*, quiet: bool = False) -> Iterator[None]:
    """Show this process's long operations while the block runs."""
    hub = current_hub()
    if quiet or hub is None:
        yield
        return
    screen = _Bars() if sys.stderr.isatty() else _Lines()
    stop = hub.listen(screen.listen)
    try:
        yield
    finally:
        stop()
        screen.close()


class _Lines:
    """One line when something long ends, and every two seconds meanwhile."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, float, int | None]] = {}

    def listen(self, event: Event, record: dict[str, Any]) -> None:
        op, now = record.get("op", ""), record["mono_ns"] / 1e9
        if isinstance(event, Begin) and type(event) in _WORDS:
            self._begun[op] = (_WORDS[type(event)], now, getattr(event, "planned_bytes", None))
        elif op in self._begun:
            words, begun, planned = self._begun[op]
            done = getattr(event, "done_bytes", None)
            if isinstance(event, End):
                del self._begun[op]
                if event.seconds > 0.05 or event.error_code:
                    size = getattr(event, "bytes", None)
                    moved = f", {bytes_text(size)}, {rate_text(size, event.seconds)}" if size else ""
                    print(f"hwr: {words}: {event.outcome} in {seconds_text(event.seconds)}{moved}", file=sys.stderr)
            elif isinstance(event, ProgressEvent) and now - begun >= _TOLD_SECONDS:
                self._begun[op] = (words, now, planned)
                part = f" {bytes_text(done)} of {bytes_text(planned)}" if done is not None and planned else " goes on"
                print(f"hwr: {words}:{part}", file=sys.stderr)

    def close(self) -> None:
        """Nothing is left open."""


class _Bars:
    """A bar for each long operation of known size."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=False)
        self._tasks: dict[str, Any] = {}

    def listen(self, event: Event, record: dict[str, Any]) -> None:
        op = record.get("op", "")
        planned = getattr(event, "planned_bytes", None)
        if isinstance(event, Begin) and event.OPERATION is not Operation.LOCK and type(event) in _WORDS and planned:
            if not self._tasks:
                self._progress.start()
            self._tasks[op] = self._progress.add_task(_WORDS[type(event)], total=planned)
        elif op in self._tasks:
            if isinstance(event, End):
                done = getattr(event, "bytes", None)
                self._progress.update(self._tasks[op], completed=done if done is not None else None)
                self._progress.stop_task(self._tasks[op])
            elif isinstance(event, ProgressEvent):
                self._progress.update(self._tasks[op], completed=getattr(event, "done_bytes", 0))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._tasks:
            self._progress.stop()
