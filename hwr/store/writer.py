"""The writer of payload files.

Owns the placement of tensors in files, the safetensors header, and the one pass that writes, hashes and flushes.
Promises files that stock safetensors opens (no holes), data that starts on a page, tensors aligned to 64 bytes and single numbers to
their dtype (W1), digests of every unit computed while writing (W2), and a few blocks of memory whatever the size (W3).
Refuses names that the format reserves, before a byte is written.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from blake3 import blake3

from hwr import digest
from hwr.errors import HwrError, ProducerFailed, ProducerUnsupported
from hwr.format import BYTE_DTYPE_BITS, HEADER_LIMIT_BYTES, LENGTH_BYTES, METADATA_KEY
from hwr.outcomes import PublicationStage, TensorKind
from hwr.store.layout import FILE_MODE, PAYLOAD_SUFFIX
from hwr.store.manifest import PAD_PREFIX, FileEntry, Filler, TensorEntry, contiguous_stride
from hwr.telemetry import span
from hwr.telemetry.events import PublicationStageBegun
from hwr.units import GIB, MIB, one_line

PAGE_BYTES: Final = 4096
# What torch's own allocator gives (c10/core/alignment.h). Matrix kernels take another path for memory that is aligned less and sum in
# another order: a model would not be bit-identical to itself in memory of its own. A single number has no order.
ALIGNMENT: Final = 64
# Files are pinned, hashed and flushed one by one: several of this size overlap better than one of 60 GiB.
FILE_BYTES: Final = 8 * GIB
FLUSH_BYTES: Final = 64 * MIB


class TensorSource(Protocol):
    """One final tensor that a producer can stream: its bytes in C order, in blocks, once."""

    @property
    def name(self) -> str:
        """The name under which it is restored."""

    @property
    def kind(self) -> TensorKind:
        """What it is to its module."""

    @property
    def dtype(self) -> str:
        """A dtype word of the safetensors format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""

    def blocks(self) -> Iterator[memoryview]:
        """Yield its bytes; the memory of a block may be reused when the third one after it is asked for."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor or, with no source, a filler, at its place in a file's data section."""

    name: str
    offset: int
    nbytes: int
    source: TensorSource | None


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One payload file before it is written: its header and what follows."""

    name: str
    header: bytes
    placed: tuple[Placed, ...]
    data_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_bytes


def tensor_bytes(source: TensorSource) -> int:
    """Return the size of a tensor.

    Raises:
        ProducerUnsupported: its dtype is not one of whole bytes.
    """
    bits = BYTE_DTYPE_BITS.get(source.dtype)
    if bits is None:
        raise ProducerUnsupported(
            reason="dtype",
            what=f"tensor {source.name!r}",
            problem=f"the format has no dtype {source.dtype}",
            remedy="Cast it in the layout plan.",
        )
    return math.prod(source.shape) * bits // 8


def plan_files(sources: Sequence[TensorSource], *, aliases: Collection[str] = (), file_bytes: int = FILE_BYTES) -> tuple[FilePlan, ...]:
    """Place tensors in files; an artifact without tensors is one empty file.

    Raises:
        ProducerUnsupported: a name that the format reserves, twice the same name (`aliases` are names too), or a dtype that it
            does not have.
    """
    _check_names([*(source.name for source in sources), *aliases])
    groups: list[list[tuple[TensorSource, int]]] = [[]]
    held = 0
    for source in sorted(sources, key=_order):
        nbytes = tensor_bytes(source)
        if groups[-1] and held + nbytes > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append((source, nbytes))
        held += nbytes
    return tuple(_plan_file(f"model-{number:05d}-of-{len(groups):05d}{PAYLOAD_SUFFIX}", group) for number, group in enumerate(groups, 1))


class PayloadWriter:
    """Write planned files into a directory. One at a time, from one thread, with a second one that hashes."""

    def __init__(self, directory: Path, key: str, progress: Callable[[int], None]) -> None:
        self._directory, self._key, self._progress = directory, key, progress
        self.done_bytes = 0

    def write(self, plan: FilePlan) -> tuple[FileEntry, list[TensorEntry]]:
        """Write, hash and make durable one file.

        Raises:
            OSError: from the filesystem, ENOSPC among them.
            ProducerFailed: a producer gave more or fewer bytes than it declared.
        """
        path = self._directory / plan.name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with span(PublicationStageBegun(stage=PublicationStage.ALLOCATE), stage=PublicationStage.ALLOCATE, bytes=plan.size):
                _allocate(fd, plan.size)
            written = self._stream(fd, plan)
            with span(PublicationStageBegun(stage=PublicationStage.FSYNC), stage=PublicationStage.FSYNC, bytes=plan.size):
                os.fchmod(fd, FILE_MODE)  # before, so that this too survives a power cut
                os.fsync(fd)
        finally:
            os.close(fd)
        return written

    def _stream(self, fd: int, plan: FilePlan) -> tuple[FileEntry, list[TensorEntry]]:
        with span(PublicationStageBegun(stage=PublicationStage.HASH), stage=PublicationStage.HASH) as hashing:
            hasher = _HashThread()
            try:
                with span(PublicationStageBegun(stage=PublicationStage.WRITE), stage=PublicationStage.WRITE, bytes=plan.size):
                    self._write_and_hash(fd, plan, hasher)
            finally:
                units = hasher.finish()
            # The thread hashed beside the write stage: its own seconds, not those of waiting for it.
            hashing.add(bytes=hasher.bytes, seconds=hasher.busy_seconds)
        return _entries(plan, units)

    def _write_and_hash(self, fd: int, plan: FilePlan, hasher: _HashThread) -> None:
        _write_all(fd, memoryview(plan.header), 0)
        self.done_bytes += len(plan.header)
        flushed = 0
        for placed in plan.placed:
            at = len(plan.header) + placed.offset
            for block in self._blocks(placed):
                hasher.put(placed.name, block)
                _write_all(fd, block, at)
                at += len(block)
                self.done_bytes += len(block)
                if at - flushed >= FLUSH_BYTES:
                    _start_writeback(fd, flushed, at - flushed)
                    flushed = at
                    self._progress(self.done_bytes)
        self._progress(self.done_bytes)

    def _blocks(self, placed: Placed) -> Iterator[memoryview]:
        if placed.source is None:
            yield memoryview(bytes(placed.nbytes))
            return
        given = 0
        for flat in self._made(placed.source):
            given += len(flat)
            if given > placed.nbytes:
                break
            if len(flat):
                yield flat
        if given != placed.nbytes:
            raise ProducerFailed(
                reason="coverage",
                key=self._key,
                problem=f"tensor {placed.name!r} gave {given} bytes and declared {placed.nbytes}",
                remedy="This is a fault of the producer: report it with the layout plan.",
            )

    def _made(self, source: TensorSource) -> Iterator[memoryview]:
        """Run the producer; whatever it raises is its failure, not the store's."""
        blocks = source.blocks()
        while True:
            try:
                block = next(blocks, None)
                flat = None if block is None else block.cast("B") if block.format != "B" or block.ndim != 1 else block
            except HwrError:
                raise
            except Exception as error:  # (a foreign library's: of any kind)
                raise ProducerFailed(
                    reason=type(error).__name__,
                    key=self._key,
                    problem=f"tensor {source.name!r}: {type(error).__name__}: {one_line(str(error))}",
                    remedy="Nothing was published; the model that was loaded is not touched.",
                ) from error
            if flat is None:
                return
            yield flat


