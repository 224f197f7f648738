"""/proc/meminfo, read from this kernel and from texts of others."""

from __future__ import annotations

from hwr.errors import Unavailable
from hwr.procfs.meminfo import MemInfo, parse_meminfo, read_meminfo


def own() -> MemInfo:
    found = read_meminfo()
    assert isinstance(found, MemInfo), found
    return found


def test_amounts_of_this_machine_are_bytes():
    memory = own()
    assert memory.total > 256 << 20
    assert memory.total % 1024 == 0
    assert memory.free is not None
    assert memory.available is not None
    assert 0 < memory.free < memory.total
    assert 0 < memory.available < memory.total


def test_locked_memory_of_a_process_is_the_machines(start, until):
    before = own().mlocked
    assert before is not None
    code = "import ctypes, mmap\nm = mmap.mmap(-1, 4 << 20)\nctypes.CDLL(None).mlock(ctypes.byref(ctypes.c_char.from_buffer(m)), 4 << 20)"
    child = start(code)
    until(lambda: (own().mlocked or 0) >= before + (3 << 20))
    assert (own().unevictable or 0) >= 3 << 20
    child.kill()


def test_kernel_without_an_estimate_has_none_and_not_zero():
    old = parse_meminfo(b"MemTotal:        8000 kB\nMemFree:         1000 kB\nCached:  3 kB\nSwapCached:  9 kB\n")
    assert old == MemInfo(total=8000 * 1024, free=1000 * 1024, available=None, cached=3 * 1024)


def test_zero_is_zero():
    assert parse_meminfo(b"MemTotal: 8 kB\nMemAvailable: 0 kB\n") == MemInfo(total=8192, available=0)


def test_text_without_a_total_says_nothing():
    assert isinstance(parse_meminfo(b"MemFree: 1000 kB\n"), Unavailable)
    assert isinstance(parse_meminfo(b"MemTotal: 1000"), Unavailable)
    assert isinstance(parse_meminfo(b"MemTotal: 1000 MB\n"), Unavailable)


def test_unreadable_is_unavailable(tmp_path):
    found = read_meminfo(tmp_path)
    assert isinstance(found, Unavailable)
    assert "ENOENT" in found.reason
