"""/proc/PID/stat and statm."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import time

import pytest

from hwr.errors import Unavailable
from hwr.procfs.stat import Stat, parse_stat, read_stat
from hwr.procfs.statm import Statm, parse_statm, read_statm

LINE = b"12 (%b) S 3 12 12 0 -1 4194304 100 0 5 0 250 50 0 0 20 0 4 0 66849 3133440 380 18446744073709551615 0\n"


def stat(pid: int) -> Stat:
    found = read_stat(pid)
    assert isinstance(found, Stat), found
    return found


def test_start_lies_between_two_looks_at_the_clock(start):
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    child = start("")
    after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before - tick <= stat(child.pid).start_ns <= after


def test_processor_time_is_seconds():
    own, usage = stat(os.getpid()), resource.getrusage(resource.RUSAGE_SELF)
    assert abs(own.utime_s + own.stime_s - usage.ru_utime - usage.ru_stime) < 0.5
    assert own.utime_s > 0


def test_faults_grow_with_memory_touched():
    before = stat(os.getpid()).minflt
    with mmap.mmap(-1, 256 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as touched:
        touched.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(touched), mmap.PAGESIZE):
            touched[at] = 1
        assert stat(os.getpid()).minflt - before >= 256


def test_stopped_process_reads_T_and_runs_on(start, until):
    child = start("")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: stat(child.pid).state == "T")
    assert stat(child.pid).stopped
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: not stat(child.pid).stopped)


def test_threads_are_counted(start):
    code = "import threading\nfor _ in range(3): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert stat(start(code).pid).threads == 4


@pytest.mark.parametrize("name", [b"a) R 1 (b", b") S 1 2 3\n", b"((", b"a b\tc", b"\xff"])
def test_name_moves_no_field(start, name):
    child = start(f"open('/proc/self/comm', 'wb').write({name!r})")
    found = stat(child.pid)
    assert found.comm == name.decode("utf-8", "surrogateescape")
    assert (found.pid, found.ppid, found.threads) == (child.pid, os.getpid(), 1)


def test_ticks_of_another_machine():
    found = parse_stat(LINE % b"python", ticks_per_s=1000)
    assert isinstance(found, Stat)
    assert (found.utime_s, found.stime_s, found.start_ns) == (0.25, 0.05, 66_849_000_000)
    assert (found.minflt, found.majflt, found.threads, found.ppid) == (100, 5, 4, 3)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"12\n",
        b"12 (a\n",
        b"12 (a)\n",
        b"12 (a) S 1 2\n",
        LINE[:-1] % b"a",
        b"x" + LINE % b"a",
        LINE.replace(b" 66849 ", b" -1 ") % b"a",
        LINE.replace(b") S ", b") SS ") % b"a",
        LINE.replace(b") S ", b") 1 ") % b"a",
    ],
)
def test_line_that_is_not_whole_is_unavailable(text):
    assert isinstance(parse_stat(text), Unavailable)


def test_statm_agrees_with_the_page_size_and_status():
    own = read_statm(os.getpid())
    assert isinstance(own, Statm)
    assert own.size > own.resident > own.shared > 0
    assert own.resident % mmap.PAGESIZE == 0
    assert own.resident > 1 << 20


def test_statm_of_another_page_size(tree):
    assert parse_statm(b"7 6 5 4 0 3 0\n", page_size=65536) == Statm(7 << 16, 6 << 16, 5 << 16, 4 << 16, 3 << 16)
    assert isinstance(read_statm(9, tree("9/statm", b"7 6 5\n")), Unavailable)


@pytest.mark.parametrize("text", [b"", b"7 6 5 4 0 3 0", b"7 6 5 4 0 -3 0\n", b"7 6 5 4 0 3 0\n7 6 5 4 0 3 0\n", b"a b c d e f g\n"])
def test_statm_that_is_not_whole_is_unavailable(text):
    assert isinstance(parse_statm(text), Unavailable)
