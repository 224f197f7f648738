"""/proc/PID/io."""

from __future__ import annotations

import os
import time

import pytest

from hwr.errors import Unavailable
from hwr.procfs.io import Io, parse_io, read_io

FILE = b"rchar: 10\nwchar: 20\nsyscr: 1\nsyscw: 2\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
MIB = 1 << 20


def io(pid: int) -> Io:
    found = read_io(pid)
    assert isinstance(found, Io), found
    return found


def test_what_is_read_and_written_by_calls_is_counted(start, tmp_path):
    child = start("file = open(sys.argv[1], 'wb', buffering=0)\nfile.write(bytes(1 << 20))\nopen(sys.argv[1], 'rb').read()", tmp_path / "f")
    found = io(child.pid)
    assert found.wchar is not None
    assert found.rchar is not None
    assert MIB <= found.wchar < 2 * MIB
    assert MIB <= found.rchar < 8 * MIB  # the interpreter reads its own modules too


def test_what_comes_from_the_disk_through_a_mapping_is_no_read_call(start, tmp_path):
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(os.urandom(8 * MIB))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = "import mmap\nfile = open(sys.argv[1], 'rb')\nmapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\nmapped[::4096]"
    found, plain = io(start(code, path).pid), io(start("import mmap").pid)
    if not found.read_bytes:
        pytest.skip("this filesystem has no disk")
    assert found.read_bytes >= 8 * MIB
    assert found.rchar is not None
    assert plain.rchar is not None
    assert found.rchar - plain.rchar < MIB


def test_stopped_process_is_read_at_once(start, until):
    child = start("os.kill(os.getpid(), 19)", ready=False)
    begun = time.monotonic()
    io(child.pid)
    assert time.monotonic() - begun < 1


def test_another_users_process_names_the_capability(nobody, python_as):
    code = "import sys\nfrom hwr.procfs.io import read_io\nprint(read_io(int(sys.argv[1])).reason)"
    reason = python_as(nobody, code, os.getpid())
    assert "EACCES" in reason
    assert "CAP_SYS_PTRACE" in reason


def test_missing_keys_are_unknown():
    assert parse_io(FILE) == Io(10, 20, 4096, 8192)
    assert parse_io(b"rchar: 10\nread_bytes: -1\nwchar: x\n") == Io(10, None, None, None)


@pytest.mark.parametrize("text", [b"", b"rchar: 10", b"novelty: 1\n"])
def test_nothing_whole_is_unavailable(text):
    assert isinstance(parse_io(text), Unavailable)


def test_process_that_ended_is_unavailable(tmp_path):
    assert isinstance(read_io(7, tmp_path), Unavailable)
