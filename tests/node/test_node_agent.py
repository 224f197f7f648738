"""The agent as a process: it always answers, it goes on where the last one ended, and nothing is there twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from node_agents import DEADLINE_SECONDS, Agent, PlainWorker, get, running, series_of, until
from prometheus_server import Prometheus

from diag.node.agent import openness_warning

EVENT = "telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))"
LEASE = "telemetry.emit(E.LeaseOpened(key='ab' * 32, lease='l', bytes=1, files=1, tensors=1, validation='full_checksum'))"
LEASES = ("hwr_lease_acquisitions_total", (("engine", "default"), ("rank", "0")))
EVENTS = ("hwr_events_total", (("event", "hwr.worker.phase.change"),))


@pytest.fixture
def started() -> Iterator[list[Agent | PlainWorker]]:
    """Processes that end with the test."""
    with running() as list_of:
        yield list_of


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="hwr-node-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_it_answers_with_no_worker_and_says_where_it_looked(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """An empty node is a finding, not an error: the directory is named, no run was found, every collector with something to do did it."""
    agent = Agent(tmp_path)
    started.append(agent)
    agent.ready()
    series = agent.metrics()
    assert series[("hwr_runs_discovered", ())] == 0
    assert series[("hwr_run_dir_readable", ())] == 1
    assert series[("hwr_collector_success", (("collector", "kernel"),))] == 1
    looked = agent.startupz()["run_directories"]
    assert [place["path"] for place in looked] == [str(tmp_path)]
    assert get(f"{agent.url}/livez")[0] == 200
    assert get(f"{agent.url}/startupz?rank=0")[0] == 404
    status, err = agent.stop()
    assert status == 128 + signal.SIGTERM
    assert str(tmp_path) in err
    assert not (tmp_path / "agent.json").exists()


def test_a_taken_port_is_two_lines_and_usage(tmp_path: Path) -> None:
    """The port and the way out are named, and nothing is left running."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "diag.node", "--run-dir", str(tmp_path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_once_prints_one_exposition(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """The same figures without a port, for a script or a text-file collector; verdicts included, since it looks twice."""
    worker = PlainWorker(tmp_path, rank=3)
    started.append(worker)
    worker.do(EVENT)
    done = subprocess.run(
        [sys.executable, "-m", "hwr.cli.main", "agent", "--once", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    series = series_of(done.stdout)
    assert series[("hwr_worker_up", (("engine", "default"), ("rank", "3")))] == 1
    assert series[("hwr_worker_stall", (("engine", "default"), ("hwr_worker_stall", "none"), ("rank", "3")))] == 1


def test_a_killed_and_restarted_agent_goes_on_and_nothing_doubles(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Sums over workers, those included that were replaced, neither fall nor grow by an agent's restart."""
    first_worker = PlainWorker(tmp_path, rank=0)
    started.append(first_worker)
    for _ in range(20):
        first_worker.do(EVENT)
    agent = Agent(tmp_path).ready()
    started.append(agent)
    until(lambda: agent.metrics()[EVENTS] >= 21, "the events are counted")
    first_worker.end()
    second_worker = PlainWorker(tmp_path, rank=0, run_id="second")
    started.append(second_worker)
    second_worker.do(EVENT)
    before = until(lambda: (count := agent.metrics()[EVENTS]) >= 23 and count, "both workers are counted")
    rows = until(lambda: (seen := agent.metrics()) and any(name == "hwr_process_rss_bytes" for name, _ in seen) and seen, "memory is read")
    agent.stop(signal.SIGKILL)
    again = Agent(tmp_path).ready()
    started.append(again)
    after = until(lambda: (count := again.metrics()[EVENTS]) >= before and count, "the sum is back")
    assert after == before
    until(lambda: _of_workers(again.metrics()) == _of_workers(rows), "the same series are back")
    second_worker.do(EVENT)
    until(lambda: again.metrics()[EVENTS] == before + 1, "one more is one more")


def _of_workers(series: Iterable[tuple[str, tuple[tuple[str, str], ...]]]) -> set[object]:
    """Return the series of workers, those aside that come with a sample once a minute."""
    return {key for key in series if "rank" in dict(key[1]) and not key[0].startswith(("hwr_allocator", "hwr_python"))}


