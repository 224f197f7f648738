"""/proc/locks: who holds a file's lock, and who waits for it.

Owns the table's lines and the join with a file. Promises each holder with the waiters below it, without touching a lock.
Refuses certainty about absence: a lock taken in another PID namespace is not listed, polling with a time limit leaves no
waiter, and a lock belongs to an open file: the PID is that of the taker, which may have ended while a child holds on.

Devices are hexadecimal here and are those of the mounted filesystem: see `file_id` for btrfs and overlayfs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.reading import PROC_ROOT, read_text
from hwr.procfs.text import complete_lines, hexadecimal, number

# Kind, advice, mode, pid, file, start, end.
_FIELDS: Final = 7


class KernelLock(StrEnum):
    """The kinds that the kernel prints (fs/locks.c); any other word reads as UNKNOWN, the kernel's own."""

    FLOCK = "FLOCK"
    POSIX = "POSIX"
    OFDLCK = "OFDLCK"
    LEASE = "LEASE"
    DELEG = "DELEG"
    ACCESS = "ACCESS"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock that is held, or (in `waiters`) one that is asked for.

    `advice` and `mode` are the kernel's words (ADVISORY, MANDATORY, ACTIVE, BREAKING …; READ, WRITE, UNLCK).
    A waiter stands under one of several shared holders. `pid` is None where the kernel names none, as for an open file
    description lock. `end` None is the end of the file.
    """

    number: int
    kind: KernelLock
    advice: str
    mode: str
    pid: int | None
    file: FileId | None
    start: int
    end: int | None
    waiters: tuple[Lock, ...] = ()

    @property
    def exclusive(self) -> bool:
        """Whether nobody else can hold it at the same time."""
        return self.mode == "WRITE"


def parse_locks(text: bytes) -> tuple[Lock, ...]:
    """Parse the table into holders; waiters of waiters count as the holder's, strange lines and orphans are skipped."""
    holders: list[Lock] = []
    waiters: list[list[Lock]] = []  # of the holder at the same place
    for line in complete_lines(text):
        words = line.split()
        waiting = len(words) > 1 and words[1] == b"->"
        lock = _parse_words(words[:1] + words[2:] if waiting else words)
        if waiting:
            if lock is not None and holders and holders[-1].number == lock.number:
                waiters[-1].append(lock)
        elif lock is not None:
            holders.append(lock)
            waiters.append([])
    return tuple(replace(holder, waiters=tuple(below)) for holder, below in zip(holders, waiters, strict=True))


def _parse_words(words: list[bytes]) -> Lock | None:
    # An old kernel's "*NOINODE*" and "<none>:0" are words as any other; the file is then unknown.
    if len(words) != _FIELDS + 1 or not words[0].endswith(b":"):
        return None
    position, start, end = number(words[0][:-1]), number(words[6]), number(words[7])
    if position is None or start is None or (end is None and words[7] != b"EOF"):
        return None
    pid = number(words[4])
    if pid is None and not words[4].startswith(b"-"):
        return None
    kind, advice, mode = (word.decode("ascii", "replace") for word in words[1:4])
    return Lock(
        number=position,
        kind=KernelLock(kind) if kind in KernelLock.__members__ else KernelLock.UNKNOWN,
        advice=advice,
        mode=mode,
        pid=pid or None,
        file=_parse_file(words[5]),
        start=start,
        end=end,
    )


def _parse_file(word: bytes) -> FileId | None:
    major, _, rest = word.partition(b":")
    minor, _, inode = rest.partition(b":")
    device_major, device_minor, file = hexadecimal(major), hexadecimal(minor), number(inode)
    if device_major is None or device_minor is None or file is None:
        return None
    return FileId(device_major, device_minor, file)


def read_locks(proc_root: Path = PROC_ROOT) -> tuple[Lock, ...] | Unavailable:
    """Read the table; cheap enough for once a second."""
    text = read_text(proc_root / "locks")
    return text if isinstance(text, Unavailable) else parse_locks(text)


def holders(
    target: str | os.PathLike[str] | os.stat_result | FileId,
    proc_root: Path = PROC_ROOT,
    *,
    locks: Sequence[Lock] | None = None,
) -> tuple[Lock, ...] | Unavailable:
    """Find the locks of one file, each with its waiters; `locks` is a table that was read before.

    Give a path where the filesystem may be btrfs or overlayfs: a `stat_result` is taken at its word.
    """
    match target:
        case FileId():
            file: FileId | Unavailable = target
        case os.stat_result():
            file = FileId.of_stat(target)
        case _:
            file = FileId.in_tables(target, proc_root)
    if isinstance(file, Unavailable):
        return file
    table = read_locks(proc_root) if locks is None else locks
    return table if isinstance(table, Unavailable) else tuple(lock for lock in table if lock.file == file)
