"""What collectors look at: real children, small trees of artifacts, and workers as their run directory would show them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from node_agents import DEADLINE_SECONDS, until

import hwr
from diag.node.runs import Seen
from hwr.errors import Unavailable
from hwr.outcomes import Liveness, Role
from hwr.procfs.stat import read_stat
from hwr.telemetry.state import OpenOperation, WorkerState

REPOSITORY = Path(hwr.__file__).resolve().parents[1]
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
PAGE = 4096
MIB = 1 << 20

# A mapping as a lease has it, every page read; then one command a line.
MAP = """
import mmap, ctypes
file = open(sys.argv[1], 'rb')
held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
sum(held[at] for at in range(0, len(held), 4096))
"""
# The same, but private and writable: what stock safetensors gives.
MAP_PRIVATE = """
import mmap
file = open(sys.argv[1], 'rb')
held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
sum(held[at] for at in range(0, len(held), 4096))
"""


class Child:
    """A Python process that ran some code, then runs a line at a time."""

    def __init__(self, code: str, *arguments: object, prefix: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        loop = "print('ready', flush=True)\nfor line in sys.stdin:\n    exec(line)\n    print('done', flush=True)\n"
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", f"import os, sys\n{code}\n{loop}", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})},
        )
        try:
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "ready\n"
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self, statement: str) -> None:
        """Run a statement and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()

    def do(self, statement: str) -> None:
        """Run a statement to its end."""
        self.begin(statement)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def stop(self) -> None:
        """Hold it by a signal, and wait until the kernel says so."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: getattr(read_stat(self.pid), "state", "") == "T", "the child is stopped")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Start children that end with the block."""
    started: list[Child] = []

    def start(code: str, *arguments: object, **rest: Any) -> Child:
        started.append(Child(code, *arguments, **rest))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.end()


def seen(
    pid: int | None,
    *,
    rank: int = 0,
    leases: Sequence[str] = (),
    roots: Sequence[str] = (),
    ops: Mapping[str, OpenOperation] | None = None,
    liveness: Liveness = Liveness.ALIVE,
    uid: int | None = 0,
    start_ns: int | None = None,
) -> Seen:
    """A worker whose journal says these things."""
    if start_ns is None:
        stat = Unavailable("") if pid is None else read_stat(pid)
        start_ns = 0 if isinstance(stat, Unavailable) else stat.start_ns
    state = WorkerState(ops=dict(ops or {}), leases={f"l{number}": {"key": key} for number, key in enumerate(leases)})
    return Seen(
        directory=Path(f"/nowhere/run/r{rank}.{pid}.{start_ns}"),
        run_id="run",
        rank=rank,
        role=Role.WORKER,
        engine="default",
        ns_pid=pid or 0,
        start_ns=start_ns,
        pid=pid,
        uid=uid,
        liveness=liveness,
        heartbeat_ns=None,
        quiet_ns=None,
        state=state,
        roots=tuple(roots),
    )


def key_of(number: int) -> str:
    return f"{number:064x}"


def make_store(root: Path) -> Path:
    for name in ("locks", "artifacts", "tmp", "quarantine", "deny"):
        (root / name).mkdir(parents=True, mode=0o700)
    return root


def make_artifact(root: Path, key: str, size: int = PAGE, *, under: str = "artifacts", name: str | None = None) -> Path:
    """A tree as a publication leaves it; returns its payload file."""
    directory = root / under / (name or key)
    directory.mkdir()
    payload = directory / "model.safetensors"
    with payload.open("wb") as file:
        block = os.urandom(min(size, MIB))
        for _ in range(max(1, size // MIB)):
            file.write(block)
    (directory / "manifest.json").write_text("{}")
    (directory / "READY.json").write_text("{}")
    directory.chmod(0o555)
    return payload
