"""PAGEMAP_SCAN: which pages of a range of a process are there, and how many are no file pages any more.

Owns the ioctl on /proc/PID/pagemap (Linux >= 6.7, Documentation/admin-guide/mm/pagemap.rst). Promises exact counts a window at a time: the
target's mmap lock is held for one window of 64 MiB, about a millisecond. Refuses to pace: whoever scans a large mapping waits in between.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, unreadable

WINDOW_BYTES: Final = 64 << 20

# include/uapi/linux/fs.h
_PAGE_IS_FILE: Final = 1 << 2
_PAGE_IS_PRESENT: Final = 1 << 3
_PAGE_IS_PFNZERO: Final = 1 << 5
_REGIONS: Final = 256
_NO_SUCH_CALL: Final = frozenset({errno.ENOTTY, errno.EOPNOTSUPP})


class _Arguments(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    )


class _Region(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("start", "end", "categories"))


# _IOWR('f', 16, struct pm_scan_arg)
_PAGEMAP_SCAN: Final = (3 << 30) | (ctypes.sizeof(_Arguments) << 16) | (ord("f") << 8) | 16


@dataclass(frozen=True, slots=True)
class Window:
    """One range that was looked at: bytes of it that are present, as pages of a file or of shared memory, and as this process's own.

    The kernel's page of zeros, which stands for memory that was read and never written, is neither.
    """

    start: int
    end: int
    anonymous: int
    file: int


def open_pagemap(pid: Pid, proc_root: Path = PROC_ROOT) -> int | Unavailable:
    """Open a process's pagemap; the caller closes the descriptor."""
    path = proc_root / str(pid) / "pagemap"
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return unreadable(path, error, capability=CAP_SYS_PTRACE)


def scan(descriptor: int, start: int, end: int, *, window: int = WINDOW_BYTES) -> Iterator[Window | Unavailable]:
    """Yield the windows of a range, each as it was when it was asked for; an Unavailable is the last that comes."""
    regions = (_Region * _REGIONS)()
    at = start
    while at < end:
        limit = min(at + window, end)
        anonymous, file, begun = 0, 0, at
        while at < limit:
            arguments = _Arguments(
                size=ctypes.sizeof(_Arguments),
                start=at,
                end=limit,
                vec=ctypes.addressof(regions),
                vec_len=_REGIONS,
                category_mask=_PAGE_IS_PRESENT,
                return_mask=_PAGE_IS_FILE | _PAGE_IS_PFNZERO,
            )
            try:
                found = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, arguments)
            except OSError as error:
                why = unreadable(Path("pagemap"), error).reason
                yield Unavailable(f"{why}: PAGEMAP_SCAN needs Linux 6.7") if error.errno in _NO_SUCH_CALL else Unavailable(why)
                return
            for region in regions[:found]:
                if region.categories & _PAGE_IS_FILE:
                    file += region.end - region.start
                elif not region.categories & _PAGE_IS_PFNZERO:
                    anonymous += region.end - region.start
            at = arguments.walk_end if arguments.walk_end > at else limit
        yield Window(begun, limit, anonymous, file)
