"""How much of each artifact lies in the page cache, asked of the files.

Owns the order and the pace: what is leased every fifteen seconds, the rest in turns. Promises a source and a time with each figure, a share
of the time that asking may take, and that a store whose filesystem hangs costs its own figures only. Refuses to open what is not the
regular file that was known, and to guess where the kernel denies.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diag.node.artifact_files import ArtifactFiles, ArtifactIndex
from diag.node.asides import Answer, Asides, Waiting
from diag.node.collecting import Allowance, Collected, Gaps, joined_problem
from diag.node.runs import Seen
from diag.node.stores import StoreFound
from hwr.errors import Unavailable, errno_text
from hwr.outcomes import InventoryState, MemorySource
from hwr.procfs.pagecache import page_cache
from hwr.telemetry.clock import boot_ns
from hwr.units import NS_PER_S

LEASED_EVERY_SECONDS: Final = 15.0
EVERY_SECONDS: Final = 5.0
# While the files of what is leased are not known yet.
FIRST_SECONDS: Final = 1.0
# Of the agent's whole time; the burst serves the first look at two hundred files. cachestat takes 0.1 ms on ext4, some ms a GiB on tmpfs.
SHARE: Final = 0.002
BURST_SECONDS: Final = 0.03
AT_ONCE: Final = 256
PATIENCE_SECONDS: Final = 0.5

_DENIED: Final = ("EPERM", "EACCES", "answers only the file's owner")
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class CachedPages:
    """The page cache of all payload files of one artifact."""

    bytes: int
    source: MemorySource
    sampled_ns: int


@dataclass(frozen=True, slots=True)
class _Round:
    """What one store's files answered."""

    pages: dict[str, CachedPages | Unavailable]
    seconds: float


class PageCacheCollector:
    """Asks for each artifact whose files are known."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Seen]],
        stores: Callable[[], Sequence[StoreFound]],
        index: ArtifactIndex,
        *,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._workers, self._stores, self._index, self._clock = workers, stores, index, clock
        self._asides = Asides("page-cache", clock=clock)
        self._allowance = Allowance(SHARE, BURST_SECONDS, clock=clock)
        self._gaps = Gaps()
        self._known: dict[str, CachedPages] = {}
        self._asked: dict[str, int] = {}
        self._ready_of: tuple[object, ...] = ()
        self._ready: tuple[str, ...] = ()
        self._turn = 0

    @property
    def unreadable(self) -> tuple[str, ...]:
        """What may not be asked, and what would open it."""
        return self._gaps.texts

    def collect(self) -> Collected[dict[str, CachedPages]]:
        """Ask as many as the time allows; a store is waited for half a second, what it answers later is taken the next time."""
        leased = sorted({str(lease.get("key")) for worker in self._workers() for lease in worker.state.leases.values()})
        chosen = self._due(leased)
        missing = any(self._index.known(key) is None for key in leased)
        problems: list[str] = []
        for root, files in chosen.items():
            left = self._allowance.left()
            if left > 0 and files:
                self._asides.begin(root, functools.partial(_ask_all, files, left, self._clock))
        for root in chosen:
            answer = self._asides.fetch(root, PATIENCE_SECONDS)
            if isinstance(answer, Waiting):
                problems.append(f"a store has not answered for {answer.seconds:.0f} s")
            elif answer is not None:
                problems += self._take(answer)
        kept = {*self._ready, *leased}
        self._known = {key: pages for key, pages in self._known.items() if key in kept}
        self._asked = {key: when for key, when in self._asked.items() if key in kept}
        return Collected(dict(self._known), joined_problem(problems), FIRST_SECONDS if missing else EVERY_SECONDS)

    def _due(self, leased: Sequence[str]) -> dict[Path, list[ArtifactFiles]]:
        """Choose whom to ask, by store: the leased ones whose time has come, then the next of the others."""
        artifacts = tuple(store.artifacts for store in self._stores())
        if len(artifacts) != len(self._ready_of) or any(one is not other for one, other in zip(artifacts, self._ready_of, strict=True)):
            self._ready_of = artifacts
            self._ready = tuple(sorted({one.key for part in artifacts for one in part if one.state is InventoryState.READY}))
        now, mine = self._clock(), frozenset(leased)
        keys = [key for key in leased if now - self._asked.get(key, 0) >= LEASED_EVERY_SECONDS * NS_PER_S or key not in self._asked]
        count = min(AT_ONCE, len(self._ready))
        turn = [self._ready[(self._turn + offset) % len(self._ready)] for offset in range(count)]
        # Those first that waited longest: where the time does not reach round, everybody's turn comes all the same.
        keys += sorted((key for key in turn if key not in mine and self._again(key, now)), key=lambda key: self._asked.get(key, 0))
        self._turn = (self._turn + count) % max(1, len(self._ready))
        chosen: dict[Path, list[ArtifactFiles]] = {root: [] for root, _ in self._roots_waiting()}
        for key in keys:
            found = self._index.known(key)
            if found is not None:
                chosen.setdefault(found.directory.parent, []).append(found)
        return chosen

    def _again(self, key: str, now: int) -> bool:
        """Of a small store the turn comes round within seconds: nobody needs that."""
        return now - self._asked.get(key, 0) >= 2 * LEASED_EVERY_SECONDS * NS_PER_S or key not in self._asked

    def _roots_waiting(self) -> list[tuple[Path, float]]:
        return [(root, seconds) for root, seconds in self._asides.waiting().items() if isinstance(root, Path)]

    def _take(self, answer: Answer[_Round]) -> list[str]:
        problems: list[str] = []
        self._allowance.spend(answer.value.seconds)
        now = self._clock()
        for key, pages in answer.value.pages.items():
            self._asked[key] = now
            if not isinstance(pages, Unavailable):
                self._known[key] = pages
                continue
            self._known.pop(key, None)
            if any(word in pages.reason for word in _DENIED):
                self._gaps.note("page_cache: page cache of other users' files", "CAP_FOWNER and CAP_DAC_OVERRIDE")
            else:
                problems.append(pages.reason)
        return problems


def _ask_all(files: Sequence[ArtifactFiles], seconds: float, clock: Callable[[], int]) -> _Round:
    """Ask one after the other until the time is spent; the first is always asked."""
    begun = time.thread_time()
    pages: dict[str, CachedPages | Unavailable] = {}
    for found in files:
        pages[found.key] = _ask(found, clock)
        if time.thread_time() - begun >= seconds:
            break
    return _Round(pages, time.thread_time() - begun)


def _ask(found: ArtifactFiles, clock: Callable[[], int]) -> CachedPages | Unavailable:
    total, source = 0, MemorySource.CACHESTAT
    for payload in found.files:
        try:
            descriptor = os.open(payload.path, _FLAGS)
        except OSError as error:
            return Unavailable(errno_text(error))
        try:
            facts = os.fstat(descriptor)
            # Numbers of inodes are used again; artifacts never change their size.
            if not stat.S_ISREG(facts.st_mode) or (facts.st_ino, facts.st_size) != (payload.file.inode, payload.bytes):
                return Unavailable("another file has taken the place of a payload file")
            pages = page_cache(descriptor)
        finally:
            os.close(descriptor)
        if isinstance(pages, Unavailable):
            return pages
        total += pages.cached_bytes
        source = pages.source
    return CachedPages(total, source, clock())
