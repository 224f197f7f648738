"""Whether an artifact fits.

Owns the checks before and after a build: artifact limit, store limit, free space and inodes. Promises that the tree is measured only
if a store limit is set, once a check, and that this figure is the one compared and reported (R11). Refuses to evict.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import ArtifactTooLarge, InsufficientCapacity, NoInodes, StoreLimitExceeded
from hwr.store.domain import Domain
from hwr.telemetry import span
from hwr.telemetry.events import TreeMeasuring

DEFAULT_MIN_FREE: Final = 0.05
# One directory, READY, manifest, a deny marker and its temporary, beside the payload files.
EXTRA_INODES: Final = 5


@dataclass(frozen=True, slots=True)
class TreeSize:
    """Bytes below a store's root, as files claim them, by the directory that holds them."""

    total: int
    quarantine: int
    temporary: int
    entries: int


def check(domain: Domain, key: str, needed_bytes: int, files: int) -> None:
    """Refuse an artifact of this size that does not fit.

    Raises:
        ArtifactTooLarge, StoreLimitExceeded, InsufficientCapacity, NoInodes: which limit, and what would help.
    """
    limits, root = domain.limits, str(domain.root)
    if limits.max_artifact_bytes is not None and needed_bytes > limits.max_artifact_bytes:
        raise ArtifactTooLarge(reason="artifact_limit", root=root, key=key, needed=needed_bytes, limit=limits.max_artifact_bytes)
    if limits.max_store_bytes is not None:
        size = measure(domain)
        if size.total + needed_bytes > limits.max_store_bytes:
            raise StoreLimitExceeded(
                reason="store_limit",
                root=root,
                needed=needed_bytes,
                held=size.total,
                limit=limits.max_store_bytes,
                quarantined=size.quarantine,
                temporary=size.temporary,
            )
    facts = os.statvfs(domain.root)
    available = facts.f_bavail * facts.f_frsize  # not f_bfree: reserved blocks are not for us
    reserve = limits.min_free_bytes
    if reserve is None:
        reserve = int(facts.f_blocks * facts.f_frsize * DEFAULT_MIN_FREE)
    if available - needed_bytes < reserve:
        raise InsufficientCapacity(reason="free_space", root=root, needed=needed_bytes, available=available, reserve=reserve)
    inodes = files + EXTRA_INODES
    if facts.f_files and facts.f_favail < inodes:
        raise NoInodes(reason="inodes", root=root, available=facts.f_favail, needed=inodes)


def measure(domain: Domain) -> TreeSize:
    """Walk the store's tree once."""
    with span(TreeMeasuring()) as measuring:
        sizes = {path: _tree(path) for path in (domain.layout.quarantine, domain.layout.temporary)}
        rest, entries = _tree(domain.root, skip=frozenset(sizes))
        total = rest + sum(size for size, _ in sizes.values())
        entries += sum(count for _, count in sizes.values())
        measuring.add(bytes=total, entries=entries)
    return TreeSize(
        total=total, quarantine=sizes[domain.layout.quarantine][0], temporary=sizes[domain.layout.temporary][0], entries=entries
    )


def _tree(path: Path, skip: frozenset[Path] = frozenset()) -> tuple[int, int]:
    size = entries = 0
    waiting = [path]
    while waiting:
        # What disappears while it is counted is no longer held.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        if Path(entry.path) not in skip:
                            waiting.append(Path(entry.path))
                    else:
                        size += entry.stat(follow_symlinks=False).st_size
    return size, entries
