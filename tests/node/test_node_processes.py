"""The lock-free files of real processes, the threads of suspects, and the probe of the mmap lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_agents import until
from node_collectors import NOBODY, REPOSITORY, Child, children, seen

from diag.node.artifact_files import ArtifactIndex
from diag.node.memory import MemoryCollector
from diag.node.processes import MAX_THREADS, ProcessCollector
from diag.node.snapshot import ProcessFacts
from hwr.procfs.stat import read_stat

# One mprotect over a file that is mapped six hundred times holds the mmap lock for some tenths of a second; again and again.
HOLD_MMAP_LOCK = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
size, times = 64 << 20, 600
file = os.memfd_create('held')
os.ftruncate(file, size)
whole = libc.mmap(None, size * times, 0, 0x4022, -1, 0)
for number in range(times):
    assert libc.mmap(whole + number * size, size, 3, 0x8011, file, 0) == whole + number * size
def hold():
    for turn in range(10_000):
        libc.mprotect(whole, size * times, 1 if turn % 2 else 3)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as starter:
        yield starter


def collected(*pids: int, suspects: tuple[int, ...] = ()) -> dict[int, ProcessFacts]:
    return ProcessCollector(lambda: [seen(pid) for pid in pids], lambda facts: suspects).collect().value


def test_a_worker_is_what_the_kernel_says(start: Callable[..., Child]) -> None:
    """State, owner, counters that rise with what it does, and where its main thread waits."""
    child = start("import time")
    # read(2) from its standard input
    before = until(
        lambda: (facts := collected(child.pid)[child.pid]).threads[0].syscall == "0" and facts.threads[0].wchan and facts, "it waits"
    )
    assert (before.state, before.uid, before.tracer_pid, before.ppid) == ("S", 0, 0, os.getpid())
    assert before.threads[0].tid == child.pid
    assert before.threads[0].wchan is not None
    assert before.mmap_lock_blocked_seconds is None, "nobody suspected it, so that nobody tried"
    child.do("sum(range(8_000_000)); bytearray(64 << 20)")
    after = collected(child.pid)[child.pid]
    assert after.utime_s is not None
    assert before.utime_s is not None
    assert after.utime_s > before.utime_s
    assert after.minflt is not None
    assert before.minflt is not None
    assert after.minflt > before.minflt
    child.stop()
    assert collected(child.pid)[child.pid].state == "T"


def test_a_reused_pid_is_never_the_worker(start: Callable[..., Child]) -> None:
    """Another start time is another process; one that has ended is absent, not zero."""
    child = start("")
    impostor = seen(child.pid, start_ns=seen(child.pid).start_ns - 10**9)
    assert ProcessCollector(lambda: [impostor]).collect().value == {}
    gone = seen(child.pid)
    child.end()
    assert ProcessCollector(lambda: [gone]).collect().value == {}


def test_threads_of_a_suspect_are_listed_those_at_work_first(start: Callable[..., Child]) -> None:
    """The main thread, then who runs or waits for a disk, then the others; sixty-four at most."""
    child = start(
        "import threading, time\nstop = threading.Event()\n"
        "for _ in range(80): threading.Thread(target=stop.wait, daemon=True).start()\n"
        "threading.Thread(target=exec, args=('while True: pass',), daemon=True).start()"
    )

    def running() -> ProcessFacts | None:
        facts = collected(child.pid, suspects=(child.pid,))[child.pid]
        return facts if facts.threads[1].state == "R" else None

    facts = until(running, "the thread that works is met at work")
    assert facts.thread_count == 82
    assert len(facts.threads) == MAX_THREADS
    assert facts.threads[0].tid == child.pid
    assert facts.mmap_lock_blocked_seconds == 0.0
    assert len(collected(child.pid)[child.pid].threads) == 1, "of others the main thread only"


def test_a_held_mmap_lock_is_told_and_its_time_grows_while_nobody_waits_for_it(start: Callable[..., Child]) -> None:
    """The probe says for how long; the lock-free figures come all the same; one probe at a time; memory leaves it alone."""
    child = start(HOLD_MMAP_LOCK)
    collector = ProcessCollector(lambda: [seen(child.pid)], lambda facts: (child.pid,))
    assert collector.collect().value[child.pid].mmap_lock_blocked_seconds == 0.0
    child.begin("hold()")
    slowest = 0.0

    def blocked() -> ProcessFacts | None:
        nonlocal slowest
        begun = time.monotonic()
        facts = collector.collect().value[child.pid]
        slowest = max(slowest, time.monotonic() - begun)
        return facts if (facts.mmap_lock_blocked_seconds or 0.0) >= 0.1 else None

    facts = until(blocked, "the probe waits")
    assert facts.state in "RDS"
    assert facts.stime_s is not None
    memory = MemoryCollector(lambda: [seen(child.pid)], ArtifactIndex(), blocked=lambda pid: True)
    assert set(memory.collect().value[child.pid].figures) >= {"rss_anon", "locked"}
    assert "pss" not in memory.collect().value[child.pid].figures
    assert slowest < 1.0, "a collect never waits for the lock itself"


def test_what_another_user_may_not_read_is_unknown_and_named_once(start: Callable[..., Child]) -> None:
    """Unprivileged: state and times are there, io and syscall are None; the capability is named, once for all workers."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    first, second = start(""), start("")
    code = (
        "import json, sys, msgspec; from node_collectors import seen; from diag.node.processes import ProcessCollector\n"
        "own = ProcessCollector(lambda: [seen(int(pid)) for pid in sys.argv[1:]], lambda facts: [int(sys.argv[1])])\n"
        "own.collect(); facts = own.collect().value\n"
        "print(json.dumps([msgspec.to_builtins(list(facts.values())), own.unreadable]))"
    )
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*NOBODY, sys.executable, "-c", code, str(first.pid), str(second.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environ)
    assert done.returncode == 0, done.stderr
    facts, unreadable = json.loads(done.stdout)
    assert [one["state"] for one in facts] == ["S", "S"]
    assert [one["read_bytes"] for one in facts] == [None, None]
    assert facts[0]["utime_s"] is not None
    assert (facts[0]["threads"][0]["wchan"], facts[0]["threads"][0]["syscall"]) == (None, None)
    assert facts[0]["mmap_lock_blocked_seconds"] == 0.0, "cmdline may be read by everybody"
    assert len(unreadable) == 2
    assert all("CAP_SYS_PTRACE" in text for text in unreadable)


