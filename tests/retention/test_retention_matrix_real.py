"""Matrices with the real probe, in their smallest form: measured, killed half way, resumed, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import diag
from hwr.telemetry.reader import JournalReader

REPOSITORY = Path(diag.__file__).resolve().parents[1]
SCHEMAS = REPOSITORY / "docs" / "schema" / "hwr-diag"
# Two modes, one size, two offsets, one repetition: four processes of two seconds.
SMALL = ("--modes", "get_tensor,reuse", "--tensor-elements", "64", "--offset-bytes", "0,4000", "--repetitions", "1", "--iterations", "8000")
ORDER = ["reuse-64-1.json", "get_tensor-64-1.json", "reuse-64-o4000-1.json", "get_tensor-64-o4000-1.json"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HWR_RUN_DIR": str(tmp_path / "journals"), "PYTHONPATH": str(REPOSITORY)}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "diag.cli.main", "retention", *map(str, words)]


def asked(environment: dict[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=environment, capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL
    )


def valid(name: str, value: Any) -> Any:
    """Return a document that its published schema takes."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(value)
    return value


def loaded(path: Path) -> Any:
    return json.loads(path.read_text())


def lines_until(stream: Iterator[str], word: str) -> str:
    """Read lines until one has the word, and return it; the deadline is the test's own."""
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"it ended without a line with {word!r}")


def test_a_small_matrix_says_what_is_retained_where_and_its_objects_are_as_published(tmp_path: Path, environment: dict[str, str]) -> None:
    directory = tmp_path / "m"
    done = asked(environment, "matrix", "-o", directory, *SMALL, "--json")
    assert done.returncode == 1, done.stderr
    told = valid("retention-matrix", json.loads(done.stdout))
    assert told == loaded(directory / "summary.json")
    assert {(row["mode"], row["offset_bytes"]): row["verdicts"] for row in told["cases"]} == {
        ("get_tensor", 0): ["retained"],
        ("get_tensor", 4000): ["retained"],
        ("reuse", 0): ["flat"],
        ("reuse", 4000): ["flat"],
    }
    for name in ORDER:
        run = valid("retention-run", loaded(directory / name))
        assert run["control"] is None
        assert run["control_file"] == (None if run["arguments"]["mode"] == "reuse" else name.replace("get_tensor", "reuse"))
        assert (run["analysis"]["bytes_per_call"]["control"] is None) == (run["control_file"] is None)
    plan = loaded(directory / "plan.json")
    assert [f"{stem}.json" for stem in plan["order"]] == ORDER
    facts = loaded(directory / "environment.json")
    assert facts["packages"]["safetensors"]["version"] == loaded(directory / ORDER[0])["safetensors"]
    assert {"revision.txt", "working-tree.txt", "working-tree.patch", "summary.txt"} <= set(os.listdir(directory))
    assert not [name for name in os.listdir(directory) if name.endswith(".jsonl") or name.startswith(".")]
    said = [line for line in done.stderr.splitlines() if "/4 " in line and " a call" in line]
    assert [line.split()[1] for line in said] == ["1/4", "2/4", "3/4", "4/4"]
    assert all("left" in line for line in said[:-1])

    compared = asked(environment, "compare", directory, directory, "--json")
    assert compared.returncode == 0
    valid("retention-compare", json.loads(compared.stdout))


