"""/proc/PID/smaps and smaps_rollup: what mappings cost, and whose they are."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.smaps import FileUse, Vma, file_use, parse_smaps, read_smaps
from hwr.procfs.smaps_rollup import Amounts, SmapsRollup, parse_smaps_rollup, read_smaps_rollup
from hwr.procfs.stat import read_stat

MIB = 1 << 20
SHARE = """
import mmap
file = open(sys.argv[1], 'rb')
shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
shared[::mmap.PAGESIZE]
"""
VMA = b"7f0000000000-7f0000002000 r--s 00001000 fe:00 77    /a b\nSize: 8 kB\nRss:  8 kB\nPss:  4 kB\nAnonymous:  0 kB\nVmFlags: rd sh\n"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(4 * MIB))
    return path


def smaps(pid: int) -> tuple[Vma, ...]:
    found = read_smaps(pid)
    assert isinstance(found, tuple), found
    return found


def named(path: Path) -> FileId:
    found = FileId.in_tables(path)
    assert isinstance(found, FileId), found
    return found


def use(pid: int, path: Path) -> FileUse:
    return file_use(smaps(pid), named(path))


def rollup(pid: int) -> SmapsRollup:
    found = read_smaps_rollup(pid)
    assert isinstance(found, SmapsRollup), found
    return found


def test_shared_mapping_is_found_by_device_and_inode(start, weights):
    found = use(start(SHARE, weights).pid, weights)
    assert (found.mappings, found.size) == (1, 4 * MIB)
    assert (found.amounts.rss, found.amounts.pss, found.amounts.anonymous, found.amounts.locked) == (4 * MIB, 4 * MIB, 0, 0)


def test_file_that_is_not_mapped_costs_a_true_zero(start, weights):
    assert use(start("").pid, weights) == FileUse(0, 0, Amounts(*[0] * 17))


def test_two_processes_share_what_one_pays_for_alone(start, until, weights):
    first, second = start(SHARE, weights), start(SHARE, weights)
    assert use(first.pid, weights).amounts.rss == use(second.pid, weights).amounts.rss == 4 * MIB
    assert use(first.pid, weights).amounts.pss == use(second.pid, weights).amounts.pss == 2 * MIB
    second.kill()
    second.wait()
    until(lambda: use(first.pid, weights).amounts.pss == 4 * MIB)


def test_copied_page_of_a_private_mapping_shows_as_anonymous(start, weights):
    code = SHARE + "private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)\nprivate[0] = 1"
    found = use(start(code, weights).pid, weights)
    assert (found.mappings, found.size, found.amounts.anonymous) == (2, 8 * MIB, mmap.PAGESIZE)


def test_deleted_file_with_an_odd_name_is_still_attributed(start, tmp_path):
    odd = tmp_path / "we ird\n(deleted)\\040\r"
    odd.write_bytes(b"x" * 8192)
    file = named(odd)
    pid = start(SHARE + "os.unlink(sys.argv[1])", odd).pid
    assert not odd.exists()
    (vma,) = [vma for vma in smaps(pid) if vma.file == file]
    assert vma.pathname.endswith("/we ird\\012(deleted)\\040\r (deleted)")
    assert (vma.size, vma.perms, vma.shared, vma.offset) == (8192, "r--s", True, 0)


def test_name_that_looks_like_another_files_is_not_attributed(start, weights):
    forged = weights.with_name(weights.name + " (deleted)")
    forged.write_bytes(b"x" * 8192)
    assert use(start(SHARE, forged).pid, weights).mappings == 0


def test_only_wanted_files_are_returned(start, weights):
    pid = start(SHARE, weights).pid
    found = read_smaps(pid, wanted={named(weights)})
    assert isinstance(found, tuple)
    assert [vma.file for vma in found] == [named(weights)]
    assert read_smaps(pid, wanted=set()) == ()


def test_twenty_thousand_mappings(start, weights):
    code = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
file = open(sys.argv[1], 'rb+')
for at in range(20_000): libc.mmap(None, 4096, 1 + 2 * (at % 2), 1, file.fileno(), 0)
"""
    assert use(start(code, weights).pid, weights).mappings == 20_000


def test_flags_are_the_kernels_words():
    stack = [vma for vma in smaps(os.getpid()) if vma.pathname == "[stack]"]
    assert stack[0].flags is not None
    assert {"rd", "wr", "gd"} <= set(stack[0].flags)
    assert stack[0].file is None


