"""/proc/PID/task: real threads in known places, and texts of other kernels."""

from __future__ import annotations

import os
import signal
import time

import pytest

from hwr.errors import Unavailable
from hwr.procfs.stat import Stat, read_stat
from hwr.procfs.threads import Syscall, list_threads, parse_syscall, parse_wchan, read_syscall, read_thread_stat, read_wchan

THREADS = """
import threading
def spin():
    while True: pass
waits = threading.Thread(target=threading.Event().wait, daemon=True)
spins = threading.Thread(target=spin, daemon=True)
waits.start(); spins.start()
print(waits.native_id, spins.native_id, flush=True)
"""
LINE = b"202 0x7f0000000010 0x80 0x0 0x0 0x0 0xffffffffffffffff 0x7ffd00000000 0x7f0000000020\n"


def ids(child) -> tuple[int, int]:
    """Read what THREADS printed: who waits and who spins."""
    waits, spins = map(int, child.stdout.readline().split())
    assert child.stdout.readline() == "ready\n"
    return waits, spins


def test_every_thread_is_listed_with_its_own_processor_time(start, until):
    child = start(THREADS, ready=False)
    waits, spins = ids(child)
    assert list_threads(child.pid) == tuple(sorted((child.pid, waits, spins)))

    def spent(tid: int) -> float:
        found = read_thread_stat(child.pid, tid)
        assert isinstance(found, Stat), found
        return found.utime_s + found.stime_s

    until(lambda: spent(spins) >= 0.05)
    assert spent(waits) < spent(spins)
    whole = read_stat(child.pid)
    assert isinstance(whole, Stat)
    assert spent(spins) <= whole.utime_s + whole.stime_s + 1  # that of the thread, not of the process, and in seconds


def test_sleeping_thread_names_its_place_and_its_call(start, until):
    child = start(THREADS, ready=False)
    waits, _ = ids(child)
    until(lambda: isinstance(read_wchan(child.pid, waits), str))
    wchan = read_wchan(child.pid, waits)
    assert isinstance(wchan, str)
    assert "futex" in wchan
    call = read_syscall(child.pid, waits)
    assert isinstance(call, Syscall), call
    assert not call.running
    assert call.number is not None
    assert len(call.arguments) == 6


def test_thread_that_runs_waits_nowhere(start, until):
    child = start(THREADS, ready=False)
    _, spins = ids(child)
    until(lambda: read_syscall(child.pid, spins) == Syscall(running=True))
    until(lambda: isinstance(read_wchan(child.pid, spins), Unavailable))


def test_stopped_process_is_read_at_once(start, until):
    child = start(THREADS, ready=False)
    ids(child)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: getattr(read_stat(child.pid), "stopped", False))
    begun = time.monotonic()
    listed = list_threads(child.pid)
    assert isinstance(listed, tuple)
    for tid in listed:
        assert isinstance(read_thread_stat(child.pid, tid), Stat)
        read_wchan(child.pid, tid)
        read_syscall(child.pid, tid)
    assert time.monotonic() - begun < 1


def test_another_user_learns_that_it_may_not_know(nobody, python_as, start):
    child = start(THREADS, ready=False)
    waits, _ = ids(child)
    code = """
import sys
from hwr.errors import Unavailable
from hwr.procfs.threads import list_threads, read_syscall, read_thread_stat, read_wchan
pid, tid = map(int, sys.argv[1:])
print(len(list_threads(pid)), read_thread_stat(pid, tid).state)
print(read_wchan(pid, tid).reason)
print(read_syscall(pid, tid).reason)
"""
    listed, wchan, call = python_as(nobody, code, child.pid, waits).splitlines()
    assert listed == "3 S"
    assert "CAP_SYS_PTRACE" in wchan  # the kernel answers 0, as it does for a thread that runs
    assert "CAP_SYS_PTRACE" in call


@pytest.mark.parametrize("name", ["do_wait", "poll_schedule_timeout.constprop.0", "__x64_sys_nanosleep"])
def test_symbols(name):
    assert parse_wchan(name.encode()) == name


@pytest.mark.parametrize("text", [b"0", b"", b"a b", b"do_wait\n", b"\x1b[31m", b"0xffff", b"\xff", b"x" * 200])
def test_what_is_no_symbol_is_unknown(text):
    assert isinstance(parse_wchan(text), Unavailable)


def test_call_with_its_arguments():
    assert parse_syscall(LINE) == Syscall(False, 202, (0x7F0000000010, 0x80, 0, 0, 0, (1 << 64) - 1))
    assert parse_syscall(b"running\n") == Syscall(True)


def test_wait_outside_of_a_call_has_no_number():
    """A page fault: -1, stack pointer and program counter."""
    assert parse_syscall(b"-1 0x7ffd00000000 0x7f0000000020\n") == Syscall(False)


@pytest.mark.parametrize(
    "text", [b"", b"202", b"run", LINE[:30], LINE.replace(b"202", b"2e2"), LINE.replace(b"0x80", b"0xZZ"), b"-2 0 0\n"]
)
def test_call_that_is_not_whole_is_unknown(text):
    assert isinstance(parse_syscall(text), Unavailable)


def test_names_in_task_that_are_no_numbers(tree):
    root = tree("7/task/8/stat", b"")
    for strange in ("٣", "x", "-1"):
        (root / "7/task" / strange).mkdir()
    assert list_threads(7, root) == (8,)


def test_process_that_ended_is_unavailable(tmp_path):
    assert isinstance(list_threads(7, tmp_path), Unavailable)
    assert isinstance(read_thread_stat(7, 7, tmp_path), Unavailable)
    assert isinstance(read_wchan(7, 7, tmp_path), Unavailable)
    assert isinstance(read_syscall(7, 7, tmp_path), Unavailable)
