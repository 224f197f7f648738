"""What a store holds, for whoever only looks.

Owns the listing of artifacts, quarantine, temporaries and deny markers. Promises to write nothing, to take no lock, to wait for nobody, and
to read stores of other writers of this layout (vLLM-Omni's): what it does not know of a manifest stays unknown.
Refuses to judge: a listed artifact was not validated.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.errors import Unavailable, errno_text
from hwr.outcomes import InventoryState
from hwr.store.layout import KEY, MANIFEST, QUARANTINED, READY, TEMPORARY, StoreLayout
from hwr.units import MIB

MAX_READ_BYTES: Final = 64 * MIB


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


def document(path: Path) -> dict[str, Any] | None:
    """Return one of a store's JSON documents as it is, None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode) and facts.st_size <= MAX_READ_BYTES:
                value = json.loads(file.read(MAX_READ_BYTES))
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
