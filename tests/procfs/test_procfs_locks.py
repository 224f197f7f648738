"""/proc/locks: real holders, real waiters, and texts of other kernels."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.locks import KernelLock, Lock, holders, parse_locks, read_locks

TAKE = "import fcntl\nfile = open(sys.argv[1])\nfcntl.flock(file, fcntl.%s)"


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.lock"
    path.write_bytes(b"x" * 100)
    return path


def held(target: Path | os.stat_result | FileId) -> tuple[Lock, ...]:
    found = holders(target)
    assert isinstance(found, tuple), found
    return found


def test_holder_of_a_flock(start, lock_file):
    child = start(TAKE % "LOCK_EX", lock_file)
    (lock,) = held(lock_file)
    assert (lock.kind, lock.advice, lock.mode, lock.pid) == (KernelLock.FLOCK, "ADVISORY", "WRITE", child.pid)
    assert (lock.start, lock.end, lock.exclusive, lock.waiters) == (0, None, True, ())
    child.kill()
    child.wait()
    assert held(lock_file) == ()


def test_every_shared_holder_is_listed(start, lock_file):
    children = [start(TAKE % "LOCK_SH", lock_file) for _ in range(3)]
    locks = held(lock_file)
    assert {lock.pid for lock in locks} == {child.pid for child in children}
    assert not any(lock.exclusive for lock in locks)


def test_waiters_are_attached_to_the_holder_that_is_stopped(start, until, lock_file):
    holder = start(TAKE % "LOCK_EX", lock_file)
    os.kill(holder.pid, signal.SIGSTOP)
    waiters = [start(TAKE % mode, lock_file, ready=False) for mode in ("LOCK_EX", "LOCK_SH")]
    until(lambda: len(held(lock_file)[0].waiters) == 2)
    (lock,) = held(lock_file)
    assert lock.pid == holder.pid
    assert {(waiter.pid, waiter.mode) for waiter in lock.waiters} == {(waiters[0].pid, "WRITE"), (waiters[1].pid, "READ")}
    assert {waiter.file for waiter in lock.waiters} == {lock.file}


def test_file_is_found_by_path_stat_and_id(start, lock_file):
    start(TAKE % "LOCK_EX", lock_file)
    file = FileId.in_tables(lock_file)
    assert isinstance(file, FileId)
    assert held(file) == held(lock_file)
    assert str(file).encode() in Path("/proc/locks").read_bytes()
    if file == FileId.of_stat(lock_file.stat()):  # neither btrfs nor overlayfs
        assert held(lock_file.stat()) == held(lock_file)


def test_table_that_was_read_before_is_joined(start, lock_file):
    locks = read_locks()
    assert isinstance(locks, tuple)
    start(TAKE % "LOCK_EX", lock_file)
    assert holders(lock_file, locks=locks) == ()


def test_posix_lock_has_a_range(lock_file):
    with lock_file.open("rb+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)
        (lock,) = held(lock_file)
    assert (lock.kind, lock.pid, lock.start, lock.end) == (KernelLock.POSIX, os.getpid(), 5, 14)


def test_open_file_description_lock_names_no_process(lock_file):
    with lock_file.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        (lock,) = held(lock_file)
    assert (lock.kind, lock.pid, lock.mode, lock.end) == (KernelLock.OFDLCK, None, "READ", None)


def test_lease_is_no_flock(lock_file):
    with lock_file.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        (lock,) = held(lock_file)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    assert (lock.kind, lock.advice, lock.pid) == (KernelLock.LEASE, "ACTIVE", os.getpid())


def test_overlayfs_is_joined_by_the_mount_not_by_stat(as_root, python_as, tmp_path):
    code = """
import fcntl, os, sys
from hwr.procfs.locks import holders
file = open(sys.argv[1] + "/m/low-file")
fcntl.flock(file, fcntl.LOCK_SH)
print([lock.pid == os.getpid() for lock in holders(sys.argv[1] + "/m/low-file")], holders(os.fstat(file.fileno())))
"""
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "low-file").write_bytes(b"x")
    (tmp_path / "over").mkdir()
    mount = (
        f"cd {tmp_path}/over && mount -t tmpfs none . && cd $PWD && mkdir up work m &&"
        f' mount -t overlay none -o lowerdir={tmp_path}/low,upperdir=$PWD/up,workdir=$PWD/work m && exec "$@"'
    )
    assert python_as(["unshare", "-m", "sh", "-c", mount, "sh"], code, tmp_path / "over") == "[True] ()\n"


def test_lock_of_another_pid_namespace_is_not_listed(as_root, python_as, lock_file):
    code = "import sys; from hwr.procfs.locks import holders; print(holders(sys.argv[1]))"
    with lock_file.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert len(held(lock_file)) == 1
        assert python_as(["unshare", "--pid", "--fork", "--mount-proc"], code, lock_file) == "()\n"


def test_missing_file_is_unavailable(tmp_path):
    found = holders(tmp_path / "none")
    assert isinstance(found, Unavailable)
    assert "ENOENT" in found.reason
    assert isinstance(holders("a\0b"), Unavailable)


def test_missing_table_is_unavailable(tree, lock_file):
    root = tree("version", b"Linux\n")
    assert isinstance(read_locks(root), Unavailable)
    assert isinstance(holders(lock_file, root), Unavailable)


OTHERS = b"""1: POSIX  MANDATORY WRITE 70 08:1f:12 0 EOF
2: FLOCK  ADVISORY  WRITE 71 08:1f:13 0 EOF
2: -> FLOCK  ADVISORY  WRITE 72 08:1f:13 0 EOF
2:  -> FLOCK  ADVISORY  READ 73 08:1f:13 0 EOF
3: -> FLOCK  ADVISORY  READ 74 08:1f:13 0 EOF
4: POSIX  *NOINODE* READ 75 <none>:0 0 99
5: NOVEL  ADVISORY  READ 0 08:1f:14 0 EOF
"""


def test_texts_of_other_kernels(tree):
    table = read_locks(tree("locks", OTHERS))
    assert isinstance(table, tuple)
    assert [lock.number for lock in table] == [1, 2, 4, 5]
    assert table[0].advice == "MANDATORY"
    assert table[1].file == FileId(8, 31, 13)
    assert [waiter.pid for waiter in table[1].waiters] == [72, 73]
    assert (table[2].file, table[2].end) == (None, 99)
    assert (table[3].kind, table[3].pid) == (KernelLock.UNKNOWN, None)


@pytest.mark.parametrize(
    "line",
    [
        b"1: FLOCK  ADVISORY  WRITE 7 08:1f:13 0",
        b"1: FLOCK  ADVISORY  WRITE x 08:1f:13 0 EOF",
        b"1 FLOCK  ADVISORY  WRITE 7 08:1f:13 0 EOF",
        b"1: FLOCK  ADVISORY  WRITE 7 08:1f:13 0 -5",
        b"1: -> FLOCK  ADVISORY  WRITE 7 08:1f:13 0 EOF",
        b"1:",
        b"",
    ],
)
def test_strange_line_is_skipped_and_orphans_nobody_else(line):
    good = b"9: FLOCK  ADVISORY  WRITE 8 08:1f:13 0 EOF\n"
    assert [lock.pid for lock in parse_locks(line + b"\n" + good)] == [8]
