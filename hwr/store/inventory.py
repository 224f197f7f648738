"""What a store holds, for whoever only looks.

Owns the listing of artifacts, quarantine, temporaries and deny markers, once (`entries`) or again and again (`Inventory`). Promises to
write nothing, to take no lock, to wait for nobody, and to read stores of other writers of this layout (vLLM-Omni's): what it does not know
of a manifest stays unknown. Refuses to judge: a listed artifact was not validated.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hwr.errors import Unavailable, errno_text
from hwr.outcomes import InventoryState
from hwr.store.layout import KEY, MANIFEST, PAYLOAD, QUARANTINED, READY, TEMPORARY, StoreLayout
from hwr.units import KIB, MIB

MAX_READ_BYTES: Final = 64 * MIB

_MARKER_BYTES: Final = 64 * KIB
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory of a store. `modified_ns` is the time of its last change; `reason` says why it is denied or in quarantine."""

    key: str
    state: InventoryState
    name: str
    path: Path
    size_bytes: int
    files: int
    modified_ns: int
    reason: str | None = None


def entries(root: Path) -> tuple[Entry, ...] | Unavailable:
    """List the directories of a store; Unavailable if there is no store or it cannot be read."""
    layout = StoreLayout(root)
    try:
        names = set(os.listdir(root))
    except OSError as error:
        return Unavailable(errno_text(error))
    if layout.artifacts.name not in names:
        return Unavailable("it holds no store")
    return tuple(sorted(_entries(layout), key=lambda entry: (entry.state, entry.key, entry.name)))


def identity(path: Path) -> Mapping[str, Any] | None:
    """Return the identity that an artifact's manifest names, None if it cannot be read."""
    value = document(path / MANIFEST)
    found = value.get("identity") if value is not None else None
    return found if isinstance(found, dict) else None


def document(path: Path, max_bytes: int = MAX_READ_BYTES) -> dict[str, Any] | None:
    """Return one of a store's JSON documents as it is, None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode) and facts.st_size <= max_bytes:
                value = json.loads(file.read(max_bytes))
                return value if isinstance(value, dict) else None
    return None


def _entries(layout: StoreLayout) -> Iterator[Entry]:
    for name in _names(layout.artifacts):
        if KEY.match(name):
            state, reason = _artifact_state(layout, name)
            yield _entry(name, state, layout.artifacts / name, reason)
    for name in _names(layout.quarantine):
        match = QUARANTINED.match(name)
        key = match[1] if match else name.partition(".")[0]
        yield _entry(key, InventoryState.QUARANTINED, layout.quarantine / name, match[2] if match else None)
    for name in _names(layout.temporary):
        match = TEMPORARY.match(name)
        yield _entry(match[1] if match else name, InventoryState.TEMPORARY, layout.temporary / name, None)


def _entry(key: str, state: InventoryState, path: Path, reason: str | None) -> Entry:
    size = files = modified = 0
    with contextlib.suppress(OSError):
        modified = os.lstat(path).st_mtime_ns
        with os.scandir(path) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_size
                    files += 1
    return Entry(key=key, state=state, name=path.name, path=path, size_bytes=size, files=files, modified_ns=modified, reason=reason)


def _artifact_state(layout: StoreLayout, key: str) -> tuple[InventoryState, str | None]:
    """Tell ready, denied and unfinished apart, the way a lookup does."""
    path, marker = layout.artifacts / key, layout.deny / f"{key}.json"
    if os.path.lexists(marker):
        return InventoryState.DENIED, str((document(marker) or {}).get("reason", "unreadable"))
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return InventoryState.TEMPORARY, "unreadable"
    if mode & stat.S_ISVTX:  # denied where there was no room for a marker
        return InventoryState.DENIED, "sticky"
    if mode & stat.S_IWUSR:  # renamed, not yet hardened: its builder is about to commit, or died there
        return InventoryState.TEMPORARY, "unfinished"
    if not (path / READY).is_file():  # a lookup will deny it
        return InventoryState.DENIED, "no_ready_marker"
    return InventoryState.READY, None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload file of a tree: its name, inode and size."""

    name: str
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Tree:
    """An entry with its payload files. `device` and `inode` are those of its directory, as `stat` says."""

    entry: Entry
    device: int
    inode: int
    payload: tuple[Payload, ...]


