"""/proc/PID/status, read from this kernel and from texts of others."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.status import Status, parse_status, read_status

WITHOUT_MEMORY = b"Name:\tkthreadd\nState:\tS (sleeping)\nTgid:\t2\nPid:\t2\nPPid:\t0\nUid:\t0\t0\t0\t0\nKthread:\t1\nThreads:\t1\n"


def status(pid: int, root: Path = Path("/proc")) -> Status:
    found = read_status(pid, root)
    assert isinstance(found, Status), found
    return found


def test_our_own_process():
    own = status(os.getpid())
    assert (own.pid, own.tgid, own.ppid) == (os.getpid(), os.getpid(), os.getppid())
    assert own.uids == (*os.getresuid(), os.geteuid())
    assert own.gids is not None
    assert own.gids[:3] == os.getresgid()
    assert own.ns_pids is not None
    assert own.ns_pids[-1] == os.getpid()
    assert own.state == "R"
    assert not own.stopped


def test_sizes_are_bytes_of_disjoint_kinds():
    own = status(os.getpid())
    assert own.rss is not None
    assert own.rss > 1 << 20
    assert own.rss % mmap.PAGESIZE == 0
    assert (own.rss_anon or 0) + (own.rss_file or 0) + (own.rss_shmem or 0) == own.rss
    assert own.peak_rss is not None
    assert own.vm_size is not None
    assert own.vm_size > own.rss


def test_anonymous_memory_shows_as_such(start):
    small, large = start(""), start("held = b'x' * (32 << 20)")
    more = (status(large.pid).rss_anon or 0) - (status(small.pid).rss_anon or 0)
    assert 31 << 20 < more < 34 << 20


def test_locked_memory_shows(start):
    code = "import ctypes, mmap\nm = mmap.mmap(-1, 1 << 20)\nctypes.CDLL(None).mlock(ctypes.byref(ctypes.c_char.from_buffer(m)), 32 << 10)"
    assert status(start(code).pid).locked == 32 << 10


def test_stopped_process_reads_T(start, until):
    child = start("")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: status(child.pid).state == "T")
    assert status(child.pid).stopped


def test_zombie_has_a_status_and_no_memory(start, until):
    child = start("")
    child.kill()
    until(lambda: status(child.pid).state == "Z")
    assert status(child.pid).rss is None


def test_ended_process_is_unavailable(start):
    child = start("")
    child.kill()
    child.wait()
    found = read_status(child.pid)
    assert isinstance(found, Unavailable)
    assert "ENOENT" in found.reason


def test_kernel_thread_has_no_memory_lines():
    if Path("/proc/2/comm").read_bytes() != b"kthreadd\n":
        pytest.skip("kernel threads are not visible here")
    thread = status(2)
    assert thread.name == "kthreadd"
    assert (thread.rss, thread.rss_anon, thread.locked, thread.hugetlb) == (None, None, None, None)


def test_another_users_status_is_readable(nobody, python_as):
    code = "import sys; from hwr.procfs.status import read_status; print(read_status(int(sys.argv[1])).rss is not None)"
    assert python_as(nobody, code, os.getpid()) == "True\n"


def test_hidden_process_is_unavailable_and_says_so(as_root, python_as):
    hide = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"'
    code = "from hwr.procfs.status import read_status; print(read_status(1).reason)"
    assert "hidepid" in python_as(["unshare", "-m", "sh", "-c", hide, "sh"], code)


@pytest.mark.parametrize("name", [b"a) R 1 (b", b"a\nPid:\t1\n\\", b" a ", b"\\n", b"\\101", b"\xff\x00"[:1], b"\x1b[31m", b"\xc3\xa9"])
def test_name_survives_whole(start, name):
    pid = start(f"open('/proc/self/comm', 'wb').write({name!r})").pid
    assert status(pid).name == name.decode("utf-8", "surrogateescape")
    assert status(pid).pid == pid


def test_octal_escapes_of_a_name_are_undone():
    found = parse_status(WITHOUT_MEMORY.replace(b"kthreadd", rb"a\012b\\040"))
    assert isinstance(found, Status)
    assert found.name == "a\nb\\040"


def test_thread_is_a_process_of_a_smaller_tree():
    pid = os.getpid()
    assert status(pid, Path("/proc") / str(pid) / "task").pid == pid


def test_old_kernel_leaves_out_what_it_lacks(tree):
    old = b"Name:\tpython\nState:\tS (sleeping)\nPid:\t7\nPPid:\t1\nVmRSS:\t    2048 kB\nThreads:\t3\n"
    found = status(7, tree("7/status", old))
    assert (found.rss, found.threads) == (2 << 20, 3)
    assert (found.rss_anon, found.pinned, found.ns_pids, found.kernel_thread, found.uids) == (None,) * 5


def test_unknown_keys_and_strange_lines_are_ignored(tree):
    found = status(2, tree("2/status", b"Mood:\tfine\nno colon\n\n:\n" + WITHOUT_MEMORY + b"VmFuture:\t7 kB\nName:\tanother\n"))
    assert found.name == "kthreadd"


@pytest.mark.parametrize("value", [b"12", b"12 MB", b"-1 kB", b"1_0 kB", b"kB", b" kB", b"", "١ kB".encode(), b"9" * 30 + b" kB"])
def test_size_that_is_not_whole_kilobytes_is_unknown(value):
    found = parse_status(WITHOUT_MEMORY + b"VmRSS:\t" + value + b"\n")
    assert isinstance(found, Status)
    assert found.rss is None


@pytest.mark.parametrize("missing", [b"Name", b"State", b"Pid", b"PPid"])
def test_text_without_who_it_is_about_is_unavailable(missing):
    text = b"".join(line for line in WITHOUT_MEMORY.splitlines(keepends=True) if not line.startswith(missing + b":"))
    assert isinstance(parse_status(text), Unavailable)
