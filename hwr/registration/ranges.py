"""From mapped payload files to the driver calls that register them.

Owns page alignment, merging per backing file, chunks, and the splitting of copies at chunk seams; all of it arithmetic.
Promises that the chunks cover every page of every region once, and that no call and no copy part crosses a seam.
Refuses writable regions (R14), regions of two files on one page, and I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from hwr.errors import WritableRegion
from hwr.units import MIB

# One driver call pins this much: below the lowest limit known. From 512 MB in one call the driver may compact memory under
# the lock that every GPU process of the node needs (NVIDIA/open-gpu-kernel-modules#1383), Linux 6.11 to 6.13 refuses more
# than 2 GiB, and drivers since 580 refuse 512 GiB (#1234 there); 65,536 calls, the most a process has room for, are 16 TiB.
# It is also the step between two looks at the deadline: 0.03 s at the best pin rate reported from the field, 0.3 s at the worst.
CHUNK_BYTES: Final = 256 * MIB


@dataclass(frozen=True, slots=True)
class Region:
    """One payload file, or a part of it, as this process has it mapped; `name` is the payload file's."""

    name: str
    device: int
    inode: int
    address: int
    nbytes: int
    writable: bool

    def __post_init__(self) -> None:
        if self.address < 0 or self.nbytes < 0:
            raise ValueError(f"{self.name}: no region begins at {self.address} and has {self.nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Range:
    """Whole pages of one file without a gap, `end` excluded."""

    file: str
    device: int
    inode: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ValueError(f"{self.file}: no range begins at {self.begin} and ends at {self.end}")

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one driver call registers: chunk `chunk_number` of `chunks_of_range` in range `range_number`, all from 1."""

    range_number: int
    chunk_number: int
    chunks_of_range: int
    file: str
    address: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or self.address < 0:
            raise ValueError(f"{self.file}: no chunk begins at {self.address} and has {self.nbytes} bytes")
        if self.range_number < 1 or not 1 <= self.chunk_number <= self.chunks_of_range:
            raise ValueError(f"{self.file}: no chunk {self.chunk_number} of {self.chunks_of_range} in range {self.range_number}")

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranges by file name and address, and the chunks that tile them, in the order of the driver calls.

    Range i of n is `ranges[i - 1]` of `len(ranges)`; a chunk's overall number is its place in `chunks`, from 1.
    """

    ranges: tuple[Range, ...]
    chunks: tuple[Chunk, ...]
    _by_address: tuple[Chunk, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        left = iter(self.chunks)
        for number, source in enumerate(self.ranges, start=1):
            at, count, chunk = source.begin, 0, None
            while at < source.end:
                chunk, count = next(left, None), count + 1
                if chunk is None or chunk.address != at or chunk.file != source.file:
                    raise ValueError(f"range {number} has no chunk at {at:#x}")
                if (chunk.range_number, chunk.chunk_number) != (number, count):
                    raise ValueError(f"chunk {chunk.chunk_number} of range {chunk.range_number} is chunk {count} of range {number}")
                at = chunk.end
            if chunk is None or at != source.end or chunk.chunks_of_range != count:
                raise ValueError(f"the chunks of range {number} do not end with it")
        if next(left, None) is not None:
            raise ValueError("a chunk belongs to no range")
        object.__setattr__(self, "_by_address", tuple(sorted(self.chunks, key=_address)))

    @property
    def nbytes(self) -> int:
        """Bytes that the driver is asked for: whole pages, each once."""
        return sum(source.nbytes for source in self.ranges)

    @property
    def files(self) -> tuple[str, ...]:
        """The payload files in name order, each once."""
        return tuple(dict.fromkeys(source.file for source in self.ranges))


def plan(regions: Iterable[Region], *, page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Plan:
    """Plan the driver calls for these regions; their order does not matter.

    A region's last page counts whole, also where the file ends inside it: a mapping has whole pages. A file that is mapped
    twice has two ranges, and is pinned twice by the driver's count.

    Raises:
        WritableRegion: a region can be written, whatever its size.
        ValueError: a page or chunk size that is none, or regions of two files that share a page.
    """
    if page_bytes < 1 or page_bytes & (page_bytes - 1):
        raise ValueError(f"a page has a power of two of bytes, not {page_bytes}")
    if chunk_bytes < page_bytes or chunk_bytes % page_bytes:
        raise ValueError(f"a chunk has a multiple of {page_bytes} bytes, not {chunk_bytes}")
    read_only = list(regions)
    for region in read_only:
        if region.writable:
            raise WritableRegion(reason="writable", file=region.name)
    ranges = _merge(read_only, page_bytes)
    return Plan(ranges, tuple(chunk for number, source in enumerate(ranges, start=1) for chunk in _chunks(number, source, chunk_bytes)))


def split_copy(plan: Plan, address: int, nbytes: int) -> list[tuple[int, int]]:
    """Split a copy into (address, bytes) parts, in order, each within one chunk: each lies in memory of one driver call.

    Raises:
        ValueError: some byte is outside every range, so that this would be no copy from registered memory.
    """
    if nbytes < 0:
        raise ValueError(f"no copy has {nbytes} bytes")
    parts: list[tuple[int, int]] = []
    at, end = address, address + nbytes
    place = bisect_right(plan._by_address, at, key=_address) - 1
    while at < end:
        chunk = plan._by_address[place] if 0 <= place < len(plan._by_address) else None
        if chunk is None or not chunk.address <= at < chunk.end:
            raise ValueError(f"{at:#x}: not in a registered range ({end - at} of {nbytes} bytes left)")
        parts.append((at, min(end, chunk.end) - at))
        at, place = chunk.end, place + 1
    return parts


def _merge(regions: Sequence[Region], page_bytes: int) -> tuple[Range, ...]:
    names: dict[tuple[int, int], str] = {}  # a file that goes by several names has the first of them
    for region in regions:
        file = (region.device, region.inode)
        names[file] = min(names.get(file, region.name), region.name)
    spans = sorted(
        (region.device, region.inode, region.address & -page_bytes, (region.address + region.nbytes + page_bytes - 1) & -page_bytes)
        for region in regions
        if region.nbytes
    )
    ranges: list[Range] = []
    for device, inode, begin, end in spans:
        last = ranges[-1] if ranges else None
        if last is not None and (last.device, last.inode) == (device, inode) and begin <= last.end:
            ranges[-1] = Range(last.file, device, inode, last.begin, max(last.end, end))
        else:
            ranges.append(Range(names[device, inode], device, inode, begin, end))
    for low, high in pairwise(sorted(ranges, key=lambda source: source.begin)):
        if high.begin < low.end:
            raise ValueError(f"{low.file} and {high.file} are both said to be mapped at {high.begin:#x}")
    return tuple(sorted(ranges, key=lambda source: (source.file, source.device, source.inode, source.begin)))


def _chunks(number: int, source: Range, chunk_bytes: int) -> Iterable[Chunk]:
    starts = range(source.begin, source.end, chunk_bytes)
    for chunk_number, address in enumerate(starts, start=1):
        yield Chunk(number, chunk_number, len(starts), source.file, address, min(chunk_bytes, source.end - address))


def _address(chunk: Chunk) -> int:
    return chunk.address
