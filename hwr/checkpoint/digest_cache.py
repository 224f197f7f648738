"""Digests of the source files, so that the second start need not read them.

Owns `source-digests-v1/entries` of a store: one entry a source file, named by the SHA-256 of its path.
Promises that an entry is used only if size, device, inode, mtime, ctime and link target are those of now, the record is whole, and
the file was already old when it was hashed (C1): a write in the same clock tick would be invisible. Refuses to fail: without a
usable cache the file is hashed. A file that changes while it is hashed is `source_changed`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from hwr import digest
from hwr.checkpoint.source import CheckpointSource, Shard, StatFacts
from hwr.errors import SourceChanged, SourceUnreadable, errno_text
from hwr.telemetry import span
from hwr.telemetry.events import SourceDigestBegun, SourceDigestProgress
from hwr.units import canonical_json

SCHEMA_VERSION: Final = 1
TELL_SECONDS: Final = 0.25
# File times advance with the kernel's tick, 1-10 ms; within that a second write leaves no trace.
RACY_NS: Final = 20_000_000
# A hidden pass through a page-cache mapping: BLAKE3's threads pay off over mappings of this size.
WINDOW_BYTES: Final = digest.UNIT_BYTES


@dataclass(frozen=True, slots=True)
class SourceDigests:
    """Content ids of all shards, in the order of the source; `hashed` of them were read now."""

    content_ids: tuple[str, ...]
    hashed: int


def source_digests(source: CheckpointSource, entries: Path | None, *, keep: bool = True) -> SourceDigests:
    """Return the content id of each shard, from the cache below `entries` where it can be trusted.

    Raises:
        SourceChanged: a file changed while it was hashed.
        SourceUnreadable: a file cannot be read.
    """
    planned = sum(shard.facts.size for shard in source.shards)
    with span(SourceDigestBegun(files=len(source.shards), planned_bytes=planned)) as pass_:
        ids: list[str] = []
        hashed = done = 0
        told = time.monotonic()

        def progress(count: int) -> None:
            nonlocal done, told
            done += count
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                pass_.progress(SourceDigestProgress(done_bytes=done, planned_bytes=planned))

        for shard in source.shards:
            known = None if entries is None else _read(entries, shard)
            if known is None:
                begun_ns = time.time_ns()
                known = _hash(shard, progress)
                hashed += 1
                if entries is not None and keep:
                    _write(entries, shard, known, begun_ns)
            ids.append(known)
        pass_.add(files=len(ids), hashed=hashed, bytes=done)
    return SourceDigests(content_ids=tuple(ids), hashed=hashed)


def fingerprint(content_ids: Sequence[str]) -> str:
    """Return the fingerprint of a set of files: their content, whatever their names and order."""
    return hashlib.sha256(canonical_json(sorted(content_ids))).hexdigest()


def entry_name(path: Path) -> str:
    """Return the name of the entry of a source path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest() + ".json"


def _state(shard: Shard) -> dict[str, Any]:
    return {**asdict(shard.facts), "symlink_target": shard.symlink_target}


def _read(entries: Path, shard: Shard) -> str | None:
    try:
        record: dict[str, Any] = json.loads((entries / entry_name(shard.path)).read_bytes())
        told = record.pop("record_sha256")
        if told != _record_digest(record) or record["schema_version"] != SCHEMA_VERSION or record["state"] != _state(shard):
            return None
        if max(shard.facts.mtime_ns, shard.facts.ctime_ns) > record["hashed_ns"] - RACY_NS:
            return None
        return str(record["content_id"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(entries: Path, shard: Shard, content_id: str, begun_ns: int) -> None:
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "content_id": content_id,
        "state": _state(shard),
        "hashed_ns": begun_ns,
    }
    record["record_sha256"] = _record_digest(record)
    target = entries / entry_name(shard.path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(OSError):
        try:
            temporary.write_bytes(canonical_json(record))
            os.replace(temporary, target)  # two hashers write the same record; a torn one fails its own digest
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _record_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json({key: value for key, value in record.items() if key != "record_sha256"})).hexdigest()


def _hash(shard: Shard, progress: Callable[[int], None]) -> str:
    units: list[str] = []
    try:
        fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceUnreadable(file=shard.name, problem=errno_text(error)) from error
    try:
        _same(fd, shard)
        # pread, not a mapping: a source is writable by others, and a file that shrinks under a mapping kills its reader.
        buffer = mmap.mmap(-1, min(WINDOW_BYTES, max(shard.facts.size, 1)))
        with buffer, memoryview(buffer) as view:
            for offset, length in digest.unit_ranges(shard.facts.size):
                got = 0
                while got < length:
                    count = os.preadv(fd, [view[got:length]], offset + got)
                    if count == 0:
                        raise SourceChanged(file=shard.name)
                    got += count
                units.append(blake3(view[:length], max_threads=blake3.AUTO).hexdigest())
                progress(length)
        _same(fd, shard)
    except OSError as error:
        raise SourceUnreadable(file=shard.name, problem=errno_text(error)) from error
    finally:
        os.close(fd)
    return "blake3:" + digest.of_units(units)


def _same(fd: int, shard: Shard) -> None:
    if StatFacts.of(os.fstat(fd)) != shard.facts:
        raise SourceChanged(file=shard.name)
