"""Stores and checkpoints of the tests of the main job: what lies in them, and what the page cache says of a file."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from hwr.errors import Unavailable
from hwr.procfs.pagecache import page_cache

# What the kernel reads ahead of the header at most; payload that nobody asked for beyond it stays on disk.
READAHEAD_BYTES = 1 << 20


class Store:
    """A store's root, seen from outside: nothing here takes a lock."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / directory) if not name.startswith("."))
        except FileNotFoundError:
            return []

    @property
    def key(self) -> str:
        (one,) = self.names("artifacts")
        return one

    @property
    def artifact(self) -> Path:
        return self.root / "artifacts" / self.key

    @property
    def payload(self) -> Path:
        (one,) = self.artifact.glob("*.safetensors")
        return one

    @property
    def manifest(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.artifact / "manifest.json").read_bytes())
        return value

    @property
    def denied(self) -> list[str]:
        return self.names("deny")

    @property
    def quarantined(self) -> list[str]:
        return self.names("quarantine")

    @property
    def temporary(self) -> list[str]:
        return self.names("tmp")

    @property
    def digest_entries(self) -> list[str]:
        return self.names("source-digests-v1/entries")

    def flip(self, tensor: str) -> None:
        """Change the sign of one float32 of a tensor, as a bad disk would: header, sizes and times stay as they were."""
        (entry,) = [row for row in self.manifest["tensors"] if row["name"] == tensor]
        path = self.artifact / entry["file"]
        facts = path.stat()
        with path.open("r+b") as file:
            at = entry["offset"] + entry["nbytes"] // 8 * 4 + 3
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x80]))
            file.flush()
            os.fsync(file.fileno())
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    def copy(self, target: Path) -> Store:
        shutil.copytree(self.root, target, symlinks=True)
        return Store(target)

    def remove(self) -> None:
        remove(self.root)


def remove(root: Path) -> None:
    """Remove a tree with directories that are not writable."""
    for directory, names, _ in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            if not stat.S_ISLNK(os.lstat(path).st_mode):
                os.chmod(path, 0o700)
    shutil.rmtree(root)


def evict(path: Path) -> None:
    """Drop a file that nobody maps from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    assert cached_bytes(path) == 0, "somebody maps or reads this file"


def cached_bytes(path: Path, offset: int = 0) -> int:
    """Return how much of a file is in the page cache, from `offset` on."""
    fd = os.open(path, os.O_RDONLY)
    try:
        told = page_cache(fd, offset)
    finally:
        os.close(fd)
    assert not isinstance(told, Unavailable), told.reason
    return told.cached_bytes


def payload_was_read(path: Path) -> bool:
    """Whether anything but the header of an evicted checkpoint file was read since."""
    return cached_bytes(path, READAHEAD_BYTES) > 0


def copy_model(source: Path, target: Path) -> Path:
    """Copy a checkpoint's directory; whole files, so that eviction and faults touch nobody else's."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file():
            subprocess.run(["cp", "--preserve=timestamps", str(path), str(target / path.name)], check=True)
    return target
