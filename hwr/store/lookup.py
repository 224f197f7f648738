"""Looking an artifact up.

Owns the order: deny, immutability and listing, READY and manifest, identity, sizes, payload, mapping, deny again.
Promises never a wrong hit: after the lease exists the deny marker and the directory's inode are asked again, so that a weaker lookup
cannot win against a stronger one that has just denied (K1). Corruption is denied before its lock is let go (K2); an I/O error is not
called corruption (K3). Refuses to quarantine: whoever rebuilds does that.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.errors import (
    ArtifactDenied,
    ArtifactInvalid,
    HwrError,
    LockTimeout,
    MapLimit,
    MmapUnsupported,
    StoreError,
    StoreIoError,
    errno_text,
)
from hwr.outcomes import LockKind, MemoryMoment, StoreStatus, ValidationLevel
from hwr.store import containment
from hwr.store.domain import Domain, max_map_count
from hwr.store.layout import StoreLayout
from hwr.store.lease import HostWeightLease, MappedFile, map_file
from hwr.store.locks import acquire
from hwr.store.manifest import FileEntry
from hwr.telemetry import memory, span
from hwr.telemetry.events import LookupBegun, ValidationBegun
from hwr.units import short_key
from hwr.validation import checksum, metadata
from hwr.validation.metadata import OpenedArtifact

_LEASED: Final = frozenset({StoreStatus.HIT, StoreStatus.BUILT, StoreStatus.JOINED})
_FAILED: Final = frozenset({StoreStatus.INVALID, StoreStatus.TIMEOUT, StoreStatus.FAILED})


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What the store answered: a lease exactly with hit, built and joined; a failure exactly with invalid, timeout and failed."""

    status: StoreStatus
    lease: HostWeightLease | None = None
    failure: HwrError | None = None

    def __post_init__(self) -> None:
        if (self.lease is not None) != (self.status in _LEASED):
            raise ValueError(f"{self.status} {'without' if self.lease is None else 'with'} a lease")
        if (self.failure is not None) != (self.status in _FAILED):
            raise ValueError(f"{self.status} {'without' if self.failure is None else 'with'} a failure")


def lookup(
    domain: Domain, key: str, identity: Mapping[str, Any] | None, validation: ValidationLevel, deadline: float | None = None
) -> LookupResult:
    """Look up, validate and lease an artifact; never raises a typed failure, it returns it."""
    deadline = domain.deadline() if deadline is None else deadline
    with span(LookupBegun(key=key, validation=validation)) as looking:
        try:
            result = _lookup(domain, key, identity, validation, deadline)
        except LockTimeout as error:
            result = LookupResult(StoreStatus.TIMEOUT, failure=error)
        except (ArtifactInvalid, ArtifactDenied) as error:
            result = LookupResult(StoreStatus.INVALID, failure=error)
        except StoreError as error:
            result = LookupResult(StoreStatus.FAILED, failure=error)
        except OSError as error:
            problem = errno_text(error)
            failure = StoreIoError(reason="lookup", root=str(domain.root), path=short_key(key), operation="lookup", problem=problem)
            result = LookupResult(StoreStatus.FAILED, failure=failure)
        looking.add(status=result.status)
        if result.failure is not None:
            looking.failed(result.failure)
        if result.lease is not None:
            unchecked = metadata.UNCHECKED if validation is ValidationLevel.MANIFEST_AND_METADATA else None
            looking.add(bytes=result.lease.manifest.payload_bytes, tensors=len(result.lease.manifest.tensors), unchecked=unchecked)
    return result


def judge(directory: Path, key: str, identity: Mapping[str, Any] | None, validation: ValidationLevel) -> OpenedArtifact:
    """Validate the tree at `directory` at this level, without locks or deny markers; the caller closes what comes back.

    Raises:
        ArtifactInvalid: and its classes: the tree is not what was published.
        StoreError: it could not be judged.
        FileNotFoundError: there is no such tree.
    """
    directory_fd = _open_directory(directory, key)
    try:
        return _validate(directory_fd, key, identity, validation, str(directory.parent.parent))
    finally:
        os.close(directory_fd)


