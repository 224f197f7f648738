"""A real model, cold in one process and warm in the next: what each says, in three projections of the same events."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_processes import Done, Forge, Journal, Programs, Running, until
from e2e_stores import Store, evict, payload_was_read
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from hwr.telemetry.events import SegmentOpened
from hwr.units import bytes_text

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# The timestamp that logging puts first; everything after it is ours.
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) (hwr\.\w+) (.*)")
# Verbs of pairs as the log projection words them, by the last word of the event's name.
# Worded for people, and told apart by R6's own tests.
OWN_LINES = {f"hwr.registration.{name}" for name in ("mapping.begin", "chunk.begin", "chunk.end")} | {"hwr.transport.choice.record"}
WORDED = {"begin": ("begins",), "end": ("done", "failed", "timed out", "end"), "progress": ("goes on",)}


@dataclass(frozen=True)
class Start:
    """One start that was held, scraped and ended by a signal."""

    report: dict[str, Any]
    text: str
    openmetrics: str
    journal: Journal
    """As it was when the metrics were scraped."""
    done: Done


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Iterator[tuple[Start, Start, Store, bool]]:
    """A cold and a warm start of one model on one store, and whether the warm one read the canonical weights."""
    programs = Programs(tmp_path_factory.mktemp("starts"))
    store = Store(programs.base / "store")
    arguments = ("run", minilm, "--mode", "preferred", "--root", store.root, "--validation", "full_checksum", "--json")
    more = ("--hold", "--metrics-port", "0", "--log-level", "debug", "--quiet", "--engine", "lm")
    cold = held(programs.start_hwr(*arguments, *more))
    weights = minilm / "model.safetensors"
    evict(weights)
    warm = held(programs.start_hwr(*arguments, *more))
    yield cold, warm, store, payload_was_read(weights)
    programs.close()
    store.remove()


def held(running: Running) -> Start:
    report = json.loads(running.line() or running.stop(signal.SIGKILL).err)

    def serving() -> bool:
        journal = running.journal()
        return journal is not None and journal.state.phase() == "serving"

    until(serving, "serving")

    def both() -> tuple[str, str, Journal] | None:
        """Scrape between two looks at the journal that show the same: a heartbeat's event may fall between."""
        before = running.journal()
        text, other = scrape(report["metrics"]), scrape(report["metrics"], OPENMETRICS)
        after = running.journal()
        assert before is not None
        assert after is not None
        return (text, other, after) if before.state.seq == after.state.seq else None

    text, other, journal = until(both, "a scrape without an event meanwhile")
    return Start(report, text, other, journal, running.stop(signal.SIGTERM))


def scrape(url: str, accept: str = "text/plain") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith(accept.partition(";")[0])
        text: str = answer.read().decode()
        return text


# cold, then warm -------------------------------------------------------------------------------------------------


def test_a_cold_start_falls_back_and_publishes(starts: tuple[Start, Start, Store, bool]) -> None:
    cold, _, store, _ = starts
    assert cold.report["outcome"] == "canonical_fallback"
    assert cold.report["publication"] == "published"
    assert cold.report["key"] == store.key
    assert cold.journal.state.resolutions == {"canonical_fallback|preferred": 1}
    assert cold.journal.state.publications == {"published": 1}
    assert store.temporary == store.quarantined == store.denied == []


def test_a_warm_start_hits_and_never_reads_the_canonical_weights(starts: tuple[Start, Start, Store, bool]) -> None:
    _, warm, store, canonical_was_read = starts
    assert warm.report["outcome"] == "local_hit"
    assert warm.report["key"] == store.key
    assert warm.report["publication"] is None
    assert warm.journal.state.resolutions == {"local_hit|preferred": 1}
    assert not canonical_was_read
    # R10: the ordinary loading of the component was skipped, and so was hashing the source.
    assert set(warm.report["stage_seconds"]) == {"inspect", "domain", "import", "identity", "lookup", "skeleton", "restore", "register"}
    (digest,) = warm.journal.of("hwr.checkpoint.digest.end")
    assert (digest["files"], digest["hashed"]) == (1, 0)
    assert len(store.digest_entries) == 1


def test_the_eviction_proof_can_fail(forge: Forge, minilm: Path) -> None:
    """Loading the ordinary way after the same eviction is seen in the page cache."""
    evict(minilm / "model.safetensors")
    assert forge.hwr("run", minilm, "--steps", 0).rc == 0
    assert payload_was_read(minilm / "model.safetensors")


def test_both_starts_compute_the_same_bits_as_stock_loading(starts: tuple[Start, Start, Store, bool], forge: Forge, minilm: Path) -> None:
    cold, warm, _, _ = starts
    stock = forge.python(STOCK, minilm, "BertModel")
    assert stock.rc == 0, stock.err
    assert cold.report["output_sha256"] == warm.report["output_sha256"] == stock.out.strip()


STOCK = """
import sys, transformers, torch
from hwr.cli.synthetic import digest_of, synthetic_input
model = getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    print(digest_of(model(**synthetic_input(model))[0]))
"""


def test_sigterm_while_holding_closes_the_lease_and_writes_the_exit(starts: tuple[Start, Start, Store, bool]) -> None:
    for start in starts[:2]:
        assert start.done.rc == 128 + signal.SIGTERM
        state = start.done.state
        assert state.exited
        assert state.phase() == "exited"
        assert state.leases == {}
        assert [attrs["phase"] for attrs in start.done.journal.of("hwr.worker.phase.change")][-2:] == ["serving", "terminating"]
    _, warm, _, _ = starts
    assert warm.journal.state.lease_acquisitions == len(warm.done.journal.of("hwr.store.lease.close")) == 1


