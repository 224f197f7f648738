"""J3: a full or failing disk costs events, says how many, and never a load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hwr import telemetry
from hwr.telemetry import events as E

pytestmark = pytest.mark.usefixtures("as_root")

FULL = """
import json, os, sys, threading
from pathlib import Path
import logging
logging.disable()
from hwr import telemetry
from hwr.telemetry import events as E
from hwr.telemetry.reader import JournalReader

os.system("mount -t tmpfs -o size=256k none " + sys.argv[1])
directory = telemetry.configure(run_dir=sys.argv[1])
emitted = 0
def emit(size):
    global emitted
    telemetry.emit(E.EndpointFailed(address="a", port=emitted, problem="p" * size))
    emitted += 1
while not (lost := telemetry.snapshot().dropped):
    emit(1000)
for size in (1, 3000, 50, 700):
    emit(size)
live_full = dict(telemetry.snapshot().dropped)
filler = Path(sys.argv[1], "filler")
def read():
    reader = JournalReader(directory, from_start=True)
    state = reader.poll()
    reader.close()
    return state
at_full = read()
# room again: the ballast of a neighbour goes away, here by a larger mount
os.system("mount -o remount,size=4m " + sys.argv[1])
emit(10)
emit(10)
after = read()
mine = telemetry.snapshot()
print(json.dumps({
    "emitted": emitted,
    "full": at_full.events["hwr.telemetry.endpoint.fail"],
    "full_live": live_full,
    "written": after.events["hwr.telemetry.endpoint.fail"],
    "live": mine.events["hwr.telemetry.endpoint.fail"],
    "told": after.dropped,
    "told_live": mine.dropped,
    "malformed": after.malformed,
    "gaps": after.seq_gaps,
    "notices": after.events["hwr.journal.events.drop"],
    "seq": [after.seq, mine.seq],
}))
"""


def test_j3_a_full_disk_drops_counts_and_goes_on(python: Callable[..., str], tmp_path: Path) -> None:
    """J3: nothing raises; the live state knows the number at once, one event tells it later, and a torn line harms no other."""
    told = json.loads(python(FULL, tmp_path, prefix=("unshare", "-m")))
    lost = told["emitted"] - told["written"]
    assert lost >= 5
    assert told["live"] == told["emitted"]
    assert told["told"] == told["told_live"] == {"disk_full": lost}
    assert sum(told["full_live"].values()) == lost
    assert told["notices"] == 1
    assert told["gaps"] == lost
    assert told["malformed"] <= 1  # the line that was cut short
    assert told["seq"][0] == told["seq"][1]


def test_j3_no_segment_without_room(python: Callable[..., str], tmp_path: Path) -> None:
    """J3: a new segment that finds no room leaves nothing behind; the old one is read as before, and the next attempt succeeds."""
    code = """
import os, sys
from pathlib import Path
from hwr.telemetry import events as E
from hwr.telemetry.hub import Hub
from hwr.telemetry.journal import JournalWriter
from hwr.telemetry.reader import read_state
os.system("mount -t tmpfs -o size=64k none " + sys.argv[1])
directory = Path(sys.argv[1], "w")
directory.mkdir()
hub = Hub({}, realtime_offset_ns=0)
hub.open_journal(lambda head: JournalWriter(directory, head, segment_bytes=20000))
Path(sys.argv[1], "filler").write_bytes(b"x" * 4096 * 11)
for count in range(300):
    hub.emit(E.ChecksumProgress(done_bytes=count, planned_bytes=300), op="x")
names = sorted(os.listdir(directory))
assert names == ["events.000001.jsonl"], names
os.unlink(Path(sys.argv[1], "filler"))
hub.emit(E.WorkerStarted())
assert sorted(os.listdir(directory)) == ["events.000001.jsonl", "events.000002.jsonl"]
state = read_state(directory)
assert state == hub.snapshot(), (state, hub.snapshot())
assert sum(state.dropped.values()) > 100
"""
    python(code, tmp_path, prefix=("unshare", "-m"))


@pytest.mark.parametrize("where", ["unwritable", "a file", "missing and unwritable"])
def test_j3_without_a_run_directory(where: str, python: Callable[..., str], tmp_path: Path) -> None:
    """J3: no directory: events stay in a ring in memory, one warning says so, metrics work, nothing raises."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and parent != Path("/tmp") and str(parent).startswith("/tmp"):
            parent.chmod(0o755)
    run_dir = tmp_path / "run"
    if where == "unwritable":
        run_dir.mkdir(mode=0o755)
    elif where == "a file":
        run_dir.write_text("")
    code = """
import sys, threading
import logging
from hwr import telemetry
from hwr.telemetry import events as E
assert telemetry.configure(run_dir=sys.argv[1]) is None
for count in range(3000):
    with telemetry.span(E.StageBegun(stage="lookup"), stage="lookup"):
        pass
assert telemetry.snapshot().stages == {"lookup": 3000}
assert telemetry.journal_directory() is None
from hwr.telemetry.process import current_hub
assert 0 < len(current_hub().ring) <= 2000
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
from prometheus_client import CollectorRegistry, generate_latest
registry = CollectorRegistry()
registry.register(telemetry.collector())
assert b'hwr_stages_total{engine="default",rank="0",stage="lookup"} 3000.0' in generate_latest(registry)
"""
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    stderr = python(code, run_dir, prefix=nobody, errors=True)
    (line,) = stderr.splitlines()
    assert line.startswith(f"no journal is written: {run_dir}: E")
    assert line.endswith("; events stay in memory")


def test_j3_a_descriptor_that_fails(tmp_path: Path) -> None:
    """J3: an error other than a full disk is counted under its own name."""
    directory = telemetry.configure(run_dir=tmp_path)
    assert directory is not None
    from hwr.telemetry.process import current_hub

    hub = current_hub()
    assert hub is not None
    assert hub._journal is not None
    kept, hub._journal._fd = hub._journal._fd, os.open("/dev/null", os.O_RDONLY)
    telemetry.emit(E.StepsEnded(steps=1))
    os.close(hub._journal._fd)
    hub._journal._fd = kept
    telemetry.emit(E.StepsEnded(steps=1))
    state = telemetry.snapshot()
    assert state is not None
    assert state.dropped == {"io_error": 1}
