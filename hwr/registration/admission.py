"""Whose turn it is: one process at a time registers a payload file.

Owns the exclusive lock on each payload file itself, so that two processes are never in a call for the same file at once (H4): concurrent
long-term pins of one file fail each other (error 1, migration failed with ENOMEM: 1Cat-vLLM#598). Promises one order for all processes
(name, then device and inode), a deadline, a holder that is named and a wait that is seen; a forked child closes and never unlocks.
Refuses to create, to write and to follow links: the files are somebody's weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from hwr.errors import LockTimeout, PinAdmissionTimeout, StoreIoError, errno_text
from hwr.outcomes import LockKind
from hwr.store.locks import HeldLock, acquire
from hwr.telemetry import span
from hwr.telemetry.events import AdmissionBegun

# Of an event; a sharded artifact may have hundreds of files.
_NAMES_TOLD: Final = 20


@contextlib.contextmanager
def admitted(files: Sequence[Path], *, deadline: float, seconds: float) -> Iterator[None]:
    """Hold the exclusive lock of every file in the block. `deadline` is a reading of time.monotonic, `seconds` what is left until it.

    Raises:
        PinAdmissionTimeout: the turn did not come; nothing is held.
        StoreError: a file cannot be opened or locked.
    """
    with contextlib.ExitStack() as held:
        ordered = in_order(files)
        with span(AdmissionBegun(files=tuple(path.name for path in ordered[:_NAMES_TOLD]), deadline_seconds=max(0.0, seconds))):
            for path in ordered:
                held.callback(_lock(path, deadline).release)
        yield


def in_order(files: Sequence[Path]) -> list[Path]:
    """Return the files in the order in which every process locks them, one of several names only: flock would wait for itself.

    Raises:
        StoreIoError: a file is gone, or cannot be looked at.
    """
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(files, key=lambda path: (path.name, str(path))):
        try:
            facts = path.stat(follow_symlinks=False)
        except OSError as error:
            root = str(path.parent.parent)
            problem = errno_text(error)
            raise StoreIoError(reason="stat", path=str(path), root=root, operation="stat before registering", problem=problem) from error
        found.setdefault((facts.st_dev, facts.st_ino), path)
    return [path for _, path in sorted(found.items(), key=lambda item: (item[1].name, item[0]))]


def _lock(path: Path, deadline: float) -> HeldLock:
    try:
        return acquire(path, LockKind.PIN, exclusive=True, deadline=deadline, existing=True)
    except LockTimeout as error:
        waited, holder = error.details["waited"], error.details["holder"]
        raise PinAdmissionTimeout(reason="lock_timeout", file=path.name, waited=waited, holder=holder) from error
