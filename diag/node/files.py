"""The agent's own files in the run directory: where it listens, and what its sums had reached.

Owns `agent.json`, `agent.totals.json` and `agent.lock`. Promises whole files (written beside, then renamed), one owner at a time (a
flock held for life; a second agent leaves both alone), and that a file which somebody else planted is neither followed nor believed.
Refuses to fail the agent: what cannot be written is `Unavailable`, and the agent answers all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hwr.errors import Unavailable, errno_text

ANNOUNCEMENT: Final = "agent.json"
TOTALS: Final = "agent.totals.json"
LOCK: Final = "agent.lock"
# A sum of each series of each process takes some 130 bytes; a thousand processes of a hundred series fit twice.
MAX_BYTES: Final = 32 << 20

_MODE: Final = 0o640
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class AgentFiles:
    """The files of one agent in one run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = -1

    def claim(self) -> Unavailable | None:
        """Take the place of the run directory's agent, or say why not; the kernel gives it back when this process ends."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.directory / LOCK, flags, _MODE)
        except OSError as error:
            return Unavailable(errno_text(error))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return Unavailable("another agent writes here" if isinstance(error, BlockingIOError) else errno_text(error))
        self._lock = descriptor
        return None

    def announce(self, facts: Mapping[str, Any]) -> Unavailable | None:
        """Write where this agent listens."""
        return self._write(ANNOUNCEMENT, facts)

    def totals(self) -> dict[str, float]:
        """Return what the sums of the last agent had reached; empty if nobody left any."""
        value = read_object(self.directory / TOTALS)
        if isinstance(value, Unavailable):
            return {}
        return {key: float(count) for key, count in value.items() if type(count) in (int, float) and math.isfinite(count) and count >= 0}

    def keep_totals(self, totals: Mapping[str, float]) -> Unavailable | None:
        """Write what the sums have reached, for the next agent."""
        return self._write(TOTALS, totals)

    def close(self) -> None:
        """Take the announcement back and let another agent have the place."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                (self.directory / ANNOUNCEMENT).unlink()
            os.close(self._lock)
            self._lock = -1

    def _write(self, name: str, value: Mapping[str, Any]) -> Unavailable | None:
        if self._lock < 0:
            return Unavailable("another agent writes here")
        beside = self.directory / f".{name}.{os.getpid()}"
        try:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file)
            os.replace(beside, self.directory / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            return Unavailable(errno_text(error))
        return None


def read_object(path: Path) -> dict[str, Any] | Unavailable:
    """Read one of these files: a small regular file of this user or of root, which holds one JSON object."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        return Unavailable(errno_text(error))
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (os.geteuid(), 0) or facts.st_size > MAX_BYTES:
            return Unavailable("not a small regular file of this user")
        try:
            value = json.loads(file.read(MAX_BYTES))
        except (ValueError, RecursionError):
            return Unavailable("not JSON")
        except OSError as error:
            return Unavailable(errno_text(error))
    return value if isinstance(value, dict) else Unavailable("not a JSON object")
