"""The page cache of a file, asked of the file."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.outcomes import MemorySource
from hwr.procfs.mountinfo import Mount, mount_of, read_mountinfo
from hwr.procfs.pagecache import PageCache, page_cache, page_cache_by_cachestat, page_cache_by_mincore

PAGE = mmap.PAGESIZE
PAGES = 256
# A seccomp filter that answers cachestat with ENOSYS, as a kernel before 6.5 does.
WITHOUT_CACHESTAT = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
program = b"".join(struct.pack("HBBI", *step) for step in
    [(0x20, 0, 0, 0), (0x15, 0, 1, 451), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)])
code = ctypes.create_string_buffer(program)
header = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(header)) == 0, ctypes.get_errno()
from hwr.procfs.pagecache import page_cache, page_cache_by_cachestat
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file of 256 pages on a disk, clean and out of the cache."""
    mount = mount_of(tmp_path.resolve(), read_mountinfo() or ())
    if not isinstance(mount, Mount) or mount.fstype in ("tmpfs", "ramfs"):
        pytest.skip("the temporary directory is memory: nothing there can leave the page cache")
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(PAGES * PAGE))
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead: what is read is what is cached
    yield descriptor
    os.close(descriptor)


BOTH = pytest.mark.parametrize("ask", [page_cache_by_cachestat, page_cache_by_mincore])


def cached(ask, descriptor: int, *span: int) -> int:
    found = ask(descriptor, *span)
    if isinstance(found, Unavailable) and "ENOSYS" in found.reason:
        pytest.skip("this kernel has no cachestat")
    assert isinstance(found, PageCache), found
    assert found.cached_bytes == found.nr_cache * PAGE
    return found.nr_cache


@BOTH
def test_what_was_dropped_is_not_cached(ask, file):
    assert cached(ask, file) == 0


@BOTH
def test_what_was_read_is_cached(ask, file):
    os.pread(file, 8 * PAGE, 16 * PAGE)
    assert cached(ask, file) == 8
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached(ask, file) == 0


@BOTH
def test_asking_reads_nothing_in(ask, file):
    assert [cached(ask, file) for _ in range(3)] == [0, 0, 0]


@BOTH
def test_range_counts_pages_that_it_touches(ask, file):
    os.pread(file, 8 * PAGE, 16 * PAGE)
    assert cached(ask, file, 16 * PAGE, 4 * PAGE) == 4
    assert cached(ask, file, 0, 16 * PAGE) == 0
    assert cached(ask, file, 23 * PAGE, 100 * PAGE) == 1
    assert cached(ask, file, 16 * PAGE + 5, 1) == 1
    assert cached(ask, file, 17 * PAGE - 1, 2) == 2
    assert cached(ask, file, 20 * PAGE) == 4
    assert cached(ask, file, 16 * PAGE, 0) == 0
    assert cached(ask, file, PAGES * PAGE, 10) == 0
    assert cached(ask, file, 1 << 40) == 0


@BOTH
def test_empty_file_has_no_pages(ask, tmp_path):
    with (tmp_path / "empty").open("wb+") as empty:
        assert cached(ask, empty.fileno()) == 0


@BOTH
def test_last_page_counts_whole(ask, tmp_path):
    with (tmp_path / "odd").open("wb+", buffering=0) as odd:
        odd.write(b"x" * (PAGE + 1))
        assert cached(ask, odd.fileno()) == 2


@BOTH
def test_shared_memory_counts(ask):
    descriptor = os.memfd_create("weights")
    try:
        os.ftruncate(descriptor, 64 * PAGE)
        os.pwrite(descriptor, b"x" * 4 * PAGE, 8 * PAGE)
        assert cached(ask, descriptor) == 4
    finally:
        os.close(descriptor)


@BOTH
def test_only_regular_files_have_one(ask, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert isinstance(ask(descriptor), Unavailable)
    os.close(descriptor)
    assert isinstance(ask(descriptor), Unavailable)


def test_more_than_one_window_of_mincore(tmp_path):
    with (tmp_path / "sparse").open("wb+", buffering=0) as sparse:
        sparse.truncate((2 << 30) + 3 * PAGE)
        for at in (0, (1 << 30) - PAGE, 1 << 30, 2 << 30):
            os.pwrite(sparse.fileno(), b"x", at)
        assert cached(page_cache_by_mincore, sparse.fileno()) == 4
        assert cached(page_cache_by_mincore, sparse.fileno(), (1 << 30) - PAGE, 2 * PAGE) == 2


def test_cachestat_knows_what_is_dirty(file):
    os.pwrite(file, b"x" * 4 * PAGE, 0)
    found = page_cache_by_cachestat(file)
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)
    # The kernel may begin to write it back at any time, but not before it is written.
    assert 0 <= (found.nr_dirty or 0) + (found.nr_writeback or 0) <= 4
    os.fsync(file)
    found = page_cache_by_cachestat(file)
    assert isinstance(found, PageCache)
    assert (found.dirty_bytes, found.writeback_bytes, found.nr_cache) == (0, 0, 4)
    assert found.evicted_bytes is not None


def test_mincore_knows_nothing_of_dirt(file):
    found = page_cache_by_mincore(file)
    assert found == PageCache(MemorySource.MINCORE, PAGE, 0)
    assert isinstance(found, PageCache)
    assert (found.dirty_bytes, found.writeback_bytes, found.evicted_bytes) == (None, None, None)


def test_kernel_without_cachestat_falls_back_to_mincore(python_as, file):
    os.pread(file, 8 * PAGE, 0)
    code = WITHOUT_CACHESTAT + "print(page_cache_by_cachestat(0).reason)\nprint(page_cache(0).source, page_cache(0).nr_cache)"
    assert python_as([], code, stdin=file) == "cachestat: ENOSYS (Function not implemented)\nmincore 8\n"


def test_caller_who_may_not_write_gets_no_false_answer(nobody, python_as, tmp_path, file):
    """Without the right, mincore of the kernel calls all 256 pages resident."""
    code = """
import ctypes, mmap
from hwr.procfs.pagecache import page_cache
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
vector = ctypes.create_string_buffer(256)
libc.mincore(libc.mmap(None, 256 * mmap.PAGESIZE, 1, 1, 0, 0), 256 * mmap.PAGESIZE, vector)
print(sum(vector.raw))
print(page_cache(0).reason)
"""
    readable = os.open(tmp_path / "weights.bin", os.O_RDONLY)
    try:
        lie, reason = python_as(nobody, code, stdin=readable).splitlines()
    finally:
        os.close(readable)
    assert lie == "256"
    assert "mincore: answers only the file's owner" in reason


def test_owner_without_privileges_is_answered(nobody, python_as, tmp_path, file):
    os.fchown(file, 65534, 65534)
    os.fchmod(file, 0o400)
    os.pread(file, 8 * PAGE, 0)
    readable = os.open(tmp_path / "weights.bin", os.O_RDONLY)
    code = "from hwr.procfs.pagecache import *\nprint(page_cache(0).nr_cache, page_cache_by_mincore(0).nr_cache)"
    try:
        assert python_as(nobody, code, stdin=readable) == "8 8\n"
    finally:
        os.close(readable)


@pytest.mark.parametrize("span", [(-1,), (0, -1)])
def test_negative_range_is_the_callers_mistake(span):
    with pytest.raises(ValueError, match="negative"):
        page_cache(0, *span)


def test_import_loads_no_library():
    code = "import ctypes\nctypes.CDLL = None\nimport hwr.procfs.pagecache"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