class Inventory:
    """The trees of one store, looked at again and again: those that did not change cost one `lstat`.

    Not for several threads. It enters no directory below the root that is a symbolic link: the root may be somebody else's.
    """

    def __init__(self, root: Path, max_trees: int) -> None:
        """Remember nothing yet; of more trees than `max_trees` the rest is only counted."""
        layout = StoreLayout(root)
        self._artifacts, self._quarantine, self._temporary, self._deny = layout.artifacts, layout.quarantine, layout.temporary, layout.deny
        self.max_trees, self.left_out = max_trees, 0
        self._known: dict[tuple[str, str], tuple[tuple[int, ...], Tree]] = {}

    def look(self) -> tuple[Tree, ...] | Unavailable:
        """List the trees, by state, key and name; Unavailable if there is no store or it cannot be read."""
        try:
            denied = {name.removesuffix(".json") for name in self._listed(self._deny, missing_ok=True)}
            found = [(name, name, self._artifacts) for name in self._listed(self._artifacts) if KEY.match(name)]
            quarantined = self._listed(self._quarantine, missing_ok=True)
            temporary = self._listed(self._temporary, missing_ok=True)
        except FileNotFoundError:
            return Unavailable("it holds no store")
        except OSError as error:
            return Unavailable(errno_text(error))
        for names, pattern, directory in (
            (quarantined, QUARANTINED, self._quarantine),
            (temporary, TEMPORARY, self._temporary),
        ):
            for name in names:
                match = pattern.match(name)
                found.append((match[1] if match else name.partition(".")[0], name, directory))
        self.left_out = max(0, len(found) - self.max_trees)
        before, self._known = self._known, {}
        trees: list[Tree] = []
        at: Path | None = None
        descriptor = -1
        try:
            for key, name, directory in found[: self.max_trees]:
                if directory is not at:
                    if descriptor >= 0:
                        os.close(descriptor)
                    descriptor, at = -1, directory
                    descriptor = os.open(directory, _DIRECTORY)
                tree = self._tree(before, key, name, directory, descriptor, key in denied)
                if tree is not None:
                    trees.append(tree)
        except OSError as error:
            return Unavailable(errno_text(error))
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return tuple(sorted(trees, key=lambda tree: (tree.entry.state, tree.entry.key, tree.entry.name)))

    def _listed(self, directory: Path, *, missing_ok: bool = False) -> list[str]:
        try:
            descriptor = os.open(directory, _DIRECTORY)
        except FileNotFoundError:
            if missing_ok:
                return []
            raise
        try:
            return sorted(name for name in os.listdir(descriptor) if not name.startswith("."))
        finally:
            os.close(descriptor)

    def _tree(
        self,
        before: Mapping[tuple[str, str], tuple[tuple[int, ...], Tree]],
        key: str,
        name: str,
        directory: Path,
        descriptor: int,
        denied: bool,
    ) -> Tree | None:
        try:
            facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except OSError:
            return None  # renamed or removed since it was listed
        mark = (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_mode, denied)
        place = (directory.name, name)
        known = before.get(place)
        # What a builder may still write to is looked at each time; a published tree cannot change without its times.
        if known is not None and known[0] == mark and not facts.st_mode & stat.S_IWUSR:
            self._known[place] = known
            return known[1]
        tree = self._look_into(key, name, directory, descriptor, facts, denied)
        if known is not None and known[1] == tree:
            tree = known[1]
        self._known[place] = (mark, tree)
        return tree

    def _look_into(self, key: str, name: str, directory: Path, descriptor: int, facts: os.stat_result, denied: bool) -> Tree:
        size = files = 0
        payload: list[Payload] = []
        ready = False
        with contextlib.suppress(OSError):  # not a directory, a link, or not ours to read: it stays an entry of nothing
            inside = os.open(name, _DIRECTORY, dir_fd=descriptor)
            try:
                with os.scandir(inside) as found:
                    for item in found:
                        with contextlib.suppress(OSError):
                            status = item.stat(follow_symlinks=False)
                            size += status.st_size
                            files += 1
                            regular = stat.S_ISREG(status.st_mode)
                            ready = ready or (regular and item.name == READY)
                            if regular and PAYLOAD.match(item.name):
                                payload.append(Payload(item.name, status.st_ino, status.st_size))
            finally:
                os.close(inside)
        entry = Entry(
            key=key,
            state=InventoryState.READY,
            name=name,
            path=directory / name,
            size_bytes=size,
            files=files,
            modified_ns=facts.st_mtime_ns,
        )
        state, reason = self._state(entry, directory, facts, denied=denied, ready=ready)
        payload.sort(key=lambda file: file.name)
        return Tree(replace(entry, state=state, reason=reason), facts.st_dev, facts.st_ino, tuple(payload))

    def _state(
        self, entry: Entry, directory: Path, facts: os.stat_result, *, denied: bool, ready: bool
    ) -> tuple[InventoryState, str | None]:
        """As `_artifact_state`, from what is at hand."""
        if directory is self._quarantine:
            match = QUARANTINED.match(entry.name)
            return InventoryState.QUARANTINED, match[2] if match else None
        if directory is self._temporary:
            return InventoryState.TEMPORARY, None
        if denied:
            return InventoryState.DENIED, str((document(self._deny / f"{entry.key}.json", _MARKER_BYTES) or {}).get("reason", "unreadable"))
        if facts.st_mode & stat.S_ISVTX:
            return InventoryState.DENIED, "sticky"
        if facts.st_mode & stat.S_IWUSR:
            return InventoryState.TEMPORARY, "unfinished"
        return (InventoryState.READY, None) if ready else (InventoryState.DENIED, "no_ready_marker")