def test_rollup_is_the_sum_of_the_mappings(start, until, weights):
    pid = start(SHARE, weights).pid
    os.kill(pid, signal.SIGSTOP)  # so that nothing changes between the two readings
    until(lambda: getattr(read_stat(pid), "stopped", False))
    whole, parts = rollup(pid), Amounts.total(vma.amounts for vma in smaps(pid))
    assert whole.amounts.rss == parts.rss
    assert whole.amounts.anonymous == parts.anonymous
    assert whole.amounts.private == (parts.private_clean or 0) + (parts.private_dirty or 0)
    # Proportional shares are rounded down once a mapping in smaps, once in all in the rollup.
    assert abs((whole.amounts.pss or 0) - (parts.pss or 0)) < 1024 * len(smaps(pid))


def test_rollup_splits_its_share_by_kind():
    own = rollup(os.getpid())
    assert own.pss_anon is not None
    assert own.pss_file is not None
    assert 0 < own.pss_anon + own.pss_file <= (own.amounts.pss or 0)


def test_kernel_thread_has_neither():
    if Path("/proc/2/comm").read_bytes() != b"kthreadd\n":
        pytest.skip("kernel threads are not visible here")
    whole, parts = read_smaps_rollup(2), read_smaps(2)
    assert isinstance(whole, Unavailable)
    assert "ESRCH" in whole.reason
    assert "kernel thread" in whole.reason
    assert isinstance(parts, Unavailable)
    assert "kernel thread" in parts.reason


def test_another_users_process_names_the_capability(nobody, python_as):
    code = """
import sys
from hwr.procfs.smaps import read_smaps
from hwr.procfs.smaps_rollup import read_smaps_rollup
for read in read_smaps, read_smaps_rollup: print(read(int(sys.argv[1])).reason)
"""
    for reason in python_as(nobody, code, os.getpid()).splitlines():
        assert "EACCES" in reason
        assert "CAP_SYS_PTRACE" in reason


def test_unknown_and_missing_counters(tree):
    root = tree("7/smaps", VMA.replace(b"Rss:", b"Novelty: 3 kB\nRss:"))
    (vma,) = read_smaps(7, root) or ()
    assert (vma.file, vma.pathname, vma.flags) == (FileId(0xFE, 0, 77), "/a b", ("rd", "sh"))
    assert (vma.amounts.rss, vma.amounts.pss, vma.amounts.anonymous, vma.amounts.locked) == (8192, 4096, 0, None)


def test_carriage_return_in_a_path_ends_no_line():
    (vma,) = parse_smaps(VMA.replace(b"/a b", b"/a\rb"))
    assert (vma.pathname, vma.amounts.rss) == ("/a\rb", 8192)


def test_sum_with_an_unknown_part_is_unknown():
    vmas = parse_smaps(VMA + VMA.replace(b"Anonymous:  0 kB\n", b""))
    total = file_use(vmas, FileId(0xFE, 0, 77))
    assert (total.mappings, total.amounts.rss, total.amounts.anonymous) == (2, 16384, None)


def test_counters_below_a_strange_line_belong_to_nobody():
    assert [vma.amounts.rss for vma in parse_smaps(VMA + b"garbage\nRss:  99 kB\n" + VMA)] == [8192, 8192]


@pytest.mark.parametrize("bad", [b"7f-", b"7f00_0-7f1000", b"-7f0000-7f1000", b"7f0000007f1000"])
def test_mapping_whose_line_is_strange_is_left_out(bad):
    assert parse_smaps(VMA.replace(b"7f0000000000-7f0000002000", bad)) == ()


def test_text_without_a_mapping_is_unavailable(tree):
    assert isinstance(read_smaps(7, tree("7/smaps", b"not smaps\n")), Unavailable)
    assert isinstance(read_smaps(8, tree("8/smaps", b"")), Unavailable)


@pytest.mark.parametrize("text", [b"", VMA, b"0-1 ---p 0 0:0 0 [rollup]\nRss: 1 kB\n", b"0-1 ---p 0 0:0 0 [rollup]\nRss: 1 kB\nPss: 1"])
def test_rollup_that_is_not_whole_is_unavailable(text):
    assert isinstance(parse_smaps_rollup(text), Unavailable)


def test_rollup_of_an_old_kernel():
    found = parse_smaps_rollup(b"0-1 ---p 0 0:0 0 [rollup]\nRss: 8 kB\nPss: 4 kB\nPrivate_Clean: 4 kB\n")
    assert found == SmapsRollup(Amounts(rss=8192, pss=4096, private_clean=4096))
    assert isinstance(found, SmapsRollup)
    assert found.amounts.private is None
