"""The writer of a journal.

Owns the segment files of one process: `events.000001.jsonl` and on, 8 MiB each, the newest 8 kept. A second writer in the same
directory (the process configured its telemetry again) goes on with the next number.
Promises one `write(2)` of a whole line on an O_APPEND descriptor (J1), a segment that can be read alone (J2), and that a full
or failing disk drops events, counts them, and never raises into a load (J3). Refuses to retry or to wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

SEGMENT_BYTES: Final = 8 << 20
SEGMENTS_KEPT: Final = 8
_SEGMENT: Final = re.compile(r"events\.(\d{6,12})\.jsonl", re.ASCII)
# 8 EiB of events; a larger number was not counted up to.
_MOST_SEGMENTS: Final = 1 << 40
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"events.{number:06d}.jsonl"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments in a directory, in order.

    Raises:
        OSError: the directory cannot be listed.
    """
    found = [int(match[1]) for name in os.listdir(directory) if (match := _SEGMENT.fullmatch(name))]
    return sorted(number for number in found if number < _MOST_SEGMENTS)


class JournalWriter:
    """Append lines to segments. The caller serialises calls."""

    def __init__(
        self,
        directory: Path,
        head: Callable[[int], bytes],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        kept: int = SEGMENTS_KEPT,
    ) -> None:
        """Open the first segment; `head(number)` gives the checkpoint line that begins a segment.

        Raises:
            OSError: the first segment cannot be made.
        """
        self._directory, self._head, self._limit, self._kept = directory, head, segment_bytes, kept
        self._number = max(segment_numbers(directory), default=0)
        self._fd = -1
        self._written = 0
        self._torn = False
        self.dropped = 0
        self.drop_cause = ""
        self._roll()

    def write(self, line: bytes) -> bool:
        """Append one line; return False, with the reason in `drop_cause`, if it was lost."""
        if self._fd < 0:
            return self._lost("closed")
        if self._written >= self._limit:
            with contextlib.suppress(OSError):  # no room for a new segment: the old one grows on
                self._roll()
        if self._torn:  # part of an earlier line reached the disk: end it, so that only that one is malformed
            line = b"\n" + line
        try:
            done = os.write(self._fd, line)
        except OSError as error:
            return self._lost("disk_full" if error.errno in _FULL else "io_error")
        self._written += done
        self._torn = done != len(line)
        return not self._torn or self._lost("disk_full")

    def sync(self) -> None:
        """Make what was written survive a power cut; errors are ignored, telemetry never fails a load."""
        with contextlib.suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)

    def _lost(self, cause: str) -> bool:
        self.dropped += 1
        self.drop_cause = cause
        return False

    def _roll(self) -> None:
        number = self._number + 1
        # A segment gets its name once its head is whole: killed in between, the one before stays the newest, and it can be read.
        path = self._directory / f".{segment_name(number)}.new"
        with contextlib.suppress(FileNotFoundError):  # of a roll that was cut short
            os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        try:
            head = self._head(number)
            if os.write(fd, head) != len(head):
                raise OSError(errno.ENOSPC, "segment head cut short", str(path))
            os.rename(path, self._directory / segment_name(number))
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        self.close()
        # The head does not count: a state larger than a segment must not make every event a new one.
        self._fd, self._number, self._written, self._torn = fd, number, 0, False
        with contextlib.suppress(OSError):
            os.unlink(self._directory / segment_name(number - self._kept))
