"""Validation that costs nothing which grows with the payload.

Owns the checks of an artifact's directory: immutability, listing, READY against manifest, identity, sizes, headers.
Promises that everything goes through one directory descriptor, so that the tree judged is the tree mapped (V1); and that an I/O error
is never called corruption (V2). Refuses to know leases, locks or deny markers. Payload bytes are not looked at: `UNCHECKED` says so.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from hwr import digest
from hwr.errors import ArtifactInvalid, FdLimit, ManifestIncompatible, StoreError, StoreIoError, errno_text
from hwr.store.layout import FILE_MODE, MANIFEST, READY
from hwr.store.manifest import (
    MAX_METADATA_BYTES,
    SCHEMA_VERSION,
    FileEntry,
    Manifest,
    ReadyMarker,
    document_digest,
    parse_manifest,
    parse_ready,
)
from hwr.units import canonical_json, short_key

UNCHECKED: Final = "payload bytes"
# What these say is about the tree, not about the disk below it.
_ABOUT_THE_TREE: Final = frozenset({errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.ENXIO})
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class OpenedArtifact:
    """A tree that passed: its documents, and one open descriptor a payload file. Whoever gets it closes the descriptors."""

    manifest: Manifest
    ready: ReadyMarker
    files: Mapping[str, int]

    def close(self) -> None:
        """Close the payload descriptors."""
        for fd in self.files.values():
            os.close(fd)


def validate(directory_fd: int, key: str, identity: Mapping[str, Any] | None, root: str) -> OpenedArtifact:
    """Judge the tree behind a directory descriptor; `identity` None skips the comparison (tools that know only the key).

    Raises:
        ArtifactInvalid, ManifestIncompatible: the tree is not what was published.
        StoreIoError, FdLimit: it could not be judged; nothing is said about the tree.
    """
    _immutable_directory(directory_fd, key, root)
    ready_raw = _document(directory_fd, READY, key, root)
    manifest_raw = _document(directory_fd, MANIFEST, key, root)
    try:
        ready = parse_ready(ready_raw)
        if ready.manifest_digest != document_digest(manifest_raw):
            raise _invalid(key, root, "ready_mismatch", "READY.json names another manifest")
        manifest = parse_manifest(manifest_raw)
    except (ValueError, TypeError, KeyError) as error:
        if f'"schema_version":{SCHEMA_VERSION}'.encode() not in manifest_raw:
            raise ManifestIncompatible(reason="schema", root=root, key=short_key(key), problem="its manifest has another schema") from error
        raise _invalid(key, root, "documents", f"READY.json or manifest.json: {error}") from error
    if ready.content_digest != manifest.content_digest:
        raise _invalid(key, root, "ready_mismatch", "READY.json names another content")
    if manifest.key != key:
        raise _invalid(key, root, "identity", f"its manifest is that of {short_key(manifest.key)}")
    if identity is not None and canonical_json(manifest.identity) != canonical_json(identity):
        raise _invalid(key, root, "identity", "its manifest names another identity")
    _exact_listing(directory_fd, manifest, key, root)
    opened: dict[str, int] = {}
    try:
        for file in manifest.files:
            opened[file.name] = _payload(directory_fd, file, key, root)
    except BaseException:
        for fd in opened.values():
            os.close(fd)
        raise
    return OpenedArtifact(manifest=manifest, ready=ready, files=opened)


@contextmanager
def reading(name: str, key: str, root: str) -> Iterator[None]:
    """Turn an OSError into the typed failure that it is: about the tree, about limits, or about the disk."""
    try:
        yield
    except OSError as error:
        raise typed(error, name, key, root) from error


def typed(error: OSError, name: str, key: str, root: str) -> StoreError:
    """Return the typed failure of a system call on an artifact's file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return FdLimit(reason="open", root=root, path=name, limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if error.errno in _ABOUT_THE_TREE:
        return _invalid(key, root, "listing", f"{name}: {errno_text(error)}")
    return StoreIoError(reason="read", root=root, path=name, operation="read", problem=errno_text(error))


def _invalid(key: str, root: str, reason: str, problem: str) -> ArtifactInvalid:
    return ArtifactInvalid(reason=reason, root=root, key=short_key(key), problem=problem)


def _immutable_directory(directory_fd: int, key: str, root: str) -> None:
    facts = os.fstat(directory_fd)
    if facts.st_uid != os.geteuid():
        raise _invalid(key, root, "immutability", f"its directory belongs to uid {facts.st_uid}")
    if facts.st_mode & 0o222:
        raise _invalid(key, root, "immutability", f"its directory can be written (mode {stat.S_IMODE(facts.st_mode):04o})")


def _exact_listing(directory_fd: int, manifest: Manifest, key: str, root: str) -> None:
    with reading("the directory", key, root):
        there = set(os.listdir(directory_fd))
    wanted = {READY, MANIFEST, *(file.name for file in manifest.files)}
    if there != wanted:
        odd = sorted(there ^ wanted)
        problem = ", ".join(f"{'unexpected' if name in there else 'missing'} {name}" for name in odd[:3])
        raise _invalid(key, root, "listing", problem)


def _document(directory_fd: int, name: str, key: str, root: str) -> bytes:
    with reading(name, key, root):
        fd = os.open(name, _READ, dir_fd=directory_fd)
        try:
            facts = os.fstat(fd)
            _regular(facts, name, key, root)
            if facts.st_size > MAX_METADATA_BYTES:
                raise _invalid(key, root, "documents", f"{name} has {facts.st_size} bytes")
            raw = b""
            while chunk := os.read(fd, facts.st_size + 1 - len(raw)):
                raw += chunk
                if len(raw) > facts.st_size:
                    break
        finally:
            os.close(fd)
    return raw


def _regular(facts: os.stat_result, name: str, key: str, root: str) -> None:
    problem = None
    if not stat.S_ISREG(facts.st_mode):
        problem = "is not a regular file"
    elif facts.st_nlink != 1:
        problem = f"has {facts.st_nlink} hard links"
    elif facts.st_uid != os.geteuid():
        problem = f"belongs to uid {facts.st_uid}"
    elif stat.S_IMODE(facts.st_mode) & ~FILE_MODE:
        problem = f"can be written (mode {stat.S_IMODE(facts.st_mode):04o})"
    if problem:
        raise _invalid(key, root, "immutability", f"{name} {problem}")


def _payload(directory_fd: int, file: FileEntry, key: str, root: str) -> int:
    with reading(file.name, key, root):
        fd = os.open(file.name, _READ, dir_fd=directory_fd)
        try:
            facts = os.fstat(fd)
            _regular(facts, file.name, key, root)
            if facts.st_size != file.size:
                raise _invalid(key, root, "size", f"{file.name} has {facts.st_size} bytes, not {file.size}")
            # The header is metadata: it says where stock tools find the tensors. Its bytes do not grow with the payload.
            if digest.of_bytes(_read_exactly(fd, file.header_bytes)) != file.header_digest:
                raise _invalid(key, root, "header", f"{file.name}: the header changed")
        except BaseException:
            os.close(fd)
            raise
    return fd


def _read_exactly(fd: int, count: int) -> bytes:
    parts: list[bytes] = []
    got = 0
    while got < count and (part := os.pread(fd, count - got, got)):
        parts.append(part)
        got += len(part)
    return b"".join(parts)
