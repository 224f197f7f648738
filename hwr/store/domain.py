"""Opening a store.

Owns the root: its filesystem, permissions, directories, the two documents, and the probe of what works there.
Promises that an enabled runtime knows at once whether flock, shared mappings and writing work, and says so in one event.
Refuses filesystems that are not known to be local, roots that others may write, and options that the store was not made with.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import stat
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.errors import (
    DomainPolicyMismatch,
    DomainUnavailable,
    FdLimit,
    HwrError,
    MmapUnsupported,
    ReadOnlyStore,
    StorageClassMismatch,
    Unavailable,
    UntrustedPermissions,
    errno_text,
)
from hwr.outcomes import LockKind, StorageClass, StorageScope
from hwr.procfs.mountinfo import mount_of, read_mountinfo
from hwr.store.layout import DIRECTORY_MODE, StoreLayout
from hwr.store.locks import acquire, no_space
from hwr.telemetry import span
from hwr.telemetry.events import DomainOpening
from hwr.units import canonical_json

MAX_DOCUMENT_BYTES: Final = 1 << 20

_NO_MAPPING: Final = frozenset({errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM})
_TMPFS: Final = frozenset({"tmpfs", "ramfs"})
# flock and shared mappings are what we rely on; network and cluster filesystems keep neither promise between nodes.
_DISK: Final = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "overlay",
        "rootfs",
        "erofs",
        "jfs",
        "reiserfs",
        "ntfs3",
        "aufs",
        "fuseblk",
    }
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacity policy of a store, in bytes; None is no limit, for `min_free_bytes` 5 % of the filesystem."""

    max_artifact_bytes: int | None = None
    max_store_bytes: int | None = None
    min_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Domain:
    """An opened store. `writable` is false on a read-only filesystem: hits work, builds are refused."""

    layout: StoreLayout
    fstype: str
    storage_class: StorageClass
    domain_uuid: str
    limits: Limits
    writable: bool
    coordination_timeout_seconds: float

    @property
    def root(self) -> Path:
        """The root directory."""
        return self.layout.root

    def deadline(self) -> float:
        """Return the monotonic deadline of an operation that starts now."""
        return time.monotonic() + self.coordination_timeout_seconds


def open_domain(root: str | os.PathLike[str], *, limits: Limits, coordination_timeout_seconds: float, create: bool = True) -> Domain:
    """Open a store, making it if `create` and it is not there.

    Raises:
        StoreError: one of its classes, saying what is wrong with the root and what to do.
    """
    path = Path(os.path.abspath(root))
    with span(DomainOpening(root=str(path))) as opening:
        try:
            domain, created = _open(path, limits, coordination_timeout_seconds, create)
        except OSError as error:
            raise _typed(error, path) from error
        opening.add(
            fstype=domain.fstype,
            storage_class=domain.storage_class.value,
            created=created,
            writable=domain.writable,
            nofile_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            max_map_count=max_map_count(),
        )
    return domain


def filesystem_of(path: Path) -> str | Unavailable:
    """Return the filesystem type that holds a path, or its nearest existing parent."""
    mounts = read_mountinfo()
    if isinstance(mounts, Unavailable):
        return mounts
    while not path.exists() and path != path.parent:
        path = path.parent
    mount = mount_of(path.resolve(), mounts)
    return mount if isinstance(mount, Unavailable) else mount.fstype


def _open(path: Path, limits: Limits, timeout: float, create: bool) -> tuple[Domain, bool]:
    layout = StoreLayout(path)
    fstype = filesystem_of(path)
    if isinstance(fstype, Unavailable):
        raise DomainUnavailable(reason="filesystem_unknown", root=str(path), problem=fstype.reason)
    storage_class = StorageClass.TMPFS if fstype in _TMPFS else StorageClass.DISK
    if fstype not in _TMPFS and fstype not in _DISK:
        raise StorageClassMismatch(reason="not_local", root=str(path), fstype=fstype)
    created = create and _make_root(path)
    if not path.is_dir():
        problem = "it is not a directory" if path.exists() else "it does not exist"
        raise DomainUnavailable(reason="no_directory", root=str(path), problem=problem)
    _check_permissions(path, may_be_link=True)  # the root is the operator's choice; below it nothing is a link
    writable = _is_writable(path)
    if writable and create:
        for directory in layout.directories[1:]:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=DIRECTORY_MODE)
    if not layout.locks.is_dir():
        raise DomainUnavailable(reason="no_store", root=str(path), problem="it holds no store")
    for directory in layout.directories[1:]:
        if directory.exists():
            _check_permissions(directory)
    _probe_mapping(layout, fstype)
    deadline = time.monotonic() + timeout
    with acquire(layout.lock(LockKind.DOMAIN_INIT), LockKind.DOMAIN_INIT, exclusive=True, deadline=deadline):
        told = _agree(layout, fstype, storage_class, limits, writable=writable and create)
    domain = Domain(
        layout=layout,
        fstype=fstype,
        storage_class=storage_class,
        domain_uuid=str(told.get("domain_uuid", "")),
        limits=limits,
        writable=writable,
        coordination_timeout_seconds=timeout,
    )
    return domain, created


