"""/proc/vmstat."""

from __future__ import annotations

import mmap
from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.vmstat import VmStat, parse_vmstat, read_vmstat


def own() -> VmStat:
    found = read_vmstat()
    assert isinstance(found, VmStat), found
    return found


def test_every_counter_of_this_kernel_is_there():
    assert len(own().counters) == len(Path("/proc/vmstat").read_text().splitlines())


def test_faults_are_counted(until):
    before = own().pgfault
    assert before is not None
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as touched:
        for at in range(0, len(touched), mmap.PAGESIZE):
            touched[at] = 1
        until(lambda: (own().pgfault or 0) >= before + 64)


def test_locked_memory_shows_while_it_is_locked(start, until):
    before = own().mlocked
    assert before is not None
    code = "import ctypes, mmap\nm = mmap.mmap(-1, 4 << 20)\nctypes.CDLL(None).mlock(ctypes.byref(ctypes.c_char.from_buffer(m)), 4 << 20)"
    child = start(code)
    until(lambda: (own().mlocked or 0) >= before + (3 << 20))
    child.kill()


def test_pinned_is_what_was_not_released():
    found = parse_vmstat(b"nr_foll_pin_acquired 70\nnr_foll_pin_released 60\nnr_mlock 3\n", page_size=4096)
    assert isinstance(found, VmStat)
    assert (found.nr_foll_pin_acquired, found.nr_foll_pin_released, found.nr_mlock) == (70, 60, 3)
    assert (found.pinned, found.mlocked) == (10 * 4096, 3 * 4096)


def test_counters_read_one_after_the_other_never_go_below_zero():
    found = parse_vmstat(b"nr_foll_pin_acquired 70\nnr_foll_pin_released 71\n")
    assert isinstance(found, VmStat)
    assert found.pinned == 0


def test_old_kernel_knows_no_pins(tree):
    found = read_vmstat(tree("vmstat", b"pgfault 7\nnovelty 8\nbroken\nnegative -1\nhalf 9"))
    assert isinstance(found, VmStat)
    assert found.counters == {"pgfault": 7, "novelty": 8}
    assert (found.pgfault, found.pgmajfault, found.nr_mlock, found.pinned, found.mlocked) == (7, None, None, None, None)


def test_empty_or_missing_is_unavailable(tree, tmp_path):
    assert isinstance(read_vmstat(tree("vmstat", b"")), Unavailable)
    assert isinstance(read_vmstat(tmp_path / "nowhere"), Unavailable)
