"""The page cache of a file, asked of the file.

Owns `cachestat(2)` and, where it is missing, `mincore(2)` over a shared mapping that cannot be accessed.
Promises a count with its source, and takes no lock of any process that maps the file. Refuses to guess: to a caller that neither
owns the file nor may write it, the kernel denies the first and answers the second with "all of it" (Linux >= 5.2).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import stat
from dataclasses import dataclass
from typing import Final

from hwr.errors import Unavailable, errno_text
from hwr.outcomes import MemorySource

# The same number on every architecture that has the generic table; Linux >= 6.5.
_SYS_CACHESTAT: Final = 451
# mincore looks at no protection, and what cannot be accessed is not read in for a process that has called mlockall(MCL_FUTURE).
_PROT_NONE: Final = 0
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
# mincore writes a byte a page: 1 GiB at a time keeps that at 256 KiB.
_WINDOW_BYTES: Final = 1 << 30
_RESIDENT_ODD: Final = bytes(byte & 1 for byte in range(256))  # only the lowest bit of each byte has a meaning


@dataclass(frozen=True, slots=True)
class PageCache:
    """Pages of a range of a file; None is what the source cannot tell.

    A page that is touched by the end of the file counts whole, so that bytes may exceed the file's length.
    """

    source: MemorySource
    page_size: int
    nr_cache: int
    nr_dirty: int | None = None
    nr_writeback: int | None = None
    nr_evicted: int | None = None
    nr_recently_evicted: int | None = None

    @property
    def cached_bytes(self) -> int:
        """Bytes in the page cache."""
        return self.nr_cache * self.page_size

    @property
    def dirty_bytes(self) -> int | None:
        """Bytes in the page cache that are not yet on disk."""
        return None if self.nr_dirty is None else self.nr_dirty * self.page_size

    @property
    def writeback_bytes(self) -> int | None:
        """Bytes that are on their way to disk."""
        return None if self.nr_writeback is None else self.nr_writeback * self.page_size

    @property
    def evicted_bytes(self) -> int | None:
        """Bytes that were in the page cache and were reclaimed."""
        return None if self.nr_evicted is None else self.nr_evicted * self.page_size


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("nr_cache", "nr_dirty", "nr_writeback", "nr_evicted", "nr_recently_evicted"))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


def page_cache(descriptor: int, offset: int = 0, length: int | None = None) -> PageCache | Unavailable:
    """Count the cached pages of a range of an open regular file, to its end by default; `cachestat`, else `mincore`.

    Raises:
        ValueError: a negative offset or length.
    """
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"page_cache: a range has no negative numbers: offset {offset}, length {length}")
    answer = page_cache_by_cachestat(descriptor, offset, length)
    if not isinstance(answer, Unavailable):
        return answer
    second = page_cache_by_mincore(descriptor, offset, length)
    return Unavailable(f"{answer.reason}; {second.reason}") if isinstance(second, Unavailable) else second


def page_cache_by_cachestat(descriptor: int, offset: int = 0, length: int | None = None) -> PageCache | Unavailable:
    """Ask `cachestat`, which also knows dirty and evicted pages."""
    size = _size(descriptor)
    if isinstance(size, Unavailable):
        return size
    begin, end = _clip(offset, length, size)
    counts = _CacheStat()
    if begin < end:  # to the kernel a length of 0 is "to the end"
        asked = _Range(begin, end - begin)
        libc = _libc()
        code = libc.syscall(
            ctypes.c_long(_SYS_CACHESTAT), ctypes.c_int(descriptor), ctypes.byref(asked), ctypes.byref(counts), ctypes.c_uint(0)
        )
        if code != 0:
            return _failed("cachestat")
    return PageCache(
        MemorySource.CACHESTAT,
        mmap.PAGESIZE,
        counts.nr_cache,
        counts.nr_dirty,
        counts.nr_writeback,
        counts.nr_evicted,
        counts.nr_recently_evicted,
    )


def page_cache_by_mincore(descriptor: int, offset: int = 0, length: int | None = None) -> PageCache | Unavailable:
    """Ask `mincore` about shared mappings that touch no page, 1 GiB at a time."""
    size = _size(descriptor)
    if isinstance(size, Unavailable):
        return size
    if not _is_answered_truthfully(descriptor):
        return Unavailable("mincore: answers only the file's owner and those who may write it")
    if not _tells_absence():
        return Unavailable("mincore: this kernel calls every page resident")
    begin, end = _clip(offset, length, size)
    resident = 0
    at = begin - begin % mmap.PAGESIZE
    while at < end:
        part = _resident_pages(descriptor, at, min(_WINDOW_BYTES, end - at))
        if isinstance(part, Unavailable):
            return part
        resident += part
        at += _WINDOW_BYTES
    return PageCache(MemorySource.MINCORE, mmap.PAGESIZE, resident)


def _size(descriptor: int) -> int | Unavailable:
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        return Unavailable(f"page cache: {errno_text(error)}")
    return status.st_size if stat.S_ISREG(status.st_mode) else Unavailable("page cache: not a regular file")


def _clip(offset: int, length: int | None, size: int) -> tuple[int, int]:
    return min(offset, size), size if length is None else min(offset + length, size)


def _is_answered_truthfully(descriptor: int) -> bool:
    # can_do_mincore() of mm/mincore.c. That root owns every file does not hold in a user namespace, writing asks the right one.
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            return True
        return os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True)
    except OSError:
        return False


def _tells_absence() -> bool:
    """Whether a page that was never touched is called absent; gVisor calls every page resident."""
    return _resident_pages(-1, 0, mmap.PAGESIZE) == 0


def _resident_pages(descriptor: int, offset: int, length: int) -> int | Unavailable:
    libc = _libc()
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, length, _PROT_NONE, flags, descriptor, offset)
    if address == _MAP_FAILED:
        return _failed("mmap")
    try:
        vector = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if libc.mincore(address, length, vector) != 0:
            return _failed("mincore")
    finally:
        libc.munmap(address, length)
    return vector.raw.translate(_RESIDENT_ODD).count(1)


def _failed(call: str) -> Unavailable:
    number = ctypes.get_errno()
    return Unavailable(f"{call}: {errno_text(OSError(number, os.strerror(number)))}")
