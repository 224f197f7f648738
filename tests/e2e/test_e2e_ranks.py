"""`hwr run` with several ranks: each has the same options, a journal of its own, and ends when the command does (R2, R3)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e_processes import Done, Programs, Running, journals, until
from e2e_stores import Store

from hwr.options import OPTIONS
from hwr.telemetry.alive import is_held

AWAY = (
    "--host-weight-runtime-mode",
    "preferred",
    "--host-weight-runtime-validation",
    "full_checksum",
    "--hwr-coordination-timeout-seconds",
    "7.5",
    "--host-weight-runtime-max-store-gib",
    "80",
    "--host-weight-runtime-max-artifact-gib",
    "8.5",
    "--host-weight-runtime-min-free-gib",
    "0",
    "--host-weight-runtime-build-admission",
    "serialized",
    "--hwr-stall-after-seconds",
    "9",
    "--enable-distributed-layerwise-offload",
    "--dlo-no-use-allgather",
    "--dlo-resident-layers",
    "80",
    "--dlo-host-registration-mode",
    "disabled",
    "--dlo-host-registration-limit-gib",
    "1.5",
    "--hwr-registration-deadline-seconds",
    "11",
    "--no-pin-cpu-memory",
    "--ulysses-mode",
    "advanced_uaa",
    "--ulysses-degree",
    "2",
    "--ring-degree",
    "3",
    "--no-telemetry",
    "--metrics-port",
    "0",
)


def objects(done: Done) -> list[dict[str, Any]]:
    """Return the JSON objects that a command printed, one after the other."""
    decoder, text, found = json.JSONDecoder(), done.out.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


def test_every_rank_prints_its_own_equal_options(programs: Programs, tmp_path: Path) -> None:
    config = tmp_path / "hwr.toml"
    config.write_text("[stage.decode]\nhwr_stall_after_seconds = 5\n")
    root = tmp_path / "store"
    # Four layers at work; the model need not exist, the root is not made, and no library is loaded.
    arguments = ("run", "/nowhere", *AWAY, "--root", root, "--config", config, "--stage", "decode", "--print-config", "--json")
    env = {"HWR_ENGINE": "eight"}
    (alone,) = objects(programs.hwr(*arguments, env=env))
    ranks = objects(programs.hwr(*arguments, "--ranks", "2", env=env))
    assert sorted(rank.pop("rank") for rank in ranks) == [0, 1]
    # HWR_RUN_DIR is another one in each run of this test; everything else is equal, origins included.
    for one in (alone, *ranks):
        assert one["options"].pop("run_dir")["origin"] == "environment HWR_RUN_DIR"
        assert one == alone
    options = alone["options"]
    assert set(options) == {row.name for row in OPTIONS} - {"run_dir"}
    for row in OPTIONS:
        if row.name != "run_dir":
            assert options[row.name]["value"] != row.default, row.name
            assert options[row.name]["given"], row.name
    assert options["dlo_resident_layers"] == {"value": 80, "origin": "command line", "given": True}
    assert options["dlo_host_registration_limit_gib"]["value"] == 1.5
    assert options["engine"] == {"value": "eight", "origin": "environment HWR_ENGINE", "given": True}
    assert not root.exists()


def test_a_default_that_is_given_is_known_as_given(programs: Programs) -> None:
    (one,) = objects(programs.hwr("run", "/nowhere", "--mode", "disabled", "--print-config", "--json"))
    assert one["options"]["host_weight_runtime_mode"] == {"value": "disabled", "origin": "command line", "given": True}
    assert one["options"]["dlo_host_registration_mode"] == {"value": "auto", "origin": "default", "given": False}


def test_printing_options_loads_no_library(programs: Programs, tmp_path: Path) -> None:
    """R4."""
    script = (
        "import sys\nfrom hwr.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "assert not {'torch', 'safetensors', 'transformers', 'textual'} & set(sys.modules), sorted(sys.modules)\nsys.exit(status)"
    )
    done = programs.python(script, "run", "/nowhere", *AWAY, "--root", tmp_path / "store", "--print-config")
    assert done.rc == 0, done.err
    assert not (tmp_path / "store").exists()
    assert list(done.run_dir.iterdir()) == []


def holding(running: Running, ranks: int) -> None:
    def all_serve() -> bool:
        found = journals(running.run_dir)
        return len(found) == ranks and all(journal.state.phase() == "serving" for journal in found)

    until(lambda: all_serve() or running.process.poll() is not None, "ranks that serve")
    assert running.process.poll() is None, running.stop(signal.SIGKILL).err


def test_ranks_share_an_artifact_and_end_with_the_command(programs: Programs, tiny: Path, tiny_published: Store) -> None:
    arguments = ("run", tiny, "--mode", "required", "--root", tiny_published.root, "--ranks", "2", "--hold", "--json", "--quiet")
    running = programs.start_hwr(*arguments, "--metrics-port", "0")
    holding(running, 2)
    done = running.stop(signal.SIGTERM)
    assert done.rc == 128 + signal.SIGTERM
    reports = [json.loads(line) for line in done.out.splitlines()]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert {report["outcome"] for report in reports} == {"local_hit"}
    assert len({report["output_sha256"] for report in reports}) == 1
    assert len({report["metrics"] for report in reports}) == 2
    # One run, a journal a rank, each ended in order.
    assert len({journal.path.parent for journal in done.journals}) == 1
    assert [journal.records[0]["res"]["hwr.rank"] for journal in done.journals] == [0, 1]
    for journal in done.journals:
        assert journal.state.exited
        assert journal.state.leases == {}


@pytest.mark.soak
def test_a_rank_does_not_outlive_a_command_that_is_killed(programs: Programs, tiny: Path, tiny_published: Store) -> None:
    """An orphan would keep its memory and its lease, and nobody would know whose it is."""
    running = programs.start_hwr("run", tiny, "--mode", "required", "--root", tiny_published.root, "--ranks", "2", "--hold", "--quiet")
    holding(running, 2)
    running.process.kill()
    until(lambda: all(journal.state.exited for journal in journals(running.run_dir)), "ranks that end in order")
    until(lambda: all(is_held(journal.path) is False for journal in journals(running.run_dir)), "processes that are gone")
    assert all(journal.state.leases == {} for journal in journals(running.run_dir))
    running.process.communicate(timeout=60)


def test_the_worst_rank_gives_the_exit_status(programs: Programs, tiny: Path, tmp_path: Path) -> None:
    done = programs.hwr("run", tmp_path / "nowhere", "--mode", "required", "--root", tmp_path / "store", "--ranks", "2", "--quiet")
    assert done.rc == 1
    assert done.err.count("cannot be read") == 2
    assert done.err.count("ended with status 1") == 2
    assert [journal.failures() for journal in done.journals] == [["unreadable"], ["unreadable"]]
    assert not os.path.exists(tmp_path / "store")