def test_names_from_outside_are_escaped(start: Callable[..., Child]) -> None:
    """A process may call itself whatever it likes."""
    child = start("open('/proc/self/comm', 'wb').write(b'\\x1b[31mred\\n')")
    assert collected(child.pid)[child.pid].name == "\\x1b[31mred\\x0a"
    assert read_stat(child.pid)


def test_eight_idle_workers_cost_little(start: Callable[..., Child]) -> None:
    """Well below a millisecond and a half of our own time a second; the bound leaves room for a busy machine."""
    pids = [start("").pid for _ in range(4)]
    workers = [seen(pid) for pid in pids]
    collector = ProcessCollector(lambda: workers)
    begun = time.thread_time()
    for _ in range(100):
        collector.collect()
    per_worker = (time.thread_time() - begun) / 100 / len(pids)
    assert per_worker < 0.0005


def test_a_frozen_group_is_told(start: Callable[..., Child]) -> None:
    """A paused container's process is in no state that says so: its group's freezer does."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if os.geteuid() or not freezer.is_dir():
        pytest.skip("needs root and a version 1 freezer")
    child = start("import time")
    group = freezer / f"hwr-test-{child.pid}"
    group.mkdir()
    try:
        assert collected(child.pid, suspects=(child.pid,))[child.pid].frozen is False
        (group / "cgroup.procs").write_text(str(child.pid))
        (group / "freezer.state").write_text("FROZEN")
        until(lambda: collected(child.pid, suspects=(child.pid,))[child.pid].frozen, "it is frozen")
    finally:
        (group / "freezer.state").write_text("THAWED")
        (freezer / "cgroup.procs").write_text(str(child.pid))
        until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()
