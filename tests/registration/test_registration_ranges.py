"""Ranges, chunks and copies: whole pages of each file once, and nothing across a seam."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwr.errors import WritableRegion
from hwr.registration.preflight import COMPACTION_BYTES, KERNEL_PIN_BYTES, SEGMENTS, known_limits
from hwr.registration.ranges import CHUNK_BYTES, Chunk, Plan, Range, Region, plan, split_copy
from hwr.units import GIB, MIB

PAGE: Final = 4096
QUIET = settings(deadline=None, database=None)


def region(name: str, address: int, nbytes: int, *, inode: int = 7, device: int = 1, writable: bool = False) -> Region:
    return Region(name, device, inode, address, nbytes, writable)


def planned(*regions: Region, chunk_bytes: int = 2 * PAGE) -> Plan:
    return plan(regions, page_bytes=PAGE, chunk_bytes=chunk_bytes)


def pages(address: int, nbytes: int) -> set[int]:
    return set(range(address // PAGE, -(-(address + nbytes) // PAGE))) if nbytes else set()


@st.composite
def layouts(draw: st.DrawFn) -> list[Region]:
    """Several files, each mapped at one or two places that no other file shares, regions anywhere within."""
    found: list[Region] = []
    base = PAGE * draw(st.integers(0, 3))
    for inode in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            mapped = PAGE * draw(st.integers(1, 12))
            for _ in range(draw(st.integers(0, 4))):
                begin = draw(st.integers(0, mapped))
                name = f"model-{draw(st.integers(0, 1))}{inode}.safetensors"
                found.append(region(name, base + begin, draw(st.integers(0, mapped - begin)), inode=inode, device=inode % 2))
            base += mapped + PAGE * draw(st.integers(0, 2))  # 0: the next file's address touches
    return draw(st.permutations(found))


CHUNKS = st.integers(1, 9).map(lambda count: count * PAGE)


@QUIET
@given(regions=layouts(), chunk_bytes=CHUNKS)
def test_chunks_cover_the_pages_of_the_regions_once(regions: list[Region], chunk_bytes: int):
    result = planned(*regions, chunk_bytes=chunk_bytes)
    covered = [page for chunk in result.chunks for page in pages(chunk.address, chunk.nbytes)]
    assert len(covered) == len(set(covered))
    assert set(covered) == set().union(*(pages(r.address, r.nbytes) for r in regions))
    assert sum(chunk.nbytes for chunk in result.chunks) == result.nbytes == PAGE * len(covered)


@QUIET
@given(regions=layouts(), chunk_bytes=CHUNKS)
def test_no_range_holds_a_page_of_another_file(regions: list[Region], chunk_bytes: int):
    result = planned(*regions, chunk_bytes=chunk_bytes)
    owner = {page: (r.device, r.inode) for r in regions for page in pages(r.address, r.nbytes)}
    for source in result.ranges:
        assert {owner[page] for page in pages(source.begin, source.nbytes)} == {(source.device, source.inode)}
    for one in result.ranges:
        for other in result.ranges:
            assert one is other or (one.device, one.inode) != (other.device, other.inode) or one.end < other.begin or other.end < one.begin


@QUIET
@given(regions=layouts(), chunk_bytes=CHUNKS)
def test_chunks_end_on_pages_and_are_full_but_the_last(regions: list[Region], chunk_bytes: int):
    result = planned(*regions, chunk_bytes=chunk_bytes)
    for chunk in result.chunks:
        assert chunk.address % PAGE == chunk.end % PAGE == 0
        assert chunk.nbytes == chunk_bytes or chunk.end == result.ranges[chunk.range_number - 1].end


@QUIET
@given(regions=layouts(), chunk_bytes=CHUNKS)
def test_numbers_count_from_one_in_the_order_of_the_calls(regions: list[Region], chunk_bytes: int):
    result = planned(*regions, chunk_bytes=chunk_bytes)
    expected = [
        (i, k, -(-source.nbytes // chunk_bytes), source.file, source.begin + (k - 1) * chunk_bytes)
        for i, source in enumerate(result.ranges, start=1)
        for k in range(1, -(-source.nbytes // chunk_bytes) + 1)
    ]
    assert [(c.range_number, c.chunk_number, c.chunks_of_range, c.file, c.address) for c in result.chunks] == expected
    assert list(result.files) == sorted(set(result.files))


@QUIET
@given(regions=layouts(), chunk_bytes=CHUNKS, data=st.data())
def test_order_of_regions_changes_nothing(regions: list[Region], chunk_bytes: int, data: st.DataObject):
    assert planned(*data.draw(st.permutations(regions)), chunk_bytes=chunk_bytes) == planned(*regions, chunk_bytes=chunk_bytes)


@QUIET
@given(sizes=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=12), start=st.integers(0, PAGE), chunk_bytes=CHUNKS, data=st.data())
def test_copies_of_any_tensors_are_split_at_chunk_seams(sizes: list[int], start: int, chunk_bytes: int, data: st.DataObject):
    """Tensors lie one after the other in a file, unaligned; each copy covers its bytes in order, each part in one chunk."""
    base = PAGE * data.draw(st.integers(0, 9))
    result = planned(region("m", base, start + sum(sizes)), chunk_bytes=chunk_bytes)
    at = base + start
    for nbytes in sizes:
        parts = split_copy(result, at, nbytes)
        assert all(size > 0 for _, size in parts)
        assert [address for address, _ in parts] == [at + sum(size for _, size in parts[:n]) for n in range(len(parts))]
        assert sum(size for _, size in parts) == nbytes
        for address, size in parts:
            assert sum(chunk.address <= address and address + size <= chunk.end for chunk in result.chunks) == 1
        assert len(parts) <= nbytes // chunk_bytes + 2  # no more parts than seams ask for
        at += nbytes


@QUIET
@given(regions=layouts(), chunk_bytes=CHUNKS, address=st.integers(0, 40 * PAGE), nbytes=st.integers(1, 9 * PAGE))
def test_copy_from_outside_is_refused(regions: list[Region], chunk_bytes: int, address: int, nbytes: int):
    result = planned(*regions, chunk_bytes=chunk_bytes)
    inside = pages(address, nbytes) <= set().union(*(pages(r.address, r.nbytes) for r in regions))
    if inside:
        assert sum(size for _, size in split_copy(result, address, nbytes)) == nbytes
    else:
        with pytest.raises(ValueError, match="not in a registered range"):
            split_copy(result, address, nbytes)


def test_copy_within_a_chunk_is_one_part():
    assert split_copy(planned(region("m", 0, 9 * PAGE)), PAGE + 5, 100) == [(PAGE + 5, 100)]


def test_copy_across_two_seams():
    result = planned(region("m", 0, 9 * PAGE))
    assert split_copy(result, PAGE, 4 * PAGE) == [(PAGE, PAGE), (2 * PAGE, 2 * PAGE), (4 * PAGE, PAGE)]


def test_empty_copy_has_no_part_and_a_negative_one_is_refused():
    assert split_copy(planned(region("m", 0, PAGE)), 0, 0) == []
    with pytest.raises(ValueError, match="-1"):
        split_copy(planned(region("m", 0, PAGE)), 0, -1)


def test_files_that_touch_stay_apart():
    result = planned(region("a", 0, PAGE, inode=1), region("b", PAGE, PAGE, inode=2), region("c", 2 * PAGE, PAGE, inode=2, device=9))
    assert [(r.file, r.begin, r.end) for r in result.ranges] == [("a", 0, PAGE), ("b", PAGE, 2 * PAGE), ("c", 2 * PAGE, 3 * PAGE)]


def test_regions_of_a_file_merge_where_they_share_or_touch_a_page():
    result = planned(region("m", 10, 20), region("m", 5000, 10), region("m", 9000, 10), region("m", 4 * PAGE, 1))
    assert [(r.begin, r.end) for r in result.ranges] == [(0, 3 * PAGE), (4 * PAGE, 5 * PAGE)]


def test_region_within_another_adds_nothing():
    assert planned(region("m", 0, 4 * PAGE), region("m", PAGE, 10)) == planned(region("m", 0, 4 * PAGE))


def test_copies_are_found_where_names_and_addresses_disagree():
    result = planned(*(region(name, at * PAGE, PAGE, inode=at) for at, name in enumerate("dbca")), chunk_bytes=PAGE)
    assert [source.file for source in result.ranges] == list("abcd")
    for at in range(4):
        assert split_copy(result, at * PAGE + 7, 9) == [(at * PAGE + 7, 9)]


def test_file_mapped_twice_has_two_ranges():
    result = planned(region("m", 0, 2 * PAGE), region("m", 9 * PAGE, 2 * PAGE))
    assert len(result.ranges) == 2
    assert result.files == ("m",)
    assert result.nbytes == 4 * PAGE


def test_file_of_several_names_has_the_first():
    assert planned(region("z", 0, 1), region("a", 0, 1)).files == ("a",)


def test_no_regions_and_empty_regions_are_no_calls():
    assert planned() == planned(region("m", 5, 0)) == Plan((), ())
    assert planned().nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 1])
def test_R14_writable_region_is_refused(nbytes: int):
    with pytest.raises(WritableRegion, match=r"w\.safetensors") as caught:
        planned(region("m", 0, PAGE), region("w.safetensors", 8 * PAGE, nbytes, inode=8, writable=True))
    assert caught.value.reason == "writable"


def test_two_files_on_one_page_are_a_contradiction():
    with pytest.raises(ValueError, match="both said to be mapped"):
        planned(region("a", 0, 10, inode=1), region("b", 20, 10, inode=2))


@pytest.mark.parametrize(
    ("page_bytes", "chunk_bytes"), [(0, PAGE), (-PAGE, PAGE), (3000, 6000), (PAGE, PAGE + 1), (PAGE, 0), (PAGE, -PAGE)]
)
def test_sizes_that_are_none_are_refused(page_bytes: int, chunk_bytes: int):
    with pytest.raises(ValueError, match="bytes"):
        plan([], page_bytes=page_bytes, chunk_bytes=chunk_bytes)


def test_last_page_of_a_file_that_ends_inside_it_can_be_locked(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * (3 * mmap.PAGESIZE + 5))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mlock.restype = ctypes.c_long
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mlock.argtypes = libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = path.stat().st_size
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        facts = os.fstat(file.fileno())
    try:
        result = plan([Region(path.name, facts.st_dev, facts.st_ino, address, size, False)], page_bytes=mmap.PAGESIZE)
        assert result.nbytes == 4 * mmap.PAGESIZE
        assert [libc.mlock(chunk.address, chunk.nbytes) for chunk in result.chunks] == [0]
    finally:
        libc.munmap(address, size)


ONE = Range("m", 1, 7, 0, 4 * PAGE)


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (Chunk(1, 1, 1, "m", 0, 3 * PAGE),),
        (Chunk(1, 1, 1, "m", 0, 5 * PAGE),),
        (Chunk(1, 1, 1, "m", PAGE, 3 * PAGE),),
        (Chunk(1, 1, 1, "n", 0, 4 * PAGE),),
        (Chunk(2, 1, 1, "m", 0, 4 * PAGE),),
        (Chunk(1, 1, 2, "m", 0, 4 * PAGE),),
        (Chunk(1, 2, 2, "m", 0, PAGE), Chunk(1, 1, 2, "m", PAGE, 3 * PAGE)),
        (Chunk(1, 1, 1, "m", 0, 4 * PAGE), Chunk(2, 1, 1, "m", 4 * PAGE, PAGE)),
    ],
    ids=["none", "short", "long", "late", "another file", "another range", "another count", "disorder", "one more"],
)
def test_plan_that_contradicts_itself_cannot_be_made(chunks: tuple[Chunk, ...]):
    with pytest.raises(ValueError, match="chunk"):
        Plan((ONE,), chunks)


def test_values_that_are_none_cannot_be_made():
    for make in (
        lambda: region("m", -1, 1),
        lambda: region("m", 0, -1),
        lambda: Range("m", 1, 7, PAGE, PAGE),
        lambda: Chunk(1, 1, 1, "m", 0, 0),
        lambda: Chunk(0, 1, 1, "m", 0, PAGE),
        lambda: Chunk(1, 2, 1, "m", 0, PAGE),
    ):
        with pytest.raises(ValueError, match="m"):
            make()


class TestKnownLimits:
    @staticmethod
    def told(nbytes: int, chunk_bytes: int, release: str = "6.12.4-generic", driver: str | None = "595.58.03") -> str:
        return "\n".join(known_limits(plan([region("m", 0, nbytes)], page_bytes=PAGE, chunk_bytes=chunk_bytes), release, driver))

    def test_default_chunks_meet_none(self):
        assert self.told(2000 * GIB, CHUNK_BYTES) == ""
        assert self.told(2000 * GIB, CHUNK_BYTES, driver=None, release="?") == ""
        assert self.told(0, CHUNK_BYTES) == ""

    def test_compaction_begins_at_512_MB(self):
        assert self.told(COMPACTION_BYTES, 488 * MIB) == "" != self.told(COMPACTION_BYTES, 489 * MIB)
        assert "every GPU process" in self.told(GIB, 512 * MIB)

    def test_more_than_2_GiB_fails_on_three_kernels(self):
        size = KERNEL_PIN_BYTES + PAGE
        assert "Linux 6.11 to 6.13 fail" in self.told(size, size, release="6.13.0")
        assert "Linux" not in self.told(size, KERNEL_PIN_BYTES, release="6.13.0")
        for release in ("6.10.9", "6.14.0-rc1", "5.12.1", "7.12.0"):
            assert "Linux" not in self.told(size, size, release=release)
        assert "this kernel is not known" in self.told(size, size, release="linux")

    def test_more_than_64_GiB_a_call_is_unproven(self):
        assert "64.0 GiB a call" in self.told(65 * GIB, 65 * GIB)
        assert "64.0 GiB a call" not in self.told(65 * GIB, 64 * GIB)

    def test_512_GiB_in_one_call_fails_on_newer_drivers(self):
        assert "driver 595.58.03 refuses 512 GiB" in self.told(512 * GIB, 512 * GIB)
        assert "refuse" not in self.told(512 * GIB - PAGE, 512 * GIB)
        assert "refuse" not in self.told(512 * GIB, 512 * GIB, driver="575.57.08")
        assert "this driver is not known" in self.told(512 * GIB, 512 * GIB, driver=None)

    def test_too_many_calls(self):
        assert self.told(SEGMENTS * PAGE, PAGE) == ""
        assert "use larger chunks" in self.told((SEGMENTS + 1) * PAGE, PAGE)
