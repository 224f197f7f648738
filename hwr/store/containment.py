"""Setting bad trees aside.

Owns deny markers, moves to quarantine, and the removal of a dead builder's leftovers.
Promises deny first, then the move (Q1): even if the move fails the artifact is never served; a marker is durable before the lock is
let go. Refuses to delete an artifact: what is moved keeps its bytes, and live mappings keep theirs.
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
from hwr.store.layout import ARTIFACT_MODE, DIRECTORY_MODE, FILE_MODE, TEMPORARY
from hwr.telemetry import emit, span
from hwr.telemetry.events import ArtifactDenied, LeftoversRemoved, QuarantineMoving
from hwr.units import canonical_json

_GONE: Final = frozenset({errno.ENOENT})


def denial(domain: Domain, key: str) -> dict[str, Any] | None:
    """Return the deny marker of a key, None if there is none. An unreadable marker denies too."""
    try:
        return read_document(domain.layout.deny_marker(key))
    except (OSError, HwrError) as error:
        return {"reason": "unreadable", "message": str(error)}


def deny(domain: Domain, key: str, failure: HwrError) -> bool:
    """Write a durable deny marker; return False if it cannot be written (a read-only store), which the event says."""
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
        containment = f"failed: {errno_text(error)}"
    emit(ArtifactDenied(key=key, error_code=failure.code.value, problem=failure.cause, containment=containment))
    return not containment.startswith("failed")


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
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
            if is_directory:
                # A directory that changes its parent must itself be writable, for anybody but root.
                os.chmod(path, DIRECTORY_MODE)
            os.rename(path, target)
        except OSError as error:
            if error.errno in _GONE:
                return None
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    os.chmod(path, ARTIFACT_MODE)
            raise QuarantineFailed(
                reason=errno.errorcode.get(error.errno or 0, "os_error").lower(), root=str(domain.root), key=key, problem=errno_text(error)
            ) from error
        moving.add(name=target.name)
        with contextlib.suppress(OSError):  # the move stands; only its survival of a power cut is in doubt
            if is_directory:
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