def _lookup(domain: Domain, key: str, identity: Mapping[str, Any] | None, validation: ValidationLevel, deadline: float) -> LookupResult:
    path = domain.layout.artifact(key)
    try:
        os.stat(path, follow_symlinks=False)
    except FileNotFoundError:  # before any lock: a miss never waits, and an orphan deny marker alone is still a miss
        return LookupResult(StoreStatus.MISS)
    with acquire(domain.layout.lock(LockKind.ARTIFACT, key), LockKind.ARTIFACT, exclusive=False, deadline=deadline) as lock:
        refuse_denied(domain.layout, key)
        try:
            directory_fd = _open_directory(path, key)
        except FileNotFoundError:
            return LookupResult(StoreStatus.MISS)
        except ArtifactInvalid as error:  # a link, or no directory at all
            containment.deny(domain, key, error)
            raise
        try:
            if _unfinished(directory_fd):  # renamed, not yet hardened: its builder is about to commit, or died there
                return LookupResult(StoreStatus.MISS)
            try:
                files, opened = _open_artifact(domain, key, identity, validation, directory_fd)
            except ArtifactInvalid as error:
                # What was judged may be gone by now: a denial is about the tree that is there.
                _refuse_replaced(path, directory_fd, key, str(domain.root))
                containment.deny(domain, key, error)
                raise
            try:
                refuse_denied(domain.layout, key)
                _refuse_replaced(path, directory_fd, key, str(domain.root))
            except BaseException:
                _unmap(files)
                raise
        finally:
            os.close(directory_fd)
        lease = HostWeightLease(opened.manifest, opened.ready, files, lock.hand_over(), validation)
    return LookupResult(StoreStatus.HIT, lease=lease)


def _open_artifact(
    domain: Domain, key: str, identity: Mapping[str, Any] | None, validation: ValidationLevel, directory_fd: int
) -> tuple[dict[str, MappedFile], OpenedArtifact]:
    opened = _validate(directory_fd, key, identity, validation, str(domain.root))
    try:
        return _map(opened, str(domain.root), domain.fstype), opened
    finally:
        opened.close()


def _validate(directory_fd: int, key: str, identity: Mapping[str, Any] | None, validation: ValidationLevel, root: str) -> OpenedArtifact:
    with span(ValidationBegun(key=key, level=validation), level=validation) as validating:
        try:
            opened = metadata.validate(directory_fd, key, identity, root)
            if validation is ValidationLevel.FULL_CHECKSUM:
                try:
                    checksum.verify(opened, root)
                except BaseException:
                    opened.close()
                    raise
        except ArtifactInvalid as error:
            told = {name: error.details[name] for name in ("file", "tensor", "chunk", "expected", "actual") if name in error.details}
            validating.add(**told)
            raise
    if validation is ValidationLevel.FULL_CHECKSUM:  # after the span: looking at memory is no part of judging
        memory.sample(MemoryMoment.AFTER_CHECKSUM)
    return opened


def _map(opened: OpenedArtifact, root: str, fstype: str) -> dict[str, MappedFile]:
    files: dict[str, MappedFile] = {}
    try:
        for entry in opened.manifest.files:
            files[entry.name] = _map_one(opened, entry, root, fstype)
    except BaseException:
        _unmap(files)  # at once: the failure's traceback would keep them mapped
        raise
    return files


def _map_one(opened: OpenedArtifact, entry: FileEntry, root: str, fstype: str) -> MappedFile:
    try:
        return map_file(opened.files[entry.name], entry.name, entry.size)
    except ValueError as error:  # the mapping would be longer than the file
        problem = f"{entry.name} was truncated while it was looked up"
        raise ArtifactInvalid(reason="truncated", root=root, key=short_key(opened.manifest.key), problem=problem) from error
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise MmapUnsupported(reason="shared", root=root, fstype=fstype, problem=errno_text(error)) from error
        if error.errno == errno.ENOMEM:
            raise MapLimit(reason="map", root=root, path=entry.name, limit=max_map_count()) from error
        raise metadata.typed(error, entry.name, opened.manifest.key, root) from error


def _unmap(files: Mapping[str, MappedFile]) -> None:
    for file in files.values():
        file.unmap()


def _open_directory(path: Path, key: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise metadata.typed(error, path.name, key, str(path.parent.parent)) from error


def _unfinished(directory_fd: int) -> bool:
    facts = os.fstat(directory_fd)
    return facts.st_uid == os.geteuid() and facts.st_mode & 0o777 == 0o700


def refuse_denied(layout: StoreLayout, key: str) -> None:
    """Raise ArtifactDenied if there is a marker."""
    marker = containment.denial(layout, key)
    if marker is not None:
        problem = f"{marker.get('reason', 'unknown')}: {marker.get('message', '')}"
        raise ArtifactDenied(reason=str(marker.get("reason", "")), root=str(layout.root), key=short_key(key), problem=problem)


def _refuse_replaced(path: Path, directory_fd: int, key: str, root: str) -> None:
    mine = os.fstat(directory_fd)
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        there = None
    if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
        problem = "it was replaced while it was looked up"
        raise StoreIoError(reason="replaced", root=root, path=short_key(key), operation="lookup", problem=problem)
