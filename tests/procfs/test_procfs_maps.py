"""/proc/PID/maps: the same mappings as smaps, without what they cost."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.maps import Mapping, iter_maps, read_maps
from hwr.procfs.smaps import read_smaps

MIB = 1 << 20
LINE = b"7f0000000000-7f0000002000 r--s 00001000 fe:00 77                         /a b (deleted)\n"
SHARE = """
import mmap
file = open(sys.argv[1], 'rb')
shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(4 * MIB))
    return path


def maps(pid: int, wanted: set[FileId] | None = None) -> tuple[Mapping, ...]:
    found = read_maps(pid, wanted=wanted)
    assert isinstance(found, tuple), found
    return found


def named(path: Path) -> FileId:
    found = FileId.in_tables(path)
    assert isinstance(found, FileId), found
    return found


def test_the_mappings_of_a_file_are_those_that_smaps_counts(start, weights):
    pid = start(SHARE + "private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)", weights).pid
    found = maps(pid, {named(weights)})
    assert sorted((one.size, one.perms, one.offset) for one in found) == [(4 * MIB, "r--s", 0), (4 * MIB, "rw-p", 0)]
    counted = read_smaps(pid)
    assert isinstance(counted, tuple)
    assert [(one.start, one.end, one.file) for one in maps(pid)] == [(vma.start, vma.end, vma.file) for vma in counted if vma.file]


def test_deleted_file_is_still_attributed_and_a_name_alone_is_not(start, weights):
    file = named(weights)
    forged = weights.with_name(weights.name + " (deleted)")
    forged.write_bytes(b"x" * 8192)
    pid = start(SHARE + "os.unlink(sys.argv[1])", weights).pid
    other = start(SHARE, forged).pid
    assert [one.file for one in maps(pid, {file})] == [file]
    assert maps(other, {file}) == ()


def test_twenty_thousand_mappings_take_less_than_their_counters(start, weights):
    code = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
file = open(sys.argv[1], 'rb+')
for at in range(20_000): libc.mmap(None, 4096, 1 + 2 * (at % 2), 1, file.fileno(), 0)
"""
    pid = start(code, weights).pid
    begun = time.process_time()
    assert len(maps(pid, {named(weights)})) == 20_000
    alone = time.process_time() - begun
    begun = time.process_time()
    read_smaps(pid, wanted={named(weights)})
    assert alone < time.process_time() - begun


def test_another_users_process_names_the_capability(nobody, python_as):
    code = "import sys\nfrom hwr.procfs.maps import read_maps\nprint(read_maps(int(sys.argv[1])).reason)"
    reason = python_as(nobody, code, os.getpid())
    assert "EACCES" in reason
    assert "CAP_SYS_PTRACE" in reason


def test_process_without_memory_does_not_map_nothing(start, until):
    """A zombie's text is empty, and so is that of a kernel thread: what it maps is unknown, not none."""
    child = start("if os.fork() == 0: os._exit(0)\nprint(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)", ready=False)
    assert child.stdout is not None
    zombie = int(child.stdout.readline())
    until(lambda: " Z " in Path(f"/proc/{zombie}/stat").read_text())
    found = read_maps(zombie)
    assert isinstance(found, Unavailable)
    assert "zombie" in found.reason
    assert isinstance(read_maps(os.getpid(), wanted=set()), tuple)


def test_lines():
    one = Mapping(0x7F0000000000, 0x7F0000002000, "r--s", 0x1000, FileId(0xFE, 0, 77))
    assert list(iter_maps([LINE])) == [one]
    assert one.size == 8192
    assert list(iter_maps([LINE], {FileId(1, 2, 3)})) == []
    assert list(iter_maps([b"7f0000000000-7f0000002000 rw-p 00000000 00:00 0                          [heap]\n"])) == []


@pytest.mark.parametrize("bad", [LINE[:-1], LINE[:20], b"\n", b"", LINE.replace(b"fe:00", b"fe00"), LINE.replace(b"r--s", b"r--")])
def test_strange_line_costs_only_itself(bad):
    assert [one.file for one in iter_maps([bad, LINE])] == [FileId(0xFE, 0, 77)]


def test_process_that_ended_is_unavailable(tmp_path, tree):
    assert isinstance(read_maps(7, tmp_path), Unavailable)
    assert isinstance(read_maps(8, tree("8/maps", b"")), Unavailable)