class _HashThread:
    """Hash blocks in order, one unit after another, beside the writer; at most two blocks wait."""

    def __init__(self) -> None:
        self.units: dict[str, list[str]] = {}
        self.bytes = 0
        self.busy_seconds = 0.0
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[str, memoryview] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="hwr-hash", daemon=True)
        self._thread.start()

    def put(self, name: str, block: memoryview) -> None:
        self._queue.put((name, block))

    def finish(self) -> dict[str, list[str]]:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.units

    def _run(self) -> None:
        name: str | None = None
        hasher, filled = blake3(), 0
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            begun = time.perf_counter()
            try:
                if item[0] != name:
                    if filled and name is not None:
                        self.units[name].append(hasher.hexdigest())
                    name, hasher, filled = item[0], blake3(), 0
                    self.units[name] = []
                rest = item[1]
                while len(rest):
                    part = rest[: digest.UNIT_BYTES - filled]
                    hasher.update(part)
                    filled += len(part)
                    rest = rest[len(part) :]
                    if filled == digest.UNIT_BYTES:
                        self.units[name].append(hasher.hexdigest())
                        hasher, filled = blake3(), 0
                self.bytes += len(item[1])
            except Exception as error:  # noqa: BLE001  (carried to the writer's thread, which raises it)
                self._error = error
            self.busy_seconds += time.perf_counter() - begun
        if filled and name is not None:
            self.units[name].append(hasher.hexdigest())


