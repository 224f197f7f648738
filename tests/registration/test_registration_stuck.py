"""A driver call that does not return: what the journal, another process, /metrics and stack.txt say of it meanwhile and afterwards."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest
from cuda_standin import REGISTER, Standin
from registration_aids import MIB, children, payload_file, run, state_of, until, worker

from hwr.outcomes import Phase
from hwr.registration.stack import MAX_BYTES, STACK, StackFile
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.state import WorkerState

RANK = 3
STUCK = """
from hwr import telemetry
telemetry.configure(rank=3)
server = telemetry.serve_metrics(0)
print(server.port, flush=True)
limit = int(sys.argv[3]) or None
go(CudaDriver(Path(sys.argv[1])), Path(sys.argv[2]), limit_bytes=limit)
"""


def told(state: WorkerState) -> dict[str, object]:
    """What a person wants to know of a worker that is stuck."""
    operation = state.current_operation()
    assert operation is not None
    attrs = operation.attrs
    return {
        "rank": state.res["hwr.rank"],
        "range": f"{attrs['range']}/{attrs['ranges']}",
        "chunk": f"{attrs['chunk']}/{attrs['chunks']}",
        "bytes": attrs["bytes"],
        "done": operation.done_bytes,
        "planned": operation.planned_bytes,
        "limit": attrs.get("limit_bytes"),
        "phase": state.phase(),
    }


@pytest.mark.parametrize("limit", [None, 1 << 30], ids=["no limit", "a limit"])
def test_a_worker_that_is_stuck_in_a_chunk_says_so_until_it_is_killed_and_after(
    standin: Standin, tmp_path: Path, limit: int | None
) -> None:
    """Rank, range, chunk, bytes done, age and limit, in another process; /metrics answers, since the interpreter's lock is free."""
    standin.configure("register 3 hang")
    path = payload_file(tmp_path / "payload", 4 * MIB)
    runs = tmp_path / "run"
    wanted = {"rank": RANK, "range": "1/1", "chunk": "3/4", "bytes": MIB, "done": 2 * MIB, "planned": 4 * MIB, "limit": limit}
    wanted["phase"] = Phase.REGISTERING
    with children() as start:
        process = start(STUCK, standin.path, path, limit or 0, HWR_RUN_DIR=str(runs))
        until(lambda: [call.bytes for call in standin.inside(REGISTER)] == [MIB] and len(standin.calls(REGISTER)) == 3, "it is stuck")
        begun = boot_ns()
        state = state_of(runs, RANK)
        assert told(state) == wanted
        operation = state.current_operation()
        assert operation is not None
        until(lambda: (boot_ns() - operation.begun_ns) / 1e9 > 0.2)
        assert 0 < (boot_ns() - operation.begun_ns) / 1e9 < 30
        assert operation.begun_ns < begun
        metrics = scraped(process)
        for line in (
            'hwr_registered_bytes{engine="default",rank="3"} 2.097152e+06',
            'hwr_registration_chunks_done{engine="default",rank="3"} 2.0',
            'hwr_worker_phase{engine="default",hwr_worker_phase="registering",rank="3"} 1.0',
        ):
            assert line in metrics
        assert 'hwr_operation_started_timestamp_seconds{engine="default",operation="register_chunk",rank="3"}' in metrics
        there = worker(runs, RANK)
        assert there is not None
        until(lambda: "in register" in (there.path / STACK).read_text(), "a dump")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert told(state_of(runs, RANK)) == wanted
    assert not state_of(runs, RANK).exited


def scraped(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    port = int(process.stdout.readline())
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_the_stack_of_every_thread_is_dumped_while_the_interpreter_is_held(tmp_path: Path) -> None:
    """A C thread writes it: a call that keeps the interpreter's lock is seen too, again and again, and nothing after the call."""
    code = """
import ctypes
from hwr.registration.stack import StackFile
stack = StackFile(Path(sys.argv[1]), seconds=0.1)
def keeps_the_lock():
    with stack.armed("range 1/2, chunk 3/4"):
        ctypes.PyDLL(None).usleep(450_000)
keeps_the_lock()
size = os.stat(Path(sys.argv[1], "stack.txt")).st_size
ctypes.CDLL(None).usleep(250_000)
print(size == os.stat(Path(sys.argv[1], "stack.txt")).st_size)
"""
    assert run(code, tmp_path) == "True\n"
    text = (tmp_path / STACK).read_text()
    assert text.startswith("-- range 1/2, chunk 3/4; begun at ")
    assert 3 <= text.count("in keeps_the_lock") <= 5


def test_the_stack_file_is_begun_anew_above_its_bound(tmp_path: Path) -> None:
    stack = StackFile(tmp_path)
    for _ in range(2):
        with stack.armed("first"):
            pass
    assert (tmp_path / STACK).read_text().count("-- first") == 2
    with (tmp_path / STACK).open("ab") as file:
        file.write(b"x" * MAX_BYTES)
    with stack.armed("second"):
        pass
    stack.close()
    assert (tmp_path / STACK).read_text().startswith("-- second")


def test_without_a_journal_there_is_no_stack_file(tmp_path: Path) -> None:
    for directory in (None, tmp_path / "missing"):
        stack = StackFile(directory)
        with stack.armed("anything"):
            pass
        stack.close()
    (tmp_path / STACK).symlink_to(tmp_path / "elsewhere")
    StackFile(tmp_path).close()
    assert not (tmp_path / "elsewhere").exists()
