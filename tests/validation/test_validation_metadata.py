"""The level that costs nothing which grows with the payload: V1 (one directory descriptor), V2 (an I/O error is no corruption)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store_artifacts import META, Zeros, artifact, find, identity, key_of, payload, put

from hwr.errors import ArtifactInvalid, FdLimit, ManifestIncompatible, StoreIoError
from hwr.store.domain import Domain
from hwr.store.manifest import document_digest, parse_ready
from hwr.units import MIB
from hwr.validation import metadata


def judged(directory_fd: int, key: str) -> metadata.OpenedArtifact:
    return metadata.validate(directory_fd, key, None, "root")


def test_the_tree_judged_is_the_tree_behind_the_descriptor(stored: Domain) -> None:
    """V1: another tree under the name changes nothing of what is judged and opened."""
    put(stored, "b")
    fd = os.open(artifact(stored), os.O_RDONLY | os.O_DIRECTORY)
    inode = payload(stored).stat().st_ino
    os.rename(artifact(stored), stored.root / "aside")
    os.rename(artifact(stored, "b"), artifact(stored))
    try:
        opened = judged(fd, key_of())
        assert [os.fstat(file).st_ino for file in opened.files.values()] == [inode]
        opened.close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.ESTALE, errno.EINTR])
def test_an_error_of_the_disk_is_not_called_corruption(code: int) -> None:
    """V2."""
    with pytest.raises(StoreIoError) as raised, metadata.reading("x", "0" * 64, "root"):
        raise OSError(code, os.strerror(code))
    assert raised.value.retryable


@pytest.mark.parametrize("code", [errno.EACCES, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EISDIR])
def test_an_error_about_the_tree_is_about_the_artifact(code: int) -> None:
    """V2."""
    with pytest.raises(ArtifactInvalid), metadata.reading("x", "0" * 64, "root"):
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_limit_is_a_limit(code: int) -> None:
    """V2."""
    with pytest.raises(FdLimit), metadata.reading("x", "0" * 64, "root"):
        raise OSError(code, os.strerror(code))


def test_another_schema_is_incompatible_and_not_corrupt(stored: Domain) -> None:
    path = artifact(stored)
    raw = (path / "manifest.json").read_bytes().replace(b'"schema_version":1', b'"schema_version":7')
    (path / "manifest.json").write_bytes(raw)
    ready = parse_ready((path / "READY.json").read_bytes())
    (path / "READY.json").write_bytes(ready.to_bytes().replace(ready.manifest_digest.encode(), document_digest(raw).encode()))
    assert isinstance(find(stored).failure, ManifestIncompatible)


def test_the_payload_is_not_read(stored: Domain) -> None:
    """Only header pages come from the disk: 64 MiB are validated without touching what follows the header."""
    put(stored, "large", [Zeros("zeros", 64 * MIB)])
    fd = os.open(artifact(stored, "large"), os.O_RDONLY | os.O_DIRECTORY)
    before = read_characters()
    try:
        opened = judged(fd, key_of("large"))
    finally:
        os.close(fd)
    opened.close()
    assert read_characters() - before < MIB


def read_characters() -> int:
    text = Path("/proc/thread-self/io").read_text()
    return int(text.splitlines()[0].partition(":")[2])


def test_the_identity_is_compared_and_may_be_left_out(stored: Domain) -> None:
    fd = os.open(artifact(stored), os.O_RDONLY | os.O_DIRECTORY)
    try:
        judged(fd, key_of()).close()
        metadata.validate(fd, key_of(), identity().to_json(), "root").close()
        with pytest.raises(ArtifactInvalid, match="another identity"):
            metadata.validate(fd, key_of(), identity("b").to_json(), "root")
        with pytest.raises(ArtifactInvalid, match="its manifest is that of"):
            judged(fd, key_of("b"))
    finally:
        os.close(fd)
    assert find(stored, level=META).lease is not None