# one event, three projections ------------------------------------------------------------------------------------


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in prometheus(text):
        for sample in family.samples:
            key = (sample.name, frozenset((name, value) for name, value in sample.labels.items() if name not in ("engine", "rank")))
            assert key not in found, f"a second series {key}"
            found[key] = sample.value
    return found


@pytest.mark.parametrize("which", [0, 1], ids=["cold", "warm"])
def test_metrics_say_what_the_fold_says(starts: tuple[Start, Start, Store, bool], which: int) -> None:
    start = starts[which]
    assert isinstance(start, Start)
    state, told = start.journal.state, samples(start.text)

    def value(name: str, **labels: str) -> float:
        return told[name, frozenset(labels.items())]

    for outcome_mode, count in state.resolutions.items():
        outcome, mode = outcome_mode.split("|")
        assert value("hwr_resolutions_total", outcome=outcome, mode=mode) == count
    for stage, count in state.stages.items():
        assert value("hwr_stages_total", stage=stage) == count
        assert value("hwr_stage_seconds_total", stage=stage) == pytest.approx(state.stage_seconds[stage])
    for purpose in ("source", "publish", "verify"):
        assert value("hwr_checksum_bytes_total", purpose=purpose) == state.checksum_bytes.get(purpose, 0)
    for event, count in state.events.items():
        assert value("hwr_events_total", event=event) == count
    assert value("hwr_publication_bytes_total") == state.publication_bytes == (start.report["bytes"] if which == 0 else 0)
    assert value("hwr_lease_acquisitions_total") == state.lease_acquisitions == which
    assert value("hwr_tensors_materialized_total") == state.tensors_materialized == (0 if which == 0 else start.report["tensors"])
    assert value("hwr_worker_phase", hwr_worker_phase="serving") == 1
    assert value("hwr_events_malformed_total") == 0


@pytest.mark.parametrize("which", [0, 1], ids=["cold", "warm"])
def test_log_lines_say_what_the_journal_says(starts: tuple[Start, Start, Store, bool], which: int) -> None:
    start = starts[which]
    assert isinstance(start, Start)
    lines = [match.groups() for line in start.done.lines() if (match := LOG_LINE.fullmatch(line))]
    assert len(lines) == len(start.done.lines()), "every line of standard error is a log line"
    records = [record for record in start.done.journal.records if record["event"] != SegmentOpened.NAME]
    assert len(lines) == len(records)
    told: Counter[str] = Counter()
    for (_, logger, text), record in zip(lines, records, strict=True):
        _, room, noun, verb = record["event"].split(".")
        assert logger == f"hwr.{room}"
        own = record["event"] in OWN_LINES
        assert own or text.startswith(tuple(f"{noun.replace('_', ' ')} {word}" for word in WORDED.get(verb, (verb,)))), (
            text,
            record["event"],
        )
        told[record["event"]] += 1
        if "bytes" in record["attrs"] and not own:
            assert f"bytes={bytes_text(record['attrs']['bytes'])}" in text
    assert told == start.done.state.events


def test_log_lines_of_a_begin_precede_those_of_its_end(starts: tuple[Start, Start, Store, bool]) -> None:
    """R6: synchronous lines, in the order of what happened."""
    cold, _, _, _ = starts
    text = cold.done.err
    assert text.index("publication begins") < text.index("publication done") < text.index("resolution done")


@pytest.mark.parametrize("which", [0, 1], ids=["cold", "warm"])
def test_both_formats_hold_the_same_and_no_series_twice(starts: tuple[Start, Start, Store, bool], which: int) -> None:
    start = starts[which]
    assert isinstance(start, Start)
    one = {key: value for key, value in samples(start.text).items() if not key[0].endswith("_created")}
    other: dict[Any, float] = {}
    for family in openmetrics(start.openmetrics):
        for sample in family.samples:
            key = (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k not in ("engine", "rank")))
            assert key not in other, f"a second series {key}"
            other[key] = sample.value
    changing = {"hwr_heartbeat_timestamp_seconds"}  # a beat may fall between the two scrapes
    assert {k: v for k, v in one.items() if k[0] not in changing} == {k: v for k, v in other.items() if k[0] not in changing}
    assert start.openmetrics.endswith("# EOF\n")


@pytest.mark.parametrize("which", [0, 1], ids=["cold", "warm"])
def test_promtool_has_nothing_to_say(starts: tuple[Start, Start, Store, bool], which: int) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert os.environ.get("HWR_REQUIRE_SERVICES") != "1", "promtool is required here"
        pytest.skip("promtool is not installed")
    start = starts[which]
    assert isinstance(start, Start)
    done = subprocess.run([promtool, "check", "metrics"], input=start.text, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_journal_of_a_start_matches_its_schema(starts: tuple[Start, Start, Store, bool]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    directory = Path(__file__).parents[2] / "docs" / "schema" / "events"
    checked = 0
    for start in starts[:2]:
        for record in start.done.journal.records:
            path = directory / f"{record['event']}.json"
            assert path.is_file(), f"{record['event']} has no schema"
            jsonschema.validate(record, json.loads(path.read_text()))
            checked += 1
    assert checked > 100


def test_the_module_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "hwr.cli.main", "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"hwr \d+\.\d+\.\d+\n", done.stdout)
