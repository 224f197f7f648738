"""The locks of a store.

Owns acquiring an flock with a deadline, telling about the wait while it lasts, and letting go in the right process.
Promises: every wait has a monotonic deadline, since an owner may be stopped (L1); a begin event with the holder precedes it; a forked
child closes but never unlocks (L2); the inode is compared after locking, since somebody may have swept the file (L3).
Refuses soft locks: a filesystem without flock is a typed failure at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import (
    DomainInitTimeout,
    FdLimit,
    LockTimeout,
    LockUnsupported,
    NoInodes,
    NoSpace,
    ReadOnlyStore,
    StoreIoError,
    Unavailable,
    errno_text,
)
from hwr.outcomes import LockKind
from hwr.procfs import locks as kernel_locks
from hwr.procfs.mountinfo import mount_of, read_mountinfo
from hwr.procfs.status import read_status
from hwr.store.layout import LOCK_MODE
from hwr.telemetry import emit, span
from hwr.telemetry.events import LockReplaced, LockStillWaiting, LockWaiting
from hwr.telemetry.hub import Span

# Short at first, since most waits are for another rank's quick step; 50 ms bounds the cost of a long one.
POLL_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
TELL_SECONDS: Final = 2.0
_UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_HELD: Final = frozenset({errno.EWOULDBLOCK, errno.EACCES})


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as /proc/locks and the process's status say; `state` T is a stopped process."""

    pid: int
    state: str | None

    def __str__(self) -> str:
        return f"pid {self.pid}" + (f" (state {self.state})" if self.state else "")


class HeldLock:
    """A lock that is held until `release`, or until the process ends."""

    def __init__(self, fd: int, kind: LockKind, path: Path) -> None:
        self._fd, self.kind, self.path = fd, kind, path
        self._pid = os.getpid()

    def release(self) -> None:
        """Let go. In a forked child this closes the descriptor and leaves the parent's lock alone. A late error is ignored."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if os.getpid() == self._pid:
                fcntl.flock(fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(fd)

    def hand_over(self) -> HeldLock:
        """Give the lock to another owner; leaving this one's block does not let it go any more."""
        fd, self._fd = self._fd, -1
        return HeldLock(fd, self.kind, self.path)

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(path: Path, kind: LockKind, *, exclusive: bool, deadline: float, existing: bool = False) -> HeldLock:
    """Lock a file until `deadline` (a reading of time.monotonic); create it where the store can be written.

    With `existing` the file is one that is there for another reason (a payload): it is opened for reading and never created.

    Raises:
        LockTimeout: another process kept it past the deadline; `DomainInitTimeout` for that lock.
        LockUnsupported: the filesystem has no flock.
        ReadOnlyStore, StoreIoError, FdLimit: the lock file cannot be opened.
    """
    budget = max(0.0, deadline - time.monotonic())
    fd = _open(path, existing)
    try:
        free = _try(fd, path, exclusive)
        holder = None if free else find_holder(path)
        with span(
            LockWaiting(
                lock=kind,
                file=path.name,
                exclusive=exclusive,
                deadline_seconds=budget,
                holder_pid=holder.pid if holder else None,
                holder_state=holder.state if holder else None,
            ),
            lock=kind,
        ) as wait:
            while True:
                if not free:
                    _wait(fd, path, kind, exclusive, deadline, wait)
                if _is_current(fd, path):
                    return HeldLock(fd, kind, path)
                emit(LockReplaced(lock=kind, file=path.name))
                stale, fd = fd, -1
                os.close(stale)
                fd = _open(path, existing)
                free = _try(fd, path, exclusive)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise


def find_holder(path: Path) -> Holder | None:
    """Name the process that holds a lock file; None if the kernel does not show one to us."""
    found = kernel_locks.holders(path)
    if isinstance(found, Unavailable):
        return None
    for lock in found:
        if lock.pid is not None and lock.pid > 0:
            status = read_status(lock.pid)
            return Holder(pid=lock.pid, state=None if isinstance(status, Unavailable) else status.state)
    return None


def _wait(fd: int, path: Path, kind: LockKind, exclusive: bool, deadline: float, wait: Span) -> None:
    polls = iter(POLL_SECONDS)
    pause = POLL_SECONDS[0]
    tell = TELL_SECONDS
    while not _try(fd, path, exclusive):
        left = deadline - time.monotonic()
        if left <= 0:
            raise (DomainInitTimeout if kind is LockKind.DOMAIN_INIT else LockTimeout)(
                reason="lock_timeout",
                path=path.name,
                root=str(path.parent.parent),
                lock=kind.value,
                waited=wait.elapsed,
                holder=str(find_holder(path) or "a process that cannot be seen from here"),
            )
        if wait.elapsed >= tell:
            tell += TELL_SECONDS
            holder = find_holder(path)
            wait.progress(
                LockStillWaiting(
                    lock=kind,
                    waited_seconds=wait.elapsed,
                    holder_pid=holder.pid if holder else None,
                    holder_state=holder.state if holder else None,
                )
            )
        pause = next(polls, pause)
        time.sleep(min(pause, left))


def _try(fd: int, path: Path, exclusive: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno in _UNSUPPORTED:
            raise LockUnsupported(reason="flock", root=str(path.parent.parent), fstype=_fstype(path), problem=errno_text(error)) from error
        raise StoreIoError(
            reason="flock", path=str(path), root=str(path.parent.parent), operation="flock", problem=errno_text(error)
        ) from error
    return True


def _open(path: Path, existing: bool = False) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if existing:
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, LOCK_MODE)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES) and not existing:
            # A store that cannot be written: flock is content with a descriptor for reading, on local filesystems.
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDONLY | flags)
            raise ReadOnlyStore(reason="lock_file", root=str(path.parent.parent), problem=errno_text(error)) from error
        raise open_error(error, path) from error


def create(path: Path) -> None:
    """Make a lock file, so that whoever comes later can lock it in a store that is read-only or full by then.

    Raises:
        StoreError: as `acquire`.
    """
    os.close(_open(path))


def open_error(error: OSError, path: Path) -> FdLimit | NoSpace | NoInodes | StoreIoError:
    """Return the typed failure of an `open` below a store's root."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space(error, path.parent.parent, f"making {path.name}")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return FdLimit(reason="open", path=str(path), root=str(path.parent.parent), limit=limit)
    return StoreIoError(reason="open", path=str(path), root=str(path.parent.parent), operation="open", problem=errno_text(error))


def no_space(error: OSError, root: Path, operation: str) -> NoSpace | NoInodes:
    """Tell the three ways of ENOSPC and EDQUOT apart: bytes, inodes, quota."""
    there = root
    while not there.exists() and there != there.parent:  # a store that is just being made
        there = there.parent
    with contextlib.suppress(OSError):
        facts = os.statvfs(there)
        if error.errno == errno.ENOSPC and facts.f_files and not facts.f_favail:
            return NoInodes(reason="inodes", root=str(root), available=facts.f_favail, needed=facts.f_favail + 1)
    reason = "quota" if error.errno == errno.EDQUOT else "disk_full"
    return NoSpace(reason=reason, root=str(root), path=str(root), operation=operation, problem=errno_text(error))


def _fstype(path: Path) -> str:
    mounts = read_mountinfo()
    mount = mounts if isinstance(mounts, Unavailable) else mount_of(path.parent.resolve(), mounts)
    return "unknown" if isinstance(mount, Unavailable) else mount.fstype


def _is_current(fd: int, path: Path) -> bool:
    mine = os.fstat(fd)
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
