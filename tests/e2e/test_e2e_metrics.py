"""Every declared metric moves at least once over real starts and faults, or is named here as belonging to a later room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from cuda_standin import Standin
from e2e_processes import Forge, Programs, until
from e2e_stores import Store, copy_model
from test_e2e_registration import SERVER
from test_e2e_store_faults import STOPPED_HOLDER

from hwr.telemetry.catalogue import Kind, Observed
from hwr.telemetry.fold import apply
from hwr.telemetry.metrics import METRICS
from hwr.telemetry.reader import JournalReader
from hwr.telemetry.state import Histogram, WorkerState

# Rooms that are not built yet, and what no worker says of itself. A metric that starts to move must leave this table.
LATER: dict[str, str] = {
    "hwr_worker_stall": "only who looks from outside judges: tests/node",
    "hwr_collective_started_timestamp_seconds": "sequence parallelism",
    "hwr_collective_sequence": "sequence parallelism",
}

# A run directory of two pages: the journal meets a full disk, the load does not notice.
FULL_DISK = """
import json, sys
import hwr
from hwr.loader.factory import PretrainedFactory
with hwr.load(PretrainedFactory(sys.argv[1]), sys.argv[1], hwr.Options.of()) as loaded:
    outcome = loaded.report.outcome
print(json.dumps({"outcome": outcome, "state": hwr.telemetry.snapshot().to_json()}))
"""


def moved(state: WorkerState) -> set[str]:
    """Name the metrics that a scrape of this state would show to have moved."""
    worker, found = Observed(state=state, up=True, heartbeat_ns=state.last_ns or None), set()
    for metric in METRICS:
        values = metric.values(worker).values()
        if metric.kind is Kind.COUNTER:
            hit = any(value > 0 for value in values)
        elif metric.kind is Kind.HISTOGRAM:
            hit = any(isinstance(value, Histogram) and sum(value.counts) for value in values)
        elif metric.name.endswith("_waiters"):
            hit = any(value > 0 for value in values)
        else:
            hit = bool(list(values))
        if hit:
            found.add(metric.name)
    return found


def moved_over(records: Iterable[dict[str, Any]]) -> set[str]:
    """Fold a journal as it was written, with a scrape after each event."""
    state, found = WorkerState(), set()
    for record in records:
        apply(state, record)
        found |= moved(state)
    return found


@pytest.mark.usefixtures("as_root")
def test_every_declared_metric_moves(
    forge: Forge, programs: Programs, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store], standin: Standin, tmp_path: Path
) -> None:
    found: set[str] = set()
    store = Store(tmp_path / "store")
    arguments = ("--mode", "preferred", "--root", store.root, "--validation", "full_checksum", "--quiet", "--json")

    def start(*more: object, rc: int = 0, model: Path = tiny, **options: Any) -> None:
        done = forge.hwr("run", model, *arguments, *more, **options)
        assert done.rc == rc, done.err
        found.update(moved_over(done.journal.records))

    start()  # cold: hashed, published
    start()  # warm: validated, leased, restored
    start("--dtype", "float16")  # an explained miss
    flipped = copied(tiny_published)
    flipped.flip("model.layers.0.mlp.up_proj.weight")
    start("--root", flipped.root)  # corrupt
    bad = copy_model(tiny, tmp_path / "bad")
    os.truncate(min(bad.glob("*.safetensors")), 100)
    start(model=bad, rc=1)  # rejected
    # A wait for a lock, with a deadline, seen while it lasts.
    holder = programs.start_python(STOPPED_HOLDER, store.root / "locks" / "domain-init.lock")
    assert holder.line() == "held\n"
    start("--hwr-coordination-timeout-seconds", "1")
    # A minute's sample of the allocator: the first is taken as the beating begins.
    held = programs.start_hwr("run", tiny, "--hold", "--quiet")

    def sampled() -> bool:
        journal = held.journal()
        return journal is not None and bool(journal.of("hwr.memory.allocator.sample"))

    until(sampled, "a sample of the allocator")
    journal = held.journal()
    assert journal is not None
    found |= moved_over(journal.records)
    # A line that is no event.
    torn = tmp_path / "torn"
    shutil.copytree(journal.path, torn)
    with (torn / "events.000001.jsonl").open("ab") as file:
        file.write(b"{]\n")
    reader = JournalReader(torn)
    found |= moved(reader.poll())
    reader.close()
    # A disk that is full of something else.
    (tmp_path / "full").mkdir()
    prepare = f"mount('-t', 'tmpfs', '-o', 'mode=0700,size=8k', 'tmpfs', {str(tmp_path / 'full')!r})"
    done = forge.python(FULL_DISK, tiny, env={"HWR_RUN_DIR": str(tmp_path / "full")}, prepare=prepare)
    assert done.rc == 0, done.err
    told = json.loads(done.out)
    assert told["outcome"] == "canonical_direct"
    found |= moved(WorkerState.from_json(told["state"]))

    # A registration that holds, and one that is rolled back.
    for actions in ((), ("register 1 fail 2",)):
        standin.configure(*actions)
        done = forge.python(SERVER, tiny, copied(tiny_published).root, standin.path, "{}", "close")
        assert done.rc == 0, done.err
        found |= moved_over(done.journal.records)
    # A diagnosis tells of itself as a worker does.
    probe = ("--mode", "reuse", "--iterations", "200", "--sample-every", "50", "--run-dir", str(tmp_path / "probe"))
    told = subprocess.run([sys.executable, "-m", "diag.cli.main", "retention", "run", *probe], capture_output=True, timeout=120)
    assert told.returncode == 3, "too few calls for a verdict, and all that is needed here"
    (directory,) = (tmp_path / "probe").glob("*/r*")
    reader = JournalReader(directory)
    found |= moved(reader.poll())
    reader.close()

    declared = {metric.name for metric in METRICS}
    assert declared - found == set(LATER), "declared and never moved: give it a run, or say which later room it belongs to"
    store.remove()
