"""Long work, as it goes on, for whoever looks at the terminal.

Owns a projection of the process's own events on standard error: bars on a terminal, plain lines elsewhere.
Promises to be a listener only: what it shows is in the journal too. Refuses standard output, which is the report's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TransferSpeedColumn

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
def shown(*, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Show this process's long operations while the block runs, or until what it yields is called (before a report is printed)."""
    hub = current_hub()
    if quiet or hub is None or sys.stderr is None:  # None: standard error was closed before we started
        yield lambda: None
        return
    screen = _Bars() if sys.stderr.isatty() else _Lines()
    stop = hub.listen(screen.listen)

    def close() -> None:
        stop()
        screen.close()

    try:
        yield close
    finally:
        close()


class _Lines:
    """One line when something long ends, and every two seconds meanwhile."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, float, int]] = {}

    def listen(self, event: Event, record: dict[str, Any]) -> None:
        op, now = record.get("op", ""), record["mono_ns"] / 1e9
        if isinstance(event, Begin) and type(event) in _WORDS:
            words, planned = _WORDS[type(event)], getattr(event, "planned_bytes", 0)
            self._open[op] = (words, now, planned)
            self.begun(op, words, planned)
        elif op in self._open:
            words, told, planned = self._open[op]
            if isinstance(event, End):
                del self._open[op]
                self.ended(op, event)
                if event.seconds > 0.05 or event.error_code:
                    size = getattr(event, "bytes", None)
                    moved = f", {bytes_text(size)}, {rate_text(size, event.seconds)}" if size else ""
                    self.write(f"hwr: {words}: {event.outcome} in {seconds_text(event.seconds)}{moved}")
            elif isinstance(event, ProgressEvent) and self.moved(op, words, planned, getattr(event, "done_bytes", None), now - told):
                self._open[op] = (words, now, planned)

    def begun(self, op: str, words: str, planned: int) -> None:
        """Something began."""

    def moved(self, op: str, words: str, planned: int, done: int | None, since: float) -> bool:
        """Something moved, `since` seconds after it was last told of; return whether that was told."""
        if since < _TOLD_SECONDS:
            return False
        self.write(f"hwr: {words}: {bytes_text(done)} of {bytes_text(planned)}" if done is not None else f"hwr: {words} goes on")
        return True

    def ended(self, op: str, event: End) -> None:
        """Something ended."""

    def write(self, line: str) -> None:
        """Write one line; whoever closed standard error does not want it."""
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal as it was."""


class _Bars(_Lines):
    """A bar for each long operation of known size while it lasts, its line afterwards."""

    def __init__(self) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def begun(self, op: str, words: str, planned: int) -> None:
        if planned:
            self._progress.start()
            self._tasks[op] = self._progress.add_task(words, total=planned)

    def moved(self, op: str, words: str, planned: int, done: int | None, since: float) -> bool:
        if op not in self._tasks:
            return super().moved(op, words, planned, done, since)
        self._progress.update(self._tasks[op], completed=done)
        return True

    def ended(self, op: str, event: End) -> None:
        if op in self._tasks:
            self._progress.remove_task(self._tasks.pop(op))

    def write(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