def test_a_matrix_that_was_killed_and_interrupted_goes_on_where_it_stopped(tmp_path: Path, environment: dict[str, str]) -> None:
    directory = tmp_path / "m"
    matrix = command("matrix", "-o", directory, *SMALL)

    with subprocess.Popen(matrix, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as first:
        assert first.stderr is not None
        lines_until(first.stderr, "1/4 reuse-64-1: flat")
        second = asked(environment, "matrix", "-o", directory, *SMALL)
        assert second.returncode == 2
        cause, way_out = second.stderr.splitlines()
        assert "another matrix is being measured into it" in cause
        assert "-o DIR" in way_out
        first.kill()
    kept = (directory / ORDER[0]).stat()

    with subprocess.Popen(matrix, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as again:
        assert again.stderr is not None
        already = lines_until(again.stderr, "there already")
        done = int(already.split()[1])
        assert done >= 1
        lines_until(again.stderr, f"{done + 1}/4 ")
        again.send_signal(signal.SIGTERM)
        told, _ = again.communicate(timeout=60)
    assert again.returncode == 128 + signal.SIGTERM
    assert f"Interrupted by SIGTERM after {done} of 4 runs" in told or f"Interrupted by SIGTERM after {done + 1} of 4 runs" in told
    summary = valid("retention-matrix", loaded(directory / "summary.json"))
    assert (summary["complete"], summary["interrupted"]) == (False, "SIGTERM")
    assert {entry["why"] for entry in summary["not_measured"]} == {"not reached"}

    (directory / ORDER[1]).write_text('{"schema_version": 1, "arg')  # torn by a full disk, say
    last = asked(environment, "matrix", "-o", directory, *SMALL)
    assert last.returncode == 1, last.stderr
    assert loaded(directory / "summary.json")["complete"]
    now = (directory / ORDER[0]).stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert not [name for name in os.listdir(directory) if name.endswith(".jsonl")]

    other = asked(environment, "matrix", "-o", directory, *SMALL[:-1], "9000")
    assert other.returncode == 2
    assert "--iterations: 8000 there, 9000 now" in other.stderr
    tuned = asked({**environment, "MALLOC_ARENA_MAX": "1"}, "matrix", "-o", directory, *SMALL)
    assert tuned.returncode == 2
    assert "allocator.environment.MALLOC_ARENA_MAX: none there, 1 now" in tuned.stderr


def test_a_threshold_is_found_with_the_place_on_both_sides(tmp_path: Path, environment: dict[str, str]) -> None:
    """Which integers CPython keeps one object of (up to 256) decides what a slice's bounds cost; the header moves the begin."""
    words = ("--find-threshold", "elements", "--tensor-elements", "22,24", "--iterations", "3000", "-o", tmp_path / "t", "--json")
    done = asked(environment, "matrix", *words)
    told = valid("retention-threshold", json.loads(done.stdout))
    assert told == loaded(tmp_path / "t" / "threshold-get_tensor-elements.json")
    if not told["thresholds"]:  # a safetensors that keeps nothing has no step
        assert (done.returncode, told["conclusive"]) == (0, True)
        return
    assert done.returncode == 1
    (directory,) = {path.parent for path in Path(environment["HWR_RUN_DIR"]).rglob("*.jsonl")}
    reader = JournalReader(directory, from_start=True)
    counted = reader.poll().events
    reader.close()
    assert counted["hwr.retention.run.begin"] == counted["hwr.retention.run.end"] == told["runs"]
    (step,) = told["thresholds"]
    assert (step["below"]["end"], step["at"]["end"], step["reproduced"]) == (256, 260, True)
    assert round(step["at"]["blocks_per_call"] - step["below"]["blocks_per_call"], 1) == 1.0


def test_without_block_counts_a_threshold_is_inconclusive(environment: dict[str, str]) -> None:
    words = ("--find-threshold", "offset", "--offset-bytes", "0,8", "--iterations", "3000", "--quiet")
    done = asked({**environment, "PYTHONMALLOC": "malloc"}, "matrix", *words)
    assert done.returncode == 3
    assert "Inconclusive: offset 0: this interpreter counts no blocks" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("matrix",), "-o/--output"),
        (("matrix", "-o", "m", "--modes", "get_tenor"), "'get_tenor' is none of"),
        (("matrix", "-o", "m", "--modes", "reuse,reuse"), "twice"),
        (("matrix", "-o", "m", "--tensor-elements", "16,0"), "'0' is not a whole number of at least 1"),
        (("matrix", "-o", "m", "--modes", "call"), "go together"),
        (("matrix", "-o", "m", "--mode", "get_tensor"), "--modes"),
        (("matrix", "-o", "m", "--repetitions", "9999"), "at most"),
        (("matrix", "-o", "m", "--header-bytes", "162"), "not a multiple of 8"),
        (("matrix", "--find-threshold", "elements", "--modes", "reuse"), "one mode"),
        (("matrix", "--find-threshold", "elements", "--tensor-elements", "64"), "LOW,HIGH"),
        (("matrix", "--find-threshold", "elements", "--offset-bytes", "0,8"), "one value"),
        (("matrix", "--find-threshold", "offset", "--iterations", "100"), "bookkeeping"),
        (("matrix", "--find-threshold", "offset", "--mode", "get_tenor"), "invalid choice"),
        (("matrix", "--find-threshold", "offset", "--mode", "call"), "invalid choice"),
        (("matrix", "--find-threshold", "offset", "--call", "a.b:f"), "no size and no offset"),
        (("matrix", "-o", " "), "argument -o/--output: ' ' is blank"),
        (("matrix", "-o", "m", "--python", ""), "argument --python: '' is blank"),
        (("matrix", "-o", "m", "--modes", "call", "--call", ""), "argument --call: '' is not FILE.py:FUNCTION"),
        (("compare", "", "x"), "argument BEFORE: '' is blank"),
        (("plot", ""), "argument PATH: '' is blank"),
        (("matrix", "--find-threshold", "offset", "--attribute"), "--attribute"),
        (("compare", "only-one"), "AFTER"),
        (("plot", "x", "--measure", "pss"), "invalid choice"),
    ],
)
def test_wrong_words_are_refused_in_two_lines_before_anything_is_made(
    tmp_path: Path, environment: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    done = subprocess.run(command(*words), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("verb", ["matrix", "compare", "plot"])
def test_help_loads_no_large_library(environment: dict[str, str], verb: str) -> None:
    large = "{'torch', 'numpy', 'matplotlib', 'plotext', 'textual'}"
    script = f"import sys; from diag.cli.main import main\ntry: main()\nfinally: print(sorted({large} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script, "retention", verb, "--help"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    *said, loaded_ones = done.stdout.splitlines()
    assert loaded_ones == "[]"
    assert any("usage: hwr-diag retention" in line for line in said)
