"""Setting bad trees aside.

Owns deny markers, moves to quarantine, and the removal of a dead builder's leftovers.
Promises deny first, then the move (Q1): even if the move fails the artifact is never served; a marker is durable before the lock is
let go. A disk without room for a marker has room for a mode bit: then the artifact's own directory says it (sticky). Refuses to delete
an artifact: what is moved keeps its bytes, and live mappings keep theirs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any, Final

from hwr.errors import HwrError, QuarantineFailed, errno_text
from hwr.outcomes import QuarantineReason
from hwr.store.domain import Domain, fsync_directory, read_document
from hwr.store.layout import ARTIFACT_MODE, DIRECTORY_MODE, FILE_MODE, TEMPORARY, StoreLayout
from hwr.store.locks import open_error
from hwr.telemetry import emit, span
from hwr.telemetry.events import ArtifactDenied, LeftoversRemoved, QuarantineMoving
from hwr.units import canonical_json

# What lies there is no marker of ours, but somebody put it there.
_ODD: Final = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO})
_GONE: Final = frozenset({errno.ENOENT})


def denial(layout: StoreLayout, key: str) -> dict[str, Any] | None:
    """Return the deny marker of a key, None if there is none. A marker that is odd denies too, and so does the sticky bit.

    Raises:
        StoreError: whether there is one could not be known (no descriptor left, an I/O error).
    """
    path = layout.deny_marker(key)
    try:
        marker = read_document(path)
    except HwrError:
        return {"reason": "unreadable", "message": "its deny marker is no JSON object"}
    except OSError as error:
        if error.errno not in _ODD:
            raise open_error(error, path) from error
        return {"reason": "unreadable", "message": errno_text(error)}
    if marker is None:
        with contextlib.suppress(OSError):
            if os.lstat(layout.artifact(key)).st_mode & stat.S_ISVTX:
                return {"reason": "sticky", "message": "its directory is marked; there was no room for a deny marker"}
    return marker


def deny(domain: Domain, key: str, failure: HwrError) -> bool:
    """Write a durable deny marker, or mark the directory; return False if neither can be done (a read-only store), which the event says."""
    path = domain.layout.deny_marker(key)
    record = {
        "schema_version": 1,
        "stage": failure.stage.value,
        "reason": failure.code.value,
        "message": failure.cause,
    }
    containment = "marker"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.write(fd, canonical_json(record))
            os.fsync(fd)
        finally:
            os.close(fd)
        fsync_directory(path.parent)
    except FileExistsError:
        containment = "already_denied"
    except OSError as error:
        containment = _mark_directory(domain, key) or f"failed: {errno_text(error)}"
    emit(ArtifactDenied(key=key, error_code=failure.code.value, problem=failure.cause, containment=containment))
    return not containment.startswith("failed")


def _mark_directory(domain: Domain, key: str) -> str | None:
    path = domain.layout.artifact(key)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, ARTIFACT_MODE | stat.S_ISVTX)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        return None
    return "sticky"


def lift_denial(domain: Domain, key: str) -> None:
    """Remove the deny marker after a successful republication."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(domain.layout.deny_marker(key))
        fsync_directory(domain.layout.deny)


def quarantine(domain: Domain, key: str, reason: QuarantineReason, source: Path | None = None) -> Path | None:
    """Move a tree out of the way; None if it is gone already. Leases of it keep their mappings.

    Raises:
        QuarantineFailed: it could not be moved; it stays where it is.
    """
    path = source or domain.layout.artifact(key)
    target = domain.layout.new_quarantine(key, reason)
    with span(QuarantineMoving(key=key, cause=reason)) as moving:
        try:
            facts = os.lstat(path)
        except FileNotFoundError:
            return None
        try:
            if stat.S_ISDIR(facts.st_mode):
                # A directory that changes its parent must itself be writable, for anybody but root.
                os.chmod(path, DIRECTORY_MODE)
            os.rename(path, target)
        except OSError as error:
            if error.errno in _GONE:
                return None
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(facts.st_mode):
                    os.chmod(path, stat.S_IMODE(facts.st_mode))  # as it was: unfinished stays unfinished
            raise QuarantineFailed(
                reason=errno.errorcode.get(error.errno or 0, "os_error").lower(), root=str(domain.root), key=key, problem=errno_text(error)
            ) from error
        moving.add(name=target.name)
        with contextlib.suppress(OSError):  # the move stands; only its survival of a power cut is in doubt
            if stat.S_ISDIR(facts.st_mode):
                os.chmod(target, ARTIFACT_MODE)
            fsync_directory(path.parent)
            fsync_directory(target.parent)
    return target


def remove_leftovers(domain: Domain, key: str) -> None:
    """Remove what dead builders of this key left in `tmp/`. The caller holds the key's build lock, so no builder of it lives."""
    removed = size = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(domain.layout.temporary) as entries:
        for entry in entries:
            match = TEMPORARY.match(entry.name)
            if match and match[1] == key and entry.is_dir(follow_symlinks=False):
                size += sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(entry.path))
                remove_tree(Path(entry.path))
                removed += 1
    if removed:
        emit(LeftoversRemoved(key=key, entries=removed, bytes=size))


def remove_tree(path: Path) -> None:
    """Remove a tree of ours, hardened or not; what cannot be removed stays and is tried again by the next builder."""
    with contextlib.suppress(OSError):
        os.chmod(path, DIRECTORY_MODE)
    shutil.rmtree(path, ignore_errors=True)
