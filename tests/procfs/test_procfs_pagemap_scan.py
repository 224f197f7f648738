"""PAGEMAP_SCAN against processes whose pages are known."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.maps import read_maps
from hwr.procfs.pagemap_scan import WINDOW_BYTES, Window, open_pagemap, scan
from hwr.procfs.smaps import file_use, read_smaps

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def own() -> Iterator[int]:
    """This process's pagemap, where the kernel can scan it."""
    descriptor = open_pagemap("self")
    assert isinstance(descriptor, int), descriptor
    with mmap.mmap(-1, PAGE) as memory:
        first = next(scan(descriptor, address(memory), address(memory) + PAGE))
    if isinstance(first, Unavailable):
        pytest.skip(first.reason)
    yield descriptor
    os.close(descriptor)


def windows(descriptor: int, start: int, size: int, **more: int) -> list[Window]:
    found = list(scan(descriptor, start, start + size, **more))
    assert all(isinstance(one, Window) for one in found), found
    return [one for one in found if isinstance(one, Window)]


def test_pages_that_were_written_are_counted_and_no_others(own):
    memory = mmap.mmap(-1, 1024 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in (0, 5, 6, 1023):
        memory[at * PAGE] = 1
    (one,) = windows(own, address(memory), len(memory))
    assert (one.anonymous, one.file) == (4 * PAGE, 0)


def test_memory_that_was_only_read_is_nobodys(own):
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    assert not any(memory[:])
    (one,) = windows(own, address(memory), len(memory))
    assert (one.anonymous, one.file) == (0, 0)


def test_copied_pages_of_a_private_mapping_agree_with_smaps(own, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(256 * PAGE))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    assert sum(memory[::PAGE]) >= 0
    for at in range(0, 256, 2):  # every other page: as many regions as pages
        memory[at * PAGE] = 1
    (one,) = windows(own, address(memory), len(memory))
    assert (one.anonymous, one.file) == (128 * PAGE, 128 * PAGE)
    found, vmas = FileId.in_tables(path), read_smaps(os.getpid())
    assert isinstance(found, FileId)
    assert isinstance(vmas, tuple)
    assert file_use(vmas, found).amounts.anonymous == one.anonymous


def test_more_regions_than_one_call_brings(own):
    memory = mmap.mmap(-1, 2048 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, 2048, 2):
        memory[at * PAGE] = 1
    (one,) = windows(own, address(memory), len(memory))
    assert one.anonymous == 1024 * PAGE


def test_windows_cover_the_range_once(own):
    memory = mmap.mmap(-1, 10 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[9 * PAGE] = 1
    begin = address(memory)
    found = windows(own, begin, 10 * PAGE, window=4 * PAGE)
    assert [(one.start - begin, one.end - begin) for one in found] == [(0, 4 * PAGE), (4 * PAGE, 8 * PAGE), (8 * PAGE, 10 * PAGE)]
    assert [one.anonymous for one in found] == [0, 0, PAGE]
    assert windows(own, begin, 0) == []
    assert WINDOW_BYTES % PAGE == 0


def test_another_process_is_scanned_by_the_addresses_of_its_maps(own, start, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 * MIB))
    code = "import mmap\nm = mmap.mmap(os.open(sys.argv[1], 0), 0, access=mmap.ACCESS_COPY)\nm[:1 << 20] = bytes(1 << 20)"
    pid = start(code, path).pid
    file = FileId.in_tables(path)
    assert isinstance(file, FileId)
    mappings = read_maps(pid, wanted={file})
    assert isinstance(mappings, tuple)
    descriptor = open_pagemap(pid)
    assert isinstance(descriptor, int)
    try:
        assert sum(one.anonymous for each in mappings for one in windows(descriptor, each.start, each.size)) == MIB
    finally:
        os.close(descriptor)


def test_process_that_ends_while_it_is_scanned_gives_a_reason(own, start):
    child = start("")
    descriptor = open_pagemap(child.pid)
    assert isinstance(descriptor, int)
    child.kill()
    child.wait()
    found = list(scan(descriptor, 0x10000, 0x10000 + 3 * PAGE, window=PAGE))
    os.close(descriptor)
    assert isinstance(found[-1], Unavailable) or all(isinstance(one, Window) and not one.anonymous for one in found)


def test_kernel_that_knows_no_such_call_is_named(tmp_path):
    path = tmp_path / "pagemap"
    path.write_bytes(b"")
    descriptor = os.open(path, os.O_RDONLY)  # any other file answers as an old kernel's pagemap does
    (found,) = scan(descriptor, 0, 2 * WINDOW_BYTES)
    os.close(descriptor)
    assert isinstance(found, Unavailable)
    assert "Linux 6.7" in found.reason


def test_another_users_process_names_the_capability(nobody, python_as):
    code = "import sys\nfrom hwr.procfs.pagemap_scan import open_pagemap\nprint(open_pagemap(int(sys.argv[1])).reason)"
    reason = python_as(nobody, code, os.getpid())
    assert "CAP_SYS_PTRACE" in reason


def test_process_that_ended_is_unavailable(tmp_path: Path):
    assert isinstance(open_pagemap(7, tmp_path), Unavailable)