def _order(source: TensorSource) -> tuple[int, int, str]:
    """Sort so that most alignment comes by itself: whole cache lines, then what needs fillers, then single numbers by falling size."""
    nbytes = tensor_bytes(source)
    group = 0 if nbytes % ALIGNMENT == 0 else 1 if _alignment(source) == ALIGNMENT else 2
    return (group, -BYTE_DTYPE_BITS[source.dtype], source.name) if group == 2 else (group, 0, source.name)


def _alignment(source: TensorSource) -> int:
    return ALIGNMENT if math.prod(source.shape) > 1 else BYTE_DTYPE_BITS[source.dtype] // 8


def _plan_file(name: str, group: Sequence[tuple[TensorSource, int]]) -> FilePlan:
    placed: list[Placed] = []
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    at = 0
    for source, nbytes in group:
        gap = -at % _alignment(source) if nbytes else 0
        if gap:
            filler = f"{PAD_PREFIX}_{len(placed):06d}"
            header[filler] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            placed.append(Placed(filler, at, gap, None))
            at += gap
        header[source.name] = {"dtype": source.dtype, "shape": list(source.shape), "data_offsets": [at, at + nbytes]}
        placed.append(Placed(source.name, at, nbytes, source))
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % PAGE_BYTES)
    if len(text) > HEADER_LIMIT_BYTES:
        raise ProducerUnsupported(
            reason="header",
            what="this artifact",
            problem=f"{len(group)} tensors need a header of {len(text)} bytes",
            remedy="Publish fewer tensors.",
        )
    return FilePlan(name=name, header=len(text).to_bytes(LENGTH_BYTES, "little") + text, placed=tuple(placed), data_bytes=at)


def _entries(plan: FilePlan, units: dict[str, list[str]]) -> tuple[FileEntry, list[TensorEntry]]:
    start = len(plan.header)
    tensors = [
        TensorEntry(
            name=one.name,
            kind=one.source.kind,
            dtype=one.source.dtype,
            shape=tuple(one.source.shape),
            stride=contiguous_stride(tuple(one.source.shape)),
            file=plan.name,
            offset=start + one.offset,
            nbytes=one.nbytes,
            units=tuple(units.get(one.name, ())),
            digest=digest.of_units(units.get(one.name, ())),
        )
        for one in plan.placed
        if one.source is not None
    ]
    fillers = tuple(Filler(start + one.offset, one.nbytes, units[one.name][0]) for one in plan.placed if one.source is None)
    return FileEntry(plan.name, plan.size, start, digest.of_bytes(plan.header), fillers), tensors


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        problem = None
        if name == METADATA_KEY or name.startswith(PAD_PREFIX):
            problem = "the name is reserved"
        elif name in seen:
            problem = "the name is used twice"
        elif not _is_text(name):
            problem = "the name is not valid text"
        if problem:
            raise ProducerUnsupported(reason="name", what=f"tensor {name!r}", problem=problem, remedy="Rename it in the layout plan.")
        seen.add(name)


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate: JSON in UTF-8 has no place for it
        return False
    return True


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, size)


def _write_all(fd: int, block: memoryview, offset: int) -> None:
    while len(block):
        done = os.pwrite(fd, block, offset)
        block, offset = block[done:], offset + done


_SYNC_FILE_RANGE_WRITE: Final = 2  # sync_file_range(2): start writing dirty pages, do not wait


def _start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk work while we produce; a libc without the call just leaves it all to fsync."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
