"""The agent among what goes wrong around it: a store that never answers, thousands of files, other users, other namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_agents import DEADLINE_SECONDS, Agent, PlainWorker, get, running, until
from victim import KEY, store_with

UP = ("hwr_worker_up", (("engine", "default"), ("rank", "0")))
EVENT = "telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))"
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")

# A filesystem that never answers, and an agent beside it in one mount namespace; what is read from standard input ends both.
HANGING = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
where, command = sys.argv[1], sys.argv[2:]
fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
if libc.mount(b"hang", where.encode(), b"fuse", 0, f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()):
    sys.exit(os.strerror(ctypes.get_errno()))
child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
sys.stdin.readline()
child.terminate()
try:
    print(child.wait(20), flush=True)
finally:
    os.close(fuse)
    libc.umount2(where.encode(), 2)
"""


@pytest.fixture
def started() -> Iterator[list[Agent | PlainWorker]]:
    """Processes that end with the test."""
    with running() as list_of:
        yield list_of


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user can reach."""
    place = Path(tempfile.mkdtemp(prefix="hwr-node-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def as_root() -> None:
    """Skip where namespaces and other users are out of reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.mark.usefixtures("as_root")
def test_a_store_that_never_answers_is_named_and_everything_else_is_there(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """One root hangs in the kernel: its collector fails by name, the other root, the workers and the port do not notice, and it ends."""
    run_dir, hung = tmp_path / "run", tmp_path / "hung"
    run_dir.mkdir()
    hung.mkdir()
    store_with(tmp_path / "good", KEY, 1 << 20)
    worker = PlainWorker(run_dir)
    started.append(worker)
    worker.do(EVENT)
    agent = [
        sys.executable,
        "-m",
        "diag.node",
        "--run-dir",
        str(run_dir),
        "--port",
        "0",
        "--root",
        str(hung),
        "--root",
        str(tmp_path / "good"),
    ]
    process = subprocess.Popen(
        ["unshare", "-m", sys.executable, "-c", HANGING, str(hung), *agent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        seen = _Elsewhere(run_dir)

        def failing() -> dict[str, Any] | None:
            rows = {row["target"]: row for row in seen.startupz()["collectors"] if row["name"] == "store"}
            row: dict[str, Any] | None = rows.get(str(hung))
            return row if row is not None and not row["ok"] and row["problem"] else None

        until(lambda: get(f"{seen.url}/startupz")[0] == 200, "a first look")
        until(failing, "the hanging root is named", 90)
        series = until(lambda: (found := seen.metrics()).get(UP) == 1 and found, "the worker is seen")
        assert series[("hwr_collector_success", (("collector", "store"),))] == 0
        assert series[("hwr_collector_success", (("collector", "processes"),))] == 1
        assert [value for (name, labels), value in series.items() if name == "hwr_store_entries" and ("state", "ready") in labels] == [1.0]
        until(lambda: get(f"{seen.url}/readyz")[0] == 200, "what hangs beyond its deadline is known to hang")
        out, _ = process.communicate("end\n", timeout=DEADLINE_SECONDS)
        assert out.split()[-1] == str(128 + signal.SIGTERM), "it ended by itself, with a thread in the kernel"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


class _Elsewhere(Agent):
    """An agent that somebody else started."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        told = until(self._told, "the agent says where it listens")
        self.url, self.pid = told["url"], told["pid"]

    def _told(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            value: dict[str, Any] = json.loads((self.run_dir / "agent.json").read_text())
            return value
        return None


@pytest.mark.usefixtures("as_root")
def test_workers_of_another_user_meet_the_agent(open_place: Path, started: list[Agent | PlainWorker]) -> None:
    """In a shared directory (group, sticky) a worker of uid 65534 is seen by root's agent, once, with its pid and its user."""
    run_dir = open_place / "run"
    run_dir.mkdir()
    run_dir.chmod(0o3777)
    worker = PlainWorker(run_dir, prefix=NOBODY)
    started.append(worker)
    worker.do(EVENT)
    agent = Agent(run_dir).ready()
    started.append(agent)
    until(lambda: agent.metrics().get(UP) == 1, "it is seen")
    (row,) = agent.startupz()["ranks"]
    assert (row["uid"], row["liveness"], row["pid"]) == (65534, "alive", worker.pid)


@pytest.mark.usefixtures("as_root")
def test_a_worker_in_another_pid_namespace_has_its_pid_here(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """It calls itself 1 or 2; the agent says both numbers, and reads the right process."""
    worker = PlainWorker(tmp_path, prefix=["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"])
    started.append(worker)
    worker.do(EVENT)
    plain = PlainWorker(tmp_path, rank=1)
    started.append(plain)
    plain.do(EVENT)
    agent = Agent(tmp_path).ready()
    started.append(agent)
    rows = until(
        lambda: (found := {r["rank"]: r for r in agent.startupz()["ranks"]}) and len(found) == 2 and found[0]["pid"] and found, "both"
    )
    assert rows[0]["ns_pid"] == worker.ns_pid < 10
    name = Path(f"/proc/{rows[0]['pid']}/status").read_text()
    assert f"NSpid:\t{rows[0]['pid']}\t{worker.ns_pid}\n" in name
    assert rows[1]["pid"] == rows[1]["ns_pid"] == plain.pid
    assert len([key for key in agent.metrics() if key[0] == "hwr_worker_up"]) == 2


def test_a_long_journal_and_a_large_store_are_all_there(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """100,000 events and a thousand artifacts (ten thousand in the soak form): counted, and the port answers meanwhile."""
    check_large(tmp_path, started, 1_000)


@pytest.mark.soak
def test_ten_thousand_artifacts(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """The whole number."""
    check_large(tmp_path, started, 10_000)


def check_large(place: Path, started: list[Agent | PlainWorker], artifacts: int) -> None:
    run_dir = place / "run"
    run_dir.mkdir()
    worker = PlainWorker(run_dir)
    started.append(worker)
    worker.do(f"for _ in range(100_000): {EVENT}")
    for number in range(artifacts):
        store_with(place / "store", f"{number:064x}", 4096)
    agent = Agent(run_dir, "--root", str(place / "store"))
    started.append(agent)
    assert get(f"{agent.url}/livez")[0] == 200
    agent.ready()
    entries = ("hwr_store_entries", "ready")

    def counted() -> bool:
        series = agent.metrics()
        stored = [value for (name, labels), value in series.items() if name == entries[0] and ("state", entries[1]) in labels]
        return stored == [float(artifacts)] and series.get(("hwr_events_total", (("event", "hwr.worker.phase.change"),)), 0) >= 100_000

    until(counted, "everything is counted")
    gauges = [key for key in agent.metrics() if key[0] == "hwr_artifact_page_cache_bytes"]
    assert len(gauges) <= 50


def test_a_second_agent_reports_no_store_twice(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Two agents of one run directory: one reports the store, and when it is killed the other does."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store_with(tmp_path / "store", KEY, 1 << 20)
    first = Agent(run_dir, "--root", str(tmp_path / "store")).ready()
    started.append(first)
    reports = lambda agent: any(name == "hwr_store_entries" for name, _ in agent.metrics())  # noqa: E731
    until(lambda: reports(first), "the first reports it")
    process = subprocess.Popen(
        [sys.executable, "-m", "diag.node", "--run-dir", str(run_dir), "--port", "0", "--root", str(tmp_path / "store")],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = line.split()[-1].removesuffix("/metrics")
        until(lambda: get(f"{url}/readyz")[0] == 200, "the second is ready")
        assert b"hwr_store_entries{" not in get(f"{url}/metrics")[1]
        first.stop(signal.SIGKILL)
        until(lambda: b"hwr_store_entries{" in get(f"{url}/metrics")[1], "the second reports it")
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_SECONDS)