def _make_root(path: Path) -> bool:
    try:
        path.mkdir(mode=DIRECTORY_MODE, parents=True)
    except FileExistsError:
        return False
    return True


def _check_permissions(path: Path, *, may_be_link: bool = False) -> None:
    facts = os.stat(path, follow_symlinks=may_be_link)
    if not stat.S_ISDIR(facts.st_mode):
        raise UntrustedPermissions(reason="not_a_directory", path=str(path), root=str(path), problem="is not a directory")
    if facts.st_uid != os.geteuid():
        problem = f"belongs to uid {facts.st_uid}, not to this user ({os.geteuid()})"
        raise UntrustedPermissions(reason="owner", path=str(path), root=str(path), problem=problem)
    if facts.st_mode & 0o022:
        problem = f"others may write it (mode {stat.S_IMODE(facts.st_mode):04o})"
        raise UntrustedPermissions(reason="mode", path=str(path), root=str(path), problem=problem)


def _is_writable(path: Path) -> bool:
    """Ask by trying: access(2) says yes to root on a read-only bind of some filesystems."""
    probe = path / f".probe.{uuid.uuid4().hex}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return False
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True  # full, not read-only: hits work, and a build says what is missing
        raise
    os.close(fd)
    os.unlink(probe)
    return True


def _probe_mapping(layout: StoreLayout, fstype: str) -> None:
    """Map one byte shared, of any file that is there: some filesystems have only private mappings, or none."""
    path = next((p for p in (layout.domain, layout.policy) if p.is_file() and p.stat().st_size), None)
    if path is None:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mmap.mmap(fd, 1, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ).close()
    except OSError as error:
        if error.errno not in _NO_MAPPING:  # a limit of this process, or the disk
            raise
        raise MmapUnsupported(reason="shared", root=str(layout.root), fstype=fstype, problem=errno_text(error)) from error
    finally:
        os.close(fd)


def _agree(layout: StoreLayout, fstype: str, storage_class: StorageClass, limits: Limits, *, writable: bool) -> dict[str, Any]:
    domain = {
        "schema_version": 1,
        "scope": StorageScope.NODE.value,
        "domain_id": "node",
        "backend": "local_filesystem",
        "storage_class": storage_class.value,
        "filesystem_type": fstype,
    }
    policy = {
        "schema_version": 1,
        "policy_version": 1,
        "max_artifact_bytes": limits.max_artifact_bytes,
        "max_store_bytes": limits.max_store_bytes,
        "min_free_bytes": limits.min_free_bytes,
        "eviction": "none",
    }
    told = _agree_on(layout, layout.domain, domain, fresh={"domain_uuid": str(uuid.uuid4())}, writable=writable)
    _agree_on(layout, layout.policy, policy, fresh={}, writable=writable)
    return told


def _agree_on(layout: StoreLayout, path: Path, wanted: dict[str, Any], *, fresh: dict[str, Any], writable: bool) -> dict[str, Any]:
    found = read_document(path)
    if found is None:
        document = {**wanted, **fresh}
        if writable:
            write_document(path, document)
        return document
    different = sorted(name for name in wanted if found.get(name, ...) != wanted[name])
    if different:
        problem = ", ".join(f"{name} is {found.get(name)!r} there, {wanted[name]!r} here" for name in different)
        raise DomainPolicyMismatch(reason="document", root=str(layout.root), file=path.name, problem=problem)
    return found


def read_document(path: Path) -> dict[str, Any] | None:
    """Return a small JSON object, None if the file is not there.

    Raises:
        DomainPolicyMismatch: it is no JSON object.
        OSError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        raw = os.read(fd, MAX_DOCUMENT_BYTES)
    finally:
        os.close(fd)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DomainPolicyMismatch(reason="document", root=str(path.parent), file=path.name, problem="it is not a JSON object")
    return value


def write_document(path: Path, value: dict[str, Any]) -> None:
    """Write a small JSON object durably: a unique temporary, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            rest = memoryview(canonical_json(value))
            while len(rest):  # on a disk that fills up, a write may be short without an error
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def max_map_count() -> int | None:
    """Return the kernel's limit of mappings a process, None if it cannot be read."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _typed(error: OSError, root: Path) -> HwrError:
    if error.errno == errno.EROFS:
        return ReadOnlyStore(reason="read_only_filesystem", root=str(root), problem=errno_text(error))
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return FdLimit(reason="open", root=str(root), path=str(error.filename or root), limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space(error, root, "making the store")
    problem = f"{errno_text(error)}: {error.filename}" if error.filename else errno_text(error)
    return DomainUnavailable(reason=errno.errorcode.get(error.errno or 0, "os_error").lower(), root=str(root), problem=problem)
