"""The reader of a journal: the node side's end.

Owns following one process's segments into a `WorkerState`. Promises to tolerate a partial last line, to count malformed ones, to
follow segments as they come and go, and to treat every file as untrusted: regular, of its directory's owner, never a link, never
blocking, bounded. Refuses to write, lock or signal anything.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hwr.errors import Unavailable, errno_text
from hwr.telemetry.encode import decode
from hwr.telemetry.fold import apply
from hwr.telemetry.journal import segment_name, segment_numbers
from hwr.telemetry.state import WorkerState

CHUNK_BYTES: Final = 1 << 20
# A writer rolls at 8 MiB and may overrun while its disk is full; what is larger is not a journal.
MAX_SEGMENT_BYTES: Final = 256 << 20
# Checkpoints are exempt from the cap of 64 KiB a line, but hold one process's state only.
MAX_LINE_BYTES: Final = 8 << 20

_HEAD_BYTES: Final = 64 << 10
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class JournalReader:
    """Follow the journal of one worker directory; `state` is what it says so far."""

    def __init__(self, directory: Path, *, from_start: bool = False) -> None:
        """Prepare to read; `from_start` reads every segment that is kept, otherwise the newest checkpoint is enough for the state."""
        self.directory = directory
        self.state = WorkerState()
        self.problem: Unavailable | None = None
        self.taken_bytes = 0  # of all segments, since this reader began
        self.behind = False  # the last call stopped at its limit, and not at the journal's end
        self._from_start = from_start
        self._fd = -1
        self._number = 0
        self._read = 0
        self._rest = b""

    @property
    def vanished(self) -> bool:
        """Whether the segment that is open was deleted; if it was the newest, the directory went with it, or another is in its place."""
        try:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        except OSError:
            return False

    def poll(self, limit_bytes: int | None = None) -> WorkerState:
        """Read what was written since the last call, at most `limit_bytes` of it, and return the state."""
        for _ in self.records(limit_bytes):
            pass
        return self.state

    def records(self, limit_bytes: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield new records, each after it was folded into `state`; a limit counts every byte, of lines that are no records too."""
        self.behind = False
        end = None if limit_bytes is None else self.taken_bytes + limit_bytes
        while True:
            if self._fd < 0 and not self._open_next():
                return
            yield from self._drain(end)
            if self.behind or not any(number > self._number for number in self._segments()):
                return
            # Nothing is appended to a segment once a newer one exists; read once more, since it may have grown meanwhile.
            yield from self._drain(end)
            if self._stopped():
                return
            if self._rest:
                self.state.malformed += 1
            self.close()

    def _stopped(self) -> bool:
        return self.behind

    def close(self) -> None:
        """Close the segment that is open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._rest, self._read = -1, b"", 0

    def _drain(self, end: int | None) -> Iterator[dict[str, Any]]:
        state = self.state
        while self._read < MAX_SEGMENT_BYTES:
            if end is not None and self.taken_bytes >= end:
                self.behind = True
                return
            try:
                chunk = os.read(self._fd, CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - self.taken_bytes))
            except OSError as error:
                self.problem = Unavailable(errno_text(error))
                return
            if not chunk:
                return
            self._read += len(chunk)
            self.taken_bytes += len(chunk)
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
        self.problem = Unavailable(f"segment {self._number} is larger than {MAX_SEGMENT_BYTES} bytes; the rest is not read")

    def _segments(self) -> list[int]:
        try:
            return segment_numbers(self.directory)
        except OSError as error:
            self.problem = Unavailable(errno_text(error))
            return []

    def _open_next(self) -> bool:
        """Open the next segment that can be read: to begin with the newest whose head is whole, since a copy may have cut the last."""
        numbers = [number for number in self._segments() if number > self._number]
        begin = not self._number and not self._from_start
        for number in reversed(numbers) if begin else numbers:
            fd = self._open(number)
            if fd is None:
                continue
            if begin and number != numbers[0] and not _has_head(fd):
                os.close(fd)
                continue
            self._fd, self._number = fd, number
            return True
        return False

    def _open(self, number: int) -> int | None:
        try:
            fd = os.open(self.directory / segment_name(number), _FLAGS)
        except OSError as error:
            self.problem = Unavailable(errno_text(error))
            return None
        try:
            facts, owner = os.fstat(fd), os.stat(self.directory)
        except OSError as error:
            os.close(fd)
            self.problem = Unavailable(errno_text(error))
            return None
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == owner.st_uid:
            return fd
        os.close(fd)
        self.problem = Unavailable("segment is not a regular file of its directory's owner")
        return None


def _has_head(fd: int) -> bool:
    """Say whether the first line is whole; nothing is parsed and the offset stays."""
    at = 0
    while at < MAX_LINE_BYTES:
        try:
            chunk = os.pread(fd, _HEAD_BYTES, at)
        except OSError:
            return False
        if not chunk or b"\n" in chunk:
            return bool(chunk)
        at += len(chunk)
    return False


def read_state(directory: Path) -> WorkerState:
    """Return the state of one worker directory as its journal has it now."""
    reader = JournalReader(directory)
    try:
        return reader.poll()
    finally:
        reader.close()
