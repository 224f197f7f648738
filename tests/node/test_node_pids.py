"""A writer's process, by our own number for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_agents import until
from node_directories import started_ns

from diag.node import pids as pids_module
from diag.node.pids import SEARCH_AGAIN_NS, SEARCH_NEW_NS, TICK_NS, Pids, Writer
from hwr.errors import Unavailable
from hwr.procfs.identity import read_pid_namespace
from hwr.telemetry.clock import boot_ns

SLEEPER = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture
def start() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def sleeper(started: list[subprocess.Popen[str]], *prefix: str) -> tuple[int, int]:
    """Start a process; return its number here and what it calls itself."""
    process = subprocess.Popen([*prefix, sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    inner = int(process.stdout.readline())
    if not prefix:
        return process.pid, inner
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return until(lambda: int(children.read_text().split()[0]), "the child is there"), inner


def own_namespace() -> int:
    told = read_pid_namespace()
    assert isinstance(told, int)
    return told


def namespace_of(pid: int) -> int:
    told = read_pid_namespace(pid)
    assert isinstance(told, int)
    return told


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def test_a_process_of_our_own_namespace(start: list[subprocess.Popen[str]]) -> None:
    """It is called what it calls itself, whether the kernel names the holder or not."""
    pid, inner = sleeper(start)
    writer = Writer(inner, started_ns(pid), own_namespace())
    assert inner == pid
    assert Pids().of(writer, None, boot_ns()) == pid
    assert Pids().of(writer, pid, boot_ns()) == pid
    assert Pids().of(Writer(inner, started_ns(pid), None), None, boot_ns()) == pid


@pytest.mark.parametrize("off", [0, TICK_NS, -TICK_NS])
def test_a_tick_is_the_same_process(off: int) -> None:
    """Start times are exact to a tick."""
    pid = os.getpid()
    assert Pids().of(Writer(pid, started_ns(pid) + off, own_namespace()), None, boot_ns()) == pid


@pytest.mark.parametrize("off", [2 * TICK_NS, -2 * TICK_NS, 60_000_000_000])
@pytest.mark.parametrize("namespace", [True, False])
def test_a_reused_number_is_somebody_else(off: int, namespace: bool) -> None:
    """Two ticks away is another process, also where the journal does not say its namespace, and also if that process is who we found."""
    pid = os.getpid()
    found = Pids().of(Writer(pid, started_ns(pid) + off, own_namespace() if namespace else None), None, boot_ns())
    assert isinstance(found, Unavailable)
    assert "not visible" in found.reason


def test_who_was_found_and_has_ended_is_not_found_again(start: list[subprocess.Popen[str]]) -> None:
    """What is remembered is checked each time."""
    pid, inner = sleeper(start)
    writer, pids = Writer(inner, started_ns(pid), own_namespace()), Pids()
    assert pids.of(writer, pid, boot_ns()) == pid
    start[0].kill()
    start[0].wait()
    assert isinstance(pids.of(writer, None, boot_ns()), Unavailable)


def test_a_directory_that_names_another_process_is_not_believed(start: list[subprocess.Popen[str]]) -> None:
    """Whoever holds the lock is the writer; a name with the numbers of another process does not make it that one."""
    victim, inner = sleeper(start)
    writer, pids = Writer(inner, started_ns(victim), own_namespace()), Pids()
    found = pids.of(writer, os.getpid(), boot_ns())
    assert isinstance(found, Unavailable)
    assert f"held by pid {os.getpid()}" in found.reason
    assert pids.of(writer, victim, boot_ns()) == victim
    assert isinstance(pids.of(writer, os.getpid(), boot_ns()), Unavailable)  # nor later


def test_a_process_of_a_namespace_below_ours(as_root: None, start: list[subprocess.Popen[str]]) -> None:
    """It calls itself 1; the kernel's table names it by our number, and without the table its status does."""
    pid, inner = sleeper(start, *NAMESPACE)
    assert inner == 1
    writer = Writer(inner, started_ns(pid), namespace_of(pid))
    assert Pids().of(writer, pid, boot_ns()) == pid
    assert Pids().of(writer, None, boot_ns()) == pid
    other = Writer(inner, started_ns(pid) + 2 * TICK_NS, namespace_of(pid))
    assert isinstance(Pids().of(other, None, boot_ns()), Unavailable)


def test_a_process_of_a_namespace_beside_ours(as_root: None) -> None:
    """It is not visible, and the reason says what would help."""
    code = (
        "import sys; from diag.node.pids import Pids, Writer;"
        "print(Pids().of(Writer(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), None, 10**18).reason)"
    )
    pid = os.getpid()
    arguments = [str(pid), str(started_ns(pid)), str(own_namespace())]
    done = subprocess.run([*NAMESPACE, sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert "not below ours" in done.stdout
    assert "hostPID" in done.stdout


def test_who_hides_processes_hides_the_writer(as_root: None) -> None:
    """Under hidepid=2 an unprivileged reader gets the reason, with and without the holder's number."""
    code = (
        "import os, sys; from diag.node.pids import Pids, Writer; from hwr.procfs.identity import read_pid_namespace;"
        "w = Writer(int(sys.argv[1]), int(sys.argv[2]), read_pid_namespace());"
        "print(Pids().of(w, None, 1).reason); print(Pids().of(w, w.ns_pid, 1).reason)"
    )
    pid = os.getpid()
    inside = 'mount -t proc -o hidepid=2 none /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"'
    command = ["unshare", "-m", "sh", "-c", inside, "sh", sys.executable, "-c", code, str(pid), str(started_ns(pid))]
    environ = {**os.environ, "PYTHONPATH": str(Path(pids_module.__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environ)
    assert done.returncode == 0, done.stderr
    assert [("hidepid" in line) for line in done.stdout.splitlines()] == [True, True]


def test_a_search_serves_everybody_and_is_not_repeated_each_second(tmp_path: Path) -> None:
    """All processes are looked at once a minute at most, or five seconds after the last time for one that started since."""
    stat = "7 (w) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {ticks} 0 0 0 0\n"
    status = "Name:\tw\nState:\tS\nPid:\t7\nPPid:\t1\nNSpid:\t7\t{inner}\n"

    def process(pid: int, inner: int, ticks: int) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat.format(ticks=ticks))
        (tmp_path / str(pid) / "status").write_text(status.format(inner=inner))

    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    begun = 100 * SEARCH_AGAIN_NS
    old, new = Writer(1, 50 * tick, 4), Writer(2, begun + tick, 4)
    pids = Pids(tmp_path)
    assert isinstance(pids.of(old, None, begun), Unavailable)
    process(70, 1, 50)
    process(71, 2, begun // tick + 1)
    assert isinstance(pids.of(old, None, begun + SEARCH_NEW_NS + 1), Unavailable)
    assert pids.of(new, None, begun + SEARCH_NEW_NS + 1) == 71
    assert pids.of(old, None, begun + SEARCH_NEW_NS + 2) == 70  # the same search found both
