"""The reader of a journal: the node side's end.

Owns following one process's segments into a `WorkerState`. Promises to tolerate a partial last line, to count malformed ones, to
follow segments as they come and go, and to treat every file as untrusted: regular, of its directory's owner, never a link, never
blocking, bounded. Refuses to write, lock or signal anything.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hwr.errors import Unavailable, errno_text
from hwr.telemetry.encode import decode
from hwr.telemetry.fold import apply
from hwr.telemetry.journal import segment_name
from hwr.telemetry.state import WorkerState

CHUNK_BYTES: Final = 1 << 20
# A writer rolls at 8 MiB and may overrun while its disk is full; what is larger is not a journal.
MAX_SEGMENT_BYTES: Final = 256 << 20
# Checkpoints are exempt from the cap of 64 KiB a line, but hold one process's state only.
MAX_LINE_BYTES: Final = 8 << 20

_SEGMENT: Final = re.compile(r"events\.(\d{6,})\.jsonl\Z")
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class JournalReader:
    """Follow the journal of one worker directory; `state` is what it says so far."""

    def __init__(self, directory: Path, *, from_start: bool = False) -> None:
        """Prepare to read; `from_start` reads every segment that is kept, otherwise the newest checkpoint is enough for the state."""
        self.directory = directory
        self.state = WorkerState()
        self.problem: Unavailable | None = None
        self._from_start = from_start
        self._fd = -1
        self._number = 0
        self._read = 0
        self._rest = b""

    def poll(self) -> WorkerState:
        """Read what was written since the last call and return the state."""
        for _ in self.records():
            pass
        return self.state

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield new records, each after it was folded into `state`."""
        while True:
            if self._fd < 0 and not self._open_next():
                return
            yield from self._drain()
            if self._newer() is None:
                return
            # Nothing is appended to a segment once a newer one exists; read once more, since it may have grown meanwhile.
            yield from self._drain()
            if self._rest:
                self.state.malformed += 1
            self.close()

    def close(self) -> None:
        """Close the segment that is open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._rest, self._read = -1, b"", 0

    def _drain(self) -> Iterator[dict[str, Any]]:
        state = self.state
        while self._read < MAX_SEGMENT_BYTES:
            try:
                chunk = os.read(self._fd, CHUNK_BYTES)
            except OSError as error:
                self.problem = Unavailable(errno_text(error))
                return
            if not chunk:
                return
            self._read += len(chunk)
            lines = (self._rest + chunk).split(b"\n")
            self._rest = lines.pop()
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest = b""
                state.malformed += 1
            for line in lines:
                if not line:
                    continue
                record = decode(line)
                if record is None:
                    state.malformed += 1
                    continue
                apply(state, record)
                yield record

    def _segments(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            self.problem = Unavailable(errno_text(error))
            return []
        return sorted(int(match[1]) for name in names if (match := _SEGMENT.match(name)))

    def _newer(self) -> int | None:
        return next((number for number in self._segments() if number > self._number), None)

    def _open_next(self) -> bool:
        numbers = [number for number in self._segments() if number > self._number]
        if not numbers:
            return False
        self._number = numbers[0] if self._number or self._from_start else numbers[-1]
        path = self.directory / segment_name(self._number)
        try:
            fd = os.open(path, _FLAGS)
        except OSError as error:
            self.problem = Unavailable(errno_text(error))
            return False
        facts, owner = os.fstat(fd), os.stat(self.directory)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner.st_uid:
            os.close(fd)
            self.problem = Unavailable("segment is not a regular file of its directory's owner")
            return False
        self._fd = fd
        return True


def read_state(directory: Path) -> WorkerState:
    """Return the state of one worker directory as its journal has it now."""
    reader = JournalReader(directory)
    try:
        return reader.poll()
    finally:
        reader.close()
