"""The payload files of an artifact, as the kernel's tables call them.

Owns the way from a key to files with device, inode and size. Promises to look at an unchanged directory once (artifacts are immutable), to
answer from memory whoever must not wait for a filesystem (`known`, `by_file`), and to remember what a file was called after it was set
aside or deleted, since mappings of it live on: as long as one does, its inode is nobody else's, and an artifact that gets a free one takes
the name over. Refuses links. Any thread may ask; what touches a store is for that store's own thread.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.reading import PROC_ROOT
from hwr.store.inventory import Payload, Tree
from hwr.store.layout import KEY, PAYLOAD, StoreLayout

# A store may hold ten thousand; what is forgotten first is what was learnt first.
MAX_KNOWN: Final = 20_000


@dataclass(frozen=True, slots=True)
class PayloadFile:
    """One file."""

    path: Path
    file: FileId
    bytes: int


@dataclass(frozen=True, slots=True)
class ArtifactFiles:
    """The files of one artifact, by name."""

    key: str
    directory: Path
    files: tuple[PayloadFile, ...]

    @property
    def ids(self) -> frozenset[FileId]:
        """What the kernel's tables call them."""
        return frozenset(payload.file for payload in self.files)


class ArtifactIndex:
    """Finds and remembers."""

    def __init__(self, proc_root: Path = PROC_ROOT) -> None:
        self._proc_root = proc_root
        self._lock = threading.Lock()
        # By root and directory, so that a tree in quarantine stands beside the one that took its place.
        self._known: dict[tuple[Path, int], ArtifactFiles] = {}
        self._by_key: dict[str, ArtifactFiles] = {}
        self._by_file: dict[FileId, str] = {}
        self._devices: dict[tuple[Path, int], tuple[int, int]] = {}
        self.version = 0  # grows with everything that is learnt

    def known(self, key: str) -> ArtifactFiles | None:
        """Return the files that this key last had, wherever they were; touches no filesystem."""
        return self._by_key.get(key)

    def by_file(self) -> Mapping[FileId, str]:
        """Return the key of every file that is known, of those too that are gone; not to be changed."""
        return self._by_file

    def devices(self) -> frozenset[tuple[int, int]]:
        """Return the devices that the kernel's tables print for all files that are known."""
        return frozenset(tuple(self._devices.values()))

    def find(self, key: str, root: Path) -> ArtifactFiles | None:
        """Look a published artifact up in its store and remember it; None if it is not there."""
        if not KEY.match(key):
            return None
        directory = StoreLayout(root).artifacts / key
        try:
            facts = os.lstat(directory)
            known = self._known.get((root, facts.st_ino))
            if known is not None:
                return known
            if not stat.S_ISDIR(facts.st_mode):
                return None
            with os.scandir(directory) as entries:
                listed = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries if PAYLOAD.match(entry.name))
        except OSError:
            return None
        payload = tuple(Payload(name, item.st_ino, item.st_size) for name, item in listed if stat.S_ISREG(item.st_mode))
        return self._learn(root, key, directory, facts.st_dev, facts.st_ino, payload)

    def learn(self, root: Path, trees: Iterable[Tree]) -> None:
        """Remember what an inventory of a store found."""
        for tree in trees:
            entry = tree.entry
            if tree.payload and KEY.match(entry.key):
                known = self._known.get((root, tree.inode))
                if known is None or known.directory != entry.path or len(known.files) != len(tree.payload):
                    self._learn(root, entry.key, entry.path, tree.device, tree.inode, tree.payload)

    def device(self, root: Path, path: Path, st_dev: int) -> tuple[int, int]:
        """Return the device that the kernel's tables print for the files of a store; one for all that lie on one filesystem."""
        known = self._devices.get((root, st_dev))
        if known is None:
            told = FileId.in_tables(path, self._proc_root)
            file = FileId(os.major(st_dev), os.minor(st_dev), 0) if isinstance(told, Unavailable) else told
            known = self._devices[root, st_dev] = (file.major, file.minor)
        return known

    def _learn(self, root: Path, key: str, directory: Path, st_dev: int, inode: int, payload: Iterable[Payload]) -> ArtifactFiles:
        major, minor = self.device(root, directory, st_dev)
        files = tuple(PayloadFile(directory / file.name, FileId(major, minor, file.inode), file.size) for file in payload)
        found = ArtifactFiles(key, directory, files)
        published = directory.parent == StoreLayout(root).artifacts
        with self._lock:
            if len(self._known) >= MAX_KNOWN:
                oldest = self._known.pop(next(iter(self._known)))
                for payload_file in oldest.files:
                    self._by_file.pop(payload_file.file, None)
                if self._by_key.get(oldest.key) is oldest:
                    del self._by_key[oldest.key]
            self._known[root, inode] = found
            # Whoever reads meanwhile sees one key more or less, never half of one.
            for file in files:
                self._by_file[file.file] = key
            if published or key not in self._by_key:
                self._by_key[key] = found
            self.version += 1
        return found
