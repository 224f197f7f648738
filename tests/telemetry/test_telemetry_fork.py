"""J7: a forked child gives up what it inherited, and the parent does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hwr.telemetry.reader import read_state
from hwr.telemetry.rundir import worker_directories

Python = Callable[..., str]

FORK = """
import json, logging, os, sys
from pathlib import Path
from hwr import telemetry
from hwr.telemetry import events as E
from hwr.telemetry.alive import is_held
def open_files():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return found
parent = telemetry.configure(run_dir=sys.argv[1])
outer = telemetry.span(E.LookupBegun(key="k", validation="full_checksum"))
outer.__enter__()
read, write = os.pipe()
child = os.fork()
if child == 0:
    facts = {"inherited": [name for name in open_files() if name.startswith(str(parent))]}
    facts["directory"] = str(telemetry.journal_directory())
    telemetry.emit(E.StepsEnded(steps=1))  # within the parent's span, which is none of this process's
    lines = []
    logging.Handler.handle = lambda self, record: lines.append(record.getMessage())
    logging.getLogger("hwr").addHandler(logging.Handler())
    logging.getLogger("hwr").setLevel(logging.INFO)
    outer.__exit__(None, None, None)  # it ends nowhere here
    facts["lines"] = lines
    facts["directory"] = str(telemetry.journal_directory())
    facts["parent_held"] = is_held(parent)
    facts["own_held"] = is_held(telemetry.journal_directory())
    os.write(write, json.dumps(facts).encode())
    os._exit(0)
os.waitpid(child, 0)
told = json.loads(os.read(read, 10000))
outer.__exit__(None, None, None)
print(json.dumps({**told, "parent": str(parent), "still_held": is_held(parent)}))
"""


def test_j7_a_child_writes_its_own_journal(python: Python, tmp_path: Path) -> None:
    """J7: no inherited descriptor stays, the first event opens a journal of the child's own, the parent's lock survives its death."""
    told = json.loads(python(FORK, tmp_path))
    assert told["inherited"] == []
    assert told["lines"] == []
    assert told["directory"] != told["parent"]
    assert told["parent_held"] is True
    assert told["own_held"] is True
    assert told["still_held"] is True
    parent, child = read_state(Path(told["parent"])), read_state(Path(told["directory"]))
    assert parent.res["hwr.run_id"] == child.res["hwr.run_id"]
    assert parent.res["process.pid"] != child.res["process.pid"]
    assert (parent.events["hwr.store.lookup.end"], parent.seq_gaps, parent.malformed) == (1, 0, 0)
    assert "hwr.store.lookup.end" not in child.events
    assert child.events["hwr.runtime.steps.end"] == 1
    lines = (Path(told["directory"]) / "events.000001.jsonl").read_bytes().splitlines()
    assert not any("parent" in json.loads(line) for line in lines)


def test_j7_a_silent_child_leaves_nothing(python: Python, tmp_path: Path) -> None:
    """J7: a child that emits nothing makes no directory and starts no thread."""
    code = """
import os, sys, threading
from hwr import telemetry
telemetry.configure(run_dir=sys.argv[1])
child = os.fork()
if child == 0:
    os._exit(len([thread for thread in threading.enumerate() if thread.name == "hwr-alive"]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code, tmp_path) == "0\n"
    assert len(list(worker_directories(tmp_path))) == 1


PREFORK = """
import os, sys, threading
from hwr import telemetry
from hwr.telemetry import events as E
telemetry.configure(run_dir=sys.argv[1])
stop = threading.Event()
def emit():
    while not stop.is_set():
        with telemetry.span(E.StageBegun(stage="lookup"), stage="lookup"):
            telemetry.snapshot()
threads = [threading.Thread(target=emit) for _ in range(3)]
for thread in threads:
    thread.start()
children = []
for _ in range(30):
    with telemetry.span(E.StageBegun(stage="restore"), stage="restore"):
        child = os.fork()
        if child == 0:
            telemetry.emit(E.StepsEnded(steps=1))
            break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    stop.set()
    for thread in threads:
        thread.join()
    print(codes)
    sys.exit(0)
os._exit(7)
"""


def test_j7_forking_while_threads_emit(python: Python, tmp_path: Path) -> None:
    """J7: a server that forks 30 workers while its threads write: nobody waits for a lock whose holder does not exist in the child."""
    assert python(PREFORK, tmp_path) == f"{[7] * 30}\n"
    states = [read_state(worker.path) for worker in worker_directories(tmp_path)]
    assert len(states) == 31
    assert sum(state.events.get("hwr.runtime.steps.end", 0) for state in states) == 30
    assert all((state.malformed, state.seq_gaps) == (0, 0) for state in states)


def test_j7_a_lock_whose_holder_does_not_exist_in_the_child(python: Python, tmp_path: Path) -> None:
    """J7: forked while another thread holds every lock of telemetry: the child uses none of them."""
    code = """
import os, sys, threading
from hwr import telemetry
from hwr.telemetry import events as E, process
telemetry.configure(run_dir=sys.argv[1])
hub, alive = process.current_hub(), process._process.alive
held, done = threading.Event(), threading.Event()
def hold():
    with hub._lock, process._process.lock, alive._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
span = telemetry.span(E.StepsBegun(steps=1))
span.__enter__()
thread.start()
held.wait()
child = os.fork()
if child == 0:
    span.progress(E.ChecksumProgress(done_bytes=1, planned_bytes=1))
    span.__exit__(None, None, None)
    hub.snapshot()
    hub.new_operation()
    telemetry.emit(E.StepsEnded(steps=1))
    telemetry.close()
    os._exit(3)
done.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code, tmp_path) == "3\n"
    assert len(list(worker_directories(tmp_path))) == 2


def test_disabled_is_nothing_at_all(python: Python, tmp_path: Path) -> None:
    """enabled=False: no file, no thread, no environment; spans and events cost nothing and fail nowhere, in a child too."""
    code = """
import os, sys, threading
from hwr import telemetry
from hwr.telemetry import events as E
before = dict(os.environ)
assert telemetry.configure(False, run_dir=sys.argv[1]) is None
def use():
    with telemetry.span(E.LookupBegun(key="k", validation="full_checksum")) as span:
        span.add(status="hit")
        telemetry.emit(E.StepsEnded(steps=1))
    telemetry.ensure_configured()
    assert telemetry.snapshot() is None
    assert telemetry.journal_directory() is None
    assert telemetry.run_directory() is None
    assert threading.active_count() == 1
    assert dict(os.environ) == before
use()
child = os.fork()
if child == 0:
    use()
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
telemetry.close()
"""
    python(code, tmp_path)
    assert list(tmp_path.iterdir()) == []
