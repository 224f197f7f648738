"""The alive file: who still lives, as told by the kernel, and whether its interpreter still runs.

Owns `alive`: a flock held for life, and two little-endian u64, CLOCK_BOOTTIME of the last beat and the number of beats.
Promises that a dead writer never looks alive (the kernel drops its lock) and that a beat is one pwrite. Beats that stop in a
live process mean that nobody got the GIL. Refuses to signal a process in order to look at it, and to lock what
`/proc/locks` answers for.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable, errno_text
from hwr.procfs.locks import KernelLock, holders
from hwr.procfs.reading import PROC_ROOT
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.rundir import ALIVE

BEAT_SECONDS: Final = 1.0
_LAYOUT: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of a worker; `mono_ns` is CLOCK_BOOTTIME."""

    mono_ns: int
    count: int


class AliveFile:
    """The writer's end. One thread beats, another may close: a beat never goes to a descriptor that was closed and given away."""

    def __init__(self, directory: Path) -> None:
        """Create and lock the file.

        Raises:
            OSError: it cannot be made or locked.
        """
        self._fd = os.open(directory / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        self._count = 0
        self._lock = threading.Lock()
        self.beat()

    def beat(self) -> None:
        """Record that the interpreter runs now; nothing once closed."""
        with self._lock:
            if self._fd >= 0:
                self._count += 1
                os.pwrite(self._fd, _LAYOUT.pack(boot_ns(), self._count), 0)

    def close(self) -> None:
        """Close the descriptor, and with it give up the lock."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor in a forked child: the lock stays the parent's, and a thread that beat there does not exist here."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def read_beat(directory: Path) -> Beat | Unavailable:
    """Read the last beat of a worker directory."""
    try:
        fd = os.open(directory / ALIVE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            raw = os.pread(fd, _LAYOUT.size, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return Unavailable(errno_text(error))
    return Beat(*_LAYOUT.unpack(raw)) if len(raw) == _LAYOUT.size else Unavailable("no beat was written yet")


def is_held(directory: Path, proc_root: Path = PROC_ROOT) -> bool | Unavailable:
    """Say whether the writer of a worker directory lives; in a copied directory nobody does.

    The kernel's table answers first, so that nothing is locked. What it does not list may be held in another PID namespace: then
    a shared lock, not waited for and given back at once, tells.
    """
    path = directory / ALIVE
    listed = holders(path, proc_root)
    if not isinstance(listed, Unavailable) and any(lock.kind is KernelLock.FLOCK and lock.exclusive for lock in listed):
        # The table knows files, and a link has that of what it points to: another worker's lock says nothing about this one.
        return Unavailable("alive is a link") if path.is_symlink() else True
    return is_locked(directory)


def is_locked(directory: Path) -> bool | Unavailable:
    """Say whether somebody holds the lock of a worker directory, by asking for a shared one; the kernel's table is not read.

    Only for a file that a beat was written to: a writer that is just about to take its lock would find it taken, and go without.
    """
    try:
        fd = os.open(directory / ALIVE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return Unavailable(errno_text(error))
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return Unavailable(errno_text(error))
    finally:
        os.close(fd)
    return False
