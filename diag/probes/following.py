"""The lines that a probe appends to its samples file, as they come.

Owns the place read up to. Promises whole lines only, each once, and a sentence for whatever went wrong with the file: it vanished, was
replaced or cut, or holds a line that is no JSON object. Refuses to raise for any of these: the samples that came remain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hwr.errors import errno_text
from hwr.units import printable

_PART_BYTES: Final = 1 << 20


class Following:
    """A samples file that another process writes."""

    def __init__(self, path: Path) -> None:
        """Make it, empty.

        Raises:
            OSError: it cannot be made.
        """
        self.path = path
        self.problems: list[str] = []
        self._rest = b""
        with path.open("wb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
        self._at = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the lines that were completed since the last call."""
        whole, newline, self._rest = (self._rest + self._new()).rpartition(b"\n")
        if not newline:
            return
        for line in whole.split(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:  # UnicodeDecodeError is one
                value = None
            if isinstance(value, dict):
                yield value
            else:
                shown = printable(line.decode("utf-8", "replace"), 80)
                self._tell(f"a line of the samples file is no JSON object and was left out: {shown}")

    def torn(self) -> None:
        """Tell of a last line without its end; to be called once nobody writes any more."""
        if self._rest:
            self._tell(f"the last line of the samples file is torn; its {len(self._rest)} bytes were left out")

    def _new(self) -> bytes:
        parts = []
        try:
            with self.path.open("rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._at:
                    self._tell(f"the samples file was {'cut' if found.st_ino == self._inode else 'replaced'} while it was written")
                    self._inode, self._at, self._rest = found.st_ino, 0, b""
                file.seek(self._at)
                while part := file.read(_PART_BYTES):
                    parts.append(part)
                    self._at += len(part)
        except OSError as error:
            self._tell(f"the samples file {printable(str(self.path))} cannot be read any more: {errno_text(error)}")
        return b"".join(parts)

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
