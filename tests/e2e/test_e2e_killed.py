"""kill -9 in the middle of a checksum: the journal says what the worker was doing, to another process and from a copy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_processes import Journal, Programs, Running, until
from e2e_stores import Store

from hwr.telemetry.alive import is_held
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.reader import read_state

MIB = 1 << 20

# A producer without a model: one tensor of zeros, published by the store's own door.
COMMON = """
import sys
from hwr import telemetry
from hwr.checkpoint.identity import ArtifactIdentity, Adaptation, Component, Layout, Producer, Representation, Source
from hwr.outcomes import TensorKind, ValidationLevel
from hwr.store.domain import Limits, open_domain
root, size = sys.argv[1], int(sys.argv[2])
identity = ArtifactIdentity(
    source=Source(model_id="zeros", fingerprint="0" * 64), component=Component(name="zeros"),
    representation=Representation(name="safetensors", dtype="uint8"), layout=Layout(name="as_is"), adaptation=Adaptation(),
    producer=Producer(producer_id="test", version="1", implementation_fingerprint="0" * 64, manifest_schema=1, restorer_schema=1),
)
domain = open_domain(root, limits=Limits(min_free_bytes=0), coordination_timeout_seconds=60)
"""
PUBLISH = (
    COMMON
    + """
from hwr.store.publish import publish

class Zeros:
    name, kind, dtype, shape = "zeros", TensorKind.BUFFER, "U8", (size,)

    def blocks(self):
        block = memoryview(bytes(8 << 20))
        for _ in range(size // len(block)):
            yield block

result = publish(domain, identity, [Zeros()])
assert result.failure is None, result.failure
print(result.outcome)
"""
)
LOOK_UP = (
    COMMON
    + """
from hwr.store.lookup import lookup
telemetry.configure()
result = lookup(domain, identity.key, identity.to_json(), ValidationLevel.FULL_CHECKSUM)
assert result.lease is not None, result.failure
result.lease.close()
telemetry.close()
print(result.status)
"""
)
FOLD = """
import json, sys
from pathlib import Path
from hwr.telemetry.reader import read_state
state = read_state(Path(sys.argv[1]))
operation = state.current_operation()
print(json.dumps({
    "phase": state.phase(), "exited": state.exited, "operation": operation.operation, "begun_ns": operation.begun_ns,
    "planned": operation.planned_bytes, "done": operation.done_bytes, "progress_ns": operation.progress_ns, "last_ns": state.last_ns,
}))
"""


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def stopped_in_the_middle(worker: Running) -> tuple[int, Journal]:
    """Let the hashing process of a worker run in short steps until its progress is in the journal; return it, stopped."""

    def hasher() -> int | None:
        """The hasher as it is after exec: until then it is the worker's fork, and stopping that would stop the worker's wait."""
        for pid in children_of(worker.process.pid):
            with contextlib.suppress(OSError):
                if b"hasher.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        assert worker.process.poll() is None, worker.stop(signal.SIGKILL).err
        return None

    def ticks() -> int:
        """Its CPU time, user and system, in clock ticks: proc_pid_stat(5), fields 14 and 15."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    pid: int = until(hasher, "a hashing process")
    os.kill(pid, signal.SIGSTOP)

    def progress() -> Journal | None:
        journal = worker.journal()
        if journal and any(attrs["done_bytes"] for attrs in journal.of("hwr.validation.checksum.progress")):
            return journal
        before = ticks()
        os.kill(pid, signal.SIGCONT)
        limit = time.monotonic() + 0.2
        while ticks() == before and time.monotonic() < limit:
            os.sched_yield()
        os.kill(pid, signal.SIGSTOP)
        return None

    # Progress is told at most every quarter of a second: let that pass before any of the bytes is read.
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > 0.3, "the time between two reports")
    return pid, until(progress, "progress in the journal")


@pytest.fixture
def mid_checksum(request: pytest.FixtureRequest, programs: Programs, tmp_path: Path) -> Iterator[tuple[Running, Journal, int]]:
    """A worker in the middle of a full checksum, its journal by then, and the bytes of the artifact."""
    size: int = request.param
    store = Store(tmp_path / "store")
    published = programs.python(PUBLISH, store.root, size)
    assert (published.rc, published.out) == (0, "published\n"), published.err
    worker = programs.start_python(LOOK_UP, store.root, size)
    hasher, journal = stopped_in_the_middle(worker)
    yield worker, journal, size
    with contextlib.suppress(ProcessLookupError):
        os.kill(hasher, signal.SIGKILL)
    store.remove()


SIZES = [pytest.param(512 * MIB, id="512MiB"), pytest.param(2048 * MIB, id="2GiB", marks=pytest.mark.soak)]


@pytest.mark.parametrize("mid_checksum", SIZES, indirect=True)
def test_a_worker_that_is_killed_in_a_checksum_left_its_progress(
    mid_checksum: tuple[Running, Journal, int], programs: Programs, tmp_path: Path
) -> None:
    worker, before, size = mid_checksum
    assert is_held(before.path) is True
    worker.process.kill()
    assert worker.process.wait() == -signal.SIGKILL
    # The begin event was written before the first byte was read; there is no end, and no orderly exit.
    journal = worker.journal()
    assert journal is not None
    (begun,) = journal.of("hwr.validation.checksum.begin")
    assert journal.of("hwr.validation.checksum.end") == journal.of("hwr.worker.process.exit") == []
    assert size <= begun["planned_bytes"] < size + MIB
    assert is_held(journal.path) is False

    copied = tmp_path / "elsewhere" / "copied"
    shutil.copytree(journal.path, copied)
    now = boot_ns()
    for directory in (journal.path, copied):
        told = json.loads(programs.python(FOLD, directory).out)
        assert told["phase"] == "validating"
        assert told["operation"] == "checksum"
        assert not told["exited"]
        # Progress: how much of how much, and when it last moved.
        assert told["planned"] == begun["planned_bytes"]
        assert 0 < told["done"] < told["planned"]
        assert told["begun_ns"] < told["progress_ns"] <= told["last_ns"] < now
        # Age: on the clock that all processes of this boot share.
        assert 0.25 < (now - told["begun_ns"]) / 1e9 < 600
    assert read_state(journal.path) == read_state(copied)
    assert is_held(copied) is False


@pytest.mark.parametrize("mid_checksum", [pytest.param(512 * MIB, id="512MiB")], indirect=True)
def test_a_hasher_that_is_killed_is_an_io_error_and_no_corruption(mid_checksum: tuple[Running, Journal, int], tmp_path: Path) -> None:
    """The out-of-memory killer took it: nothing is denied for that."""
    worker, _, _ = mid_checksum
    (hasher,) = children_of(worker.process.pid)
    os.kill(hasher, signal.SIGKILL)
    _, err = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 1
    assert "the hashing process ended early" in err
    assert Store(tmp_path / "store").denied == []
    journal = worker.journal()
    assert journal is not None
    (ended,) = journal.of("hwr.validation.checksum.end")
    assert (ended["outcome"], ended["error.code"]) == ("failed", "store_io")
