"""Bodies that take time to make: expositions and snapshots.

Owns the one thread that renders, and what it made last. Promises that each is made once for a snapshot and a format, however many ask at
once, that back-to-back scrapes never wait for it, and that no answer is older than two seconds unless making a new one hangs. Refuses to
render on the loop. Used by the loop's thread only.

A scraper that comes every 15 s waits some 20 ms for a fresh exposition. With several, or one that comes more often than snapshots do, one
of at most two seconds is served as it is while the next is made: no scrape is late because another has just been rendered.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client.exposition import choose_encoder

from diag.node.snapshot import NodeSnapshot, to_json
from hwr.units import KIB

FRESH_SECONDS: Final = 2.0
# A renderer that hangs is a defect; a scraper (time-out 10 s) is told in time, with what was rendered last if anything was.
MAKING_SECONDS: Final = 5.0
# Below this a header costs more than it saves.
MIN_GZIP_BYTES: Final = KIB
# 6 takes twice the time and saves a twentieth more of an exposition.
GZIP_LEVEL: Final = 4
# A client may make up versions, which are formats of their own.
MAX_FORMATS: Final = 8
_JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Body:
    """What was made, in the form that was asked for."""

    body: bytes
    content_type: str
    zipped: bool


@dataclass(frozen=True, slots=True)
class Unmade:
    """Nothing to serve, and why."""

    problem: str


@dataclass(frozen=True, slots=True)
class _Made:
    snapshot: NodeSnapshot
    begun: float
    body: bytes
    content_type: str
    zipped: bytes | None = None


Make = Callable[[NodeSnapshot], tuple[bytes, str] | None]


class Bodies:
    """Makes and keeps bodies; `executor` has one thread."""

    def __init__(
        self,
        exposition: Callable[[str], tuple[bytes, str] | None],
        snapshot: Callable[[], NodeSnapshot | None],
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exposition, self._snapshot, self._executor, self._clock = exposition, snapshot, executor, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def exposition(self, accept: str, *, zipped: bool) -> Body | Unmade:
        """Return an exposition in the format that the client accepts."""
        format_, canonical = _format(accept)
        return await self._body(format_, lambda _: self._exposition(canonical), zipped)

    async def snapshot(self, *, zipped: bool) -> Body | Unmade:
        """Return the snapshot as JSON."""
        return await self._body(_JSON, lambda snapshot: (to_json(snapshot), _JSON), zipped)

    async def _body(self, format_: str, make: Make, zipped: bool) -> Body | Unmade:
        newest = self._snapshot()
        if newest is None:
            return Unmade("no look has ended yet")
        kept = self._kept.setdefault(format_, _Kept())
        self._kept.move_to_end(format_)
        while len(self._kept) > MAX_FORMATS:
            self._kept.popitem(last=False)
        made = kept.made
        if made is None or made.snapshot is not newest or (zipped and made.zipped is None and len(made.body) > MIN_GZIP_BYTES):
            task = self._making(kept, newest, make, zipped)
            usable = made is not None and self._clock() - made.begun <= FRESH_SECONDS and not (zipped and made.zipped is None)
            if not usable:
                await asyncio.wait({task}, timeout=MAKING_SECONDS)
                if task.done():
                    problem = task.exception()
                    if problem is not None:
                        raise problem
                made = kept.made
        if made is None:
            return Unmade("it takes too long to render")
        if zipped and made.zipped is not None:
            return Body(made.zipped, made.content_type, True)
        return Body(made.body, made.content_type, False)

    def _making(self, kept: _Kept, newest: NodeSnapshot, make: Make, zipped: bool) -> asyncio.Task[None]:
        """Return the one task that makes this body, begun now if there is none."""
        kept.zip = kept.zip or zipped  # one that is under way looks at it when it has rendered
        if kept.task is None or kept.task.done():
            kept.task = asyncio.get_running_loop().create_task(self._make(kept, newest, make))
            kept.task.add_done_callback(_heard)
        return kept.task

    async def _make(self, kept: _Kept, newest: NodeSnapshot, make: Make) -> None:
        begun, previous = self._clock(), kept.made
        loop = asyncio.get_running_loop()
        if previous is not None and previous.snapshot is newest:  # only its short form is wanting
            kept.made = replace(previous, zipped=await loop.run_in_executor(self._executor, _short, previous.body))
            return
        result = await loop.run_in_executor(self._executor, make, newest)
        if result is None:
            return
        body, content_type = result
        short = await loop.run_in_executor(self._executor, _short, body) if kept.zip else None
        kept.made = _Made(newest, begun, body, content_type, short)


class _Kept:
    """The last body of one format, whether anybody takes it short, and who makes the next."""

    def __init__(self) -> None:
        self.made: _Made | None = None
        self.zip = False
        self.task: asyncio.Task[None] | None = None


def _short(body: bytes) -> bytes | None:
    return gzip.compress(body, GZIP_LEVEL, mtime=0) if len(body) > MIN_GZIP_BYTES else None


def _heard(task: asyncio.Task[None]) -> None:
    """Take the failure of a rendering that nobody waits for: the next that waits sees its own."""
    if not task.cancelled():
        task.exception()


def _format(accept: str) -> tuple[str, str]:
    """Return the content type that a client will get, and what to ask the renderer for."""
    try:
        return choose_encoder(accept)[1], accept
    except Exception:  # noqa: BLE001 - the library parses versions that a client made up, and raises what it likes
        return choose_encoder("")[1], ""