def test_restarts_of_a_worker_add_no_series(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """A new process of an engine and rank takes the dead one's place; no scrape fails and none has a series twice."""
    check_restarts(tmp_path, started, 6)


@pytest.mark.soak
def test_fifty_restarts_add_no_series(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """The whole number."""
    check_restarts(tmp_path, started, 50)


def check_restarts(tmp_path: Path, started: list[Agent | PlainWorker], restarts: int) -> None:
    agent = Agent(tmp_path).ready()
    started.append(agent)
    counts = set()
    for restart in range(restarts):
        worker = PlainWorker(tmp_path, rank=1, run_id=f"run-{restart}")
        started.append(worker)
        worker.do(EVENT)
        up = ("hwr_worker_up", (("engine", "default"), ("rank", "1")))
        heart = ("hwr_heartbeat_timestamp_seconds", up[1])
        seen = until(lambda: (s := agent.metrics()).get(up) == 1 and heart in s and _pid_of(agent, 1) == worker.pid and s, "it is seen")  # noqa: B023
        counts.add(len(_of_workers(seen)))
        worker.end(signal.SIGKILL if restart % 2 else None)
    assert len(counts) <= 2, "series of one rank, with or without its first memory sample"
    up_rows = [key for key in agent.metrics() if key[0] == "hwr_worker_up"]
    assert len(up_rows) == 1


def _pid_of(agent: Agent, rank: int) -> int | None:
    for row in agent.startupz()["ranks"]:
        if row["rank"] == rank and not row["replaced"]:
            pid: int | None = row["pid"]
            return pid
    return None


def test_two_engines_with_the_same_ranks_stay_apart(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """The second live engine of a name has a number; each rank is there once for each."""
    for run_id in ("a", "b"):
        for rank in (0, 1):
            worker = PlainWorker(tmp_path, rank=rank, run_id=run_id)
            started.append(worker)
            worker.do(EVENT)
    agent = Agent(tmp_path).ready()
    started.append(agent)
    rows = until(
        lambda: (found := {k[1] for k in agent.metrics() if k[0] == "hwr_worker_up"}) and len(found) == 4 and found, "four workers"
    )
    assert {(dict(row)["engine"], dict(row)["rank"]) for row in rows} == {(e, r) for e in ("default", "default-2") for r in ("0", "1")}


def test_what_is_no_journal_costs_only_itself(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """A corrupt journal, an alien file, links, a FIFO, a sparse file of 10 GiB, a later version: the healthy worker is all there."""
    healthy = PlainWorker(tmp_path, rank=0)
    started.append(healthy)
    healthy.do(EVENT)
    run = tmp_path / "strange"
    for rank, name in enumerate(("corrupt", "fifo", "sparse", "link", "later"), start=1):
        place = run / f"r{rank}.{4_000_000 + rank}.{rank}"
        place.mkdir(parents=True)
        segment = place / "events.000001.jsonl"
        match name:
            case "corrupt":
                segment.write_bytes(os.urandom(100_000))
            case "fifo":
                os.mkfifo(segment)
            case "sparse":
                with segment.open("wb") as file:
                    file.truncate(10 << 30)
            case "link":
                segment.symlink_to("/etc/passwd")
            case "later":
                line = {"v": 2, "ts": "", "mono_ns": 1, "seq": 1, "event": "hwr.next.thing.happen", "sev": "INFO", "attrs": {}, "new": 1}
                segment.write_text(json.dumps(line) + "\n")
    (tmp_path / "alien").write_text("hello")
    (tmp_path / "loop").symlink_to(tmp_path)
    agent = Agent(tmp_path).ready()
    started.append(agent)
    series = until(lambda: (s := agent.metrics()).get(("hwr_worker_up", (("engine", "default"), ("rank", "0")))) == 1 and s, "it is seen")
    assert series[("hwr_worker_stall", (("engine", "default"), ("hwr_worker_stall", "none"), ("rank", "0")))] == 1
    healthy.do(EVENT)
    assert get(f"{agent.url}/livez")[0] == 200
    text = json.dumps(agent.startupz())
    assert "root:" not in text, "nothing of the linked file is shown"


def test_collectors_without_permission_say_so_once(open_place: Path, started: list[Agent | PlainWorker]) -> None:
    """As another user the agent shows what it can, and names what it may not read and what would open it."""
    if os.geteuid():
        pytest.skip("needs root")
    run_dir = open_place / "run"
    run_dir.mkdir()
    worker = PlainWorker(run_dir, rank=0)
    started.append(worker)
    worker.do(EVENT)
    for path in [run_dir, *run_dir.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    run_dir.chmod(0o777)
    agent = Agent(run_dir, prefix=["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]).ready()
    started.append(agent)
    until(lambda: agent.metrics().get(("hwr_worker_up", (("engine", "default"), ("rank", "0")))) == 1, "it is seen")
    until(lambda: any("CAP_SYS_PTRACE" in text for text in agent.startupz()["unreadable"]), "what is missing is named")


def test_journals_that_may_not_be_read_are_named(open_place: Path, started: list[Agent | PlainWorker]) -> None:
    """Another user's runs are closed to this one: said once, counted, and no success."""
    if os.geteuid():
        pytest.skip("needs root")
    run_dir = open_place / "run"
    run_dir.mkdir()
    worker = PlainWorker(run_dir)
    started.append(worker)
    worker.do(EVENT)
    run_dir.chmod(0o777)
    for path in run_dir.iterdir():
        path.chmod(0o700)
    agent = Agent(run_dir, prefix=["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]).ready()
    started.append(agent)
    until(lambda: any("CAP_DAC_READ_SEARCH" in text for text in agent.startupz()["unreadable"]), "it is named")
    expected = {("hwr_run_dir_readable", ()): 0.0, ("hwr_unreadable", (("collector", "runs"),)): 1.0}
    until(lambda: expected.items() <= agent.metrics().items(), "it is counted")
    (row,) = [row for row in agent.startupz()["collectors"] if row["name"] == "runs"]
    assert "EACCES" in row["problem"]


def test_an_open_address_is_warned_of(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Loopback is silent; an address that others reach, without TLS and passwords, is one line on standard error."""
    inside = Agent(tmp_path)
    started.append(inside)
    assert "reachable" not in inside.stop()[1]
    assert openness_warning("127.0.0.1", protected=False) is None
    assert openness_warning("::1", protected=False) is None
    assert openness_warning("localhost", protected=False) is None
    for address in ("0.0.0.0", "::", "10.1.2.3", "node7"):
        assert "reachable" in (openness_warning(address, protected=False) or "")
        assert openness_warning(address, protected=True) is None


def test_a_real_prometheus_reads_a_restart_as_one(tmp_path: Path, started: list[Agent | PlainWorker]) -> None:
    """Over a worker's restart `increase()` counts what happened and no more, the target has no error, and no series is new."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    worker = PlainWorker(run_dir, rank=0)
    started.append(worker)
    for _ in range(5):
        worker.do(LEASE)
    agent = Agent(run_dir).ready()
    started.append(agent)
    until(lambda: agent.metrics().get(LEASES) == 5, "five leases are counted")
    prometheus = Prometheus(tmp_path, [agent.url.removeprefix("http://")])
    try:
        until(lambda: prometheus.value("hwr_lease_acquisitions_total") == 5, "they are scraped")
        worker.end(signal.SIGKILL)
        again = PlainWorker(run_dir, rank=0, run_id="again")
        started.append(again)
        for _ in range(3):
            again.do(LEASE)
        until(lambda: prometheus.value("hwr_lease_acquisitions_total") == 3, "the new worker's count is scraped")
        until(lambda: (prometheus.value("resets(hwr_lease_acquisitions_total[5m])") or 0) == 1, "one reset")
        # increase() extrapolates to the ends of its range, a sum over the raw samples does not: from 5 down to 0 and up to 3.
        assert prometheus.value("count(count by (engine, rank) (hwr_lease_acquisitions_total))") == 1
        assert prometheus.value("min_over_time(hwr_lease_acquisitions_total[5m])") in (0, 1, 2, 3)
        increase = prometheus.value("increase(hwr_lease_acquisitions_total[5m])")
        assert increase is not None
        assert 0 < increase < 8, "three leases, extrapolated; not eight"
        (target,) = prometheus.api("targets")["activeTargets"]
        assert target["lastError"] == ""
    finally:
        prometheus.close()
