"""Workers' directories made by hand: as a writer makes them, or as somebody who means ill does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diag.node.runs import Seen
from hwr.errors import Unavailable
from hwr.outcomes import Liveness, Role
from hwr.procfs.identity import read_boot_id, read_pid_namespace, start_ns
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.journal import segment_name
from hwr.telemetry.state import WorkerState

Record = dict[str, Any]


def started_ns(pid: int) -> int:
    told = start_ns(pid)
    assert not isinstance(told, Unavailable), told
    return told


def resource(rank: int, pid: int, run: str, **more: Any) -> dict[str, Any]:
    """What a writer says of itself, of this boot and this PID namespace."""
    own = {"boot_id": read_boot_id(), "pid_ns": read_pid_namespace(), "process.pid": pid, "hwr.run_id": run, "hwr.rank": rank}
    return {**own, "hwr.engine": "default", "hwr.role": "worker", **more}


def line(record: Mapping[str, Any]) -> bytes:
    return json.dumps({"v": 1, "mono_ns": 1, "seq": 0, "attrs": {}, **record}).encode() + b"\n"


def head(res: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> bytes:
    """The first line of a segment."""
    return line({"event": "hwr.journal.segment.open", "mono_ns": boot_ns(), "res": res, "attrs": {"number": 1, "state": state}})


def event(seq: int, name: str = "hwr.worker.process.start", **attrs: Any) -> bytes:
    return line({"event": name, "seq": seq, "mono_ns": boot_ns(), "attrs": attrs})


def worker(
    run_dir: Path,
    *,
    rank: int = 0,
    pid: int | None = None,
    start: int | None = None,
    run: str = "run",
    res: Mapping[str, Any] | None = None,
    lines: Sequence[bytes] | None = None,
    beat_ns: int | None = None,
) -> Path:
    """A directory with a journal and an alive file that nobody holds; by default it says that it is this process."""
    pid = os.getpid() if pid is None else pid
    start = started_ns(os.getpid()) if start is None else start
    directory = run_dir / run / f"r{rank}.{pid}.{start}"
    directory.mkdir(parents=True)
    told = resource(rank, pid, run, **(res or {}))
    (directory / segment_name(1)).write_bytes(b"".join([head(told), event(1)] if lines is None else lines))
    (directory / "alive").write_bytes(struct.pack("<QQ", boot_ns() if beat_ns is None else beat_ns, 1))
    return directory


@contextlib.contextmanager
def living(*directories: Path) -> Iterator[None]:
    """Hold the locks of these directories, as their writers would."""
    held: list[int] = []
    try:
        for directory in directories:
            held.append(os.open(directory / "alive", os.O_RDWR))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def make_old(directory: Path, seconds: float) -> None:
    """Let everything there have been written so long ago."""
    when = time.time() - seconds
    for path in (*directory.iterdir(), directory):
        os.utime(path, (when, when), follow_symlinks=False)


def seen(
    number: int,
    *,
    rank: int = 0,
    engine: str = "default",
    run: str = "run",
    liveness: Liveness = Liveness.ALIVE,
    role: Role = Role.WORKER,
    start: int | None = None,
    told: bool = True,
) -> Seen:
    """A process by number; the higher, the later it started. `told`: its journal was read."""
    start = number if start is None else start
    return Seen(
        directory=Path(f"/nowhere/{run}/r{rank}.{number}.{start}"),
        run_id=run,
        rank=rank,
        role=role,
        engine=engine,
        ns_pid=number,
        start_ns=start,
        pid=number,
        uid=0,
        liveness=liveness,
        heartbeat_ns=None,
        quiet_ns=None,
        state=WorkerState(res={"hwr.rank": rank} if told else {}),
    )
