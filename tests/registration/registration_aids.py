"""Mapped payload files, registrations of them, and ranks as real processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hwr
from hwr.registration import registered as _registered
from hwr.registration.budget import Facts
from hwr.registration.drivers import Driver
from hwr.registration.drivers.cuda import CudaDriver
from hwr.registration.ranges import Chunk, Region
from hwr.registration.registered import Export, Exports, Registered
from hwr.registration.registrar import Staged, register
from hwr.registration.vote import file_vote
from hwr.telemetry.reader import read_state
from hwr.telemetry.rundir import WorkerDirectory, worker_directories
from hwr.telemetry.state import OpenOperation, WorkerState

REPOSITORY = Path(hwr.__file__).parents[1]
HERE = Path(__file__).resolve().parent
MIB = 1 << 20
DEADLINE_SECONDS = 20.0
PLENTY = Facts(memlock_bytes=None, cgroup_headroom_bytes=None, available_bytes=1 << 40, reserve_bytes=0)


def payload_file(path: Path, nbytes: int) -> Path:
    """Make a file of random bytes."""
    path.write_bytes(os.urandom(nbytes))
    path.chmod(0o444)
    return path


def mapped(*paths: Path, writable: bool = False) -> Exports:
    """Map files as the store does, shared and read-only; the exports are all that holds the mappings."""
    regions, held = [], []
    for path in paths:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            export = Export(memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)))
        held.append(export)
        region = Region(path.name, facts.st_dev, facts.st_ino, export.address, export.nbytes, writable or export.writable)
        regions.append(region)
    return Exports(tuple(regions), tuple(held))


def go(driver: Driver, *paths: Path, **options: Any) -> Registered | Staged:
    """Map files and register them in chunks of 1 MiB; nothing here is scarce unless a test says so."""
    exports = options.pop("mapping", None) or mapped(*paths)
    told: dict[str, Any] = {"limit_bytes": None, "deadline_seconds": DEADLINE_SECONDS, "chunk_bytes": MIB, "facts": lambda: PLENTY}
    return register(exports.regions, exports=exports.held, driver=driver, files=paths, **{**told, **options})


def held_chunks() -> tuple[Chunk, ...]:
    """Return everything of this process that may be registered: what is in use, and what could not be unregistered."""
    return tuple(chunk for holding in _registered._holdings for chunk in holding.chunks)


def rank_of_a_group(runtime: str, path: str, rank: str, size: str, deadline: str) -> Registered | Staged:
    """What a child does: register one file as a rank of a group (of one: without a vote)."""
    from hwr import telemetry

    telemetry.configure(rank=int(rank))
    vote = None
    if int(size) > 1:
        vote = file_vote("group", rank=int(rank), world_size=int(size), deadline_seconds=float(deadline))
    return go(CudaDriver(Path(runtime)), Path(path), deadline_seconds=float(deadline), vote=vote)


def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait for a condition, and return what it came true with."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        told = condition()
        if told:
            return told
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.005)  # processes under test need the two processors


def environment(**more: str) -> dict[str, str]:
    """Let a child import what is tested here."""
    path = os.pathsep.join((str(REPOSITORY), str(HERE)))
    return {"PYTHONPATH": path, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(code: str, *arguments: object, prefix: Sequence[str] = (), status: int = 0, **environ: str) -> str:
    """Run Python that may use this module; return what it prints."""
    command = [*prefix, sys.executable, "-W", "error", "-c", f"import sys\nfrom registration_aids import *\n{code}", *map(str, arguments)]
    done = subprocess.run(command, env=environment(**environ), capture_output=True, text=True, cwd="/", timeout=60, check=False)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@contextlib.contextmanager
def children() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start children that run code and end with their standard input; whatever is left is killed."""
    with contextlib.ExitStack() as stack:

        def start(code: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-W", "error", "-c", f"import sys\nfrom registration_aids import *\n{code}", *map(str, arguments)]
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            process = stack.enter_context(subprocess.Popen(command, env=environment(**environ), text=True, cwd="/", **pipes))
            stack.callback(process.kill)
            return process

        yield start


def worker(run_dir: Path, rank: int) -> WorkerDirectory | None:
    """Return the directory of a rank, once it is there."""
    return next((worker for worker in worker_directories(run_dir) if worker.rank == rank), None)


def state_of(run_dir: Path, rank: int) -> WorkerState:
    """Fold the journal of a rank in this process."""
    there = worker(run_dir, rank)
    return WorkerState() if there is None else read_state(there.path)


def in_operation(run_dir: Path, rank: int, operation: str) -> OpenOperation | None:
    """Return what a rank is in, if it is that."""
    current = state_of(run_dir, rank).current_operation()
    return current if current is not None and current.operation == operation else None
