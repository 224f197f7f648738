"""What is read from files that somebody else may have written: with its type, or refused in two lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from retention_builders import killed, matrix_directory, run_object, samples_text

from diag.probes.matrix import Case
from diag.probes.retention_files import MAX_FILE_BYTES, collect
from hwr.errors import OptionError


def changed(path: str, value: Any) -> str:
    """Return a run's text with one value changed; `path` has dots."""
    run = run_object(blocks=2.0, size=64.0)
    *way, last = path.split(".")
    holder: Any = run
    for step in way:
        holder = holder[int(step)] if step.isdecimal() else holder[step]
    if value is KeyError:
        del holder[last]
    else:
        holder[last] = value
    return json.dumps(run)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("[" * 200_000, "nested too deeply"),
        ('{"schema_version": 1, "pid": ' + "9" * 5000 + "}", "not JSON"),
        ('{"schema_version": NaN}', "NaN is not JSON"),
        ("{}", "schema_version is null"),
        (changed("schema_version", 2), "schema_version is 2, and this version reads 1"),
        (changed("schema_version", True), "schema_version is true"),
        (changed("arguments", KeyError), "it has no arguments"),
        (changed("arguments.mode", "../x"), "arguments.mode"),
        (changed("arguments.tensor_elements", -1), "arguments.tensor_elements is -1"),
        (changed("arguments.tensor_elements", 0), "arguments.tensor_elements is 0"),
        (changed("arguments.iterations", "many"), "arguments.iterations"),
        (changed("samples", {}), "samples is an object"),
        (changed("samples.1.anonymous_bytes", None), "samples[1].anonymous_bytes"),
        (changed("samples.1.phase", "later"), "samples[1] is not a sample"),
        (changed("analysis.verdict", "fine"), 'analysis.verdict is "fine"'),
        (changed("analysis.bytes_per_call.low", "0"), "analysis.bytes_per_call.low"),
        (changed("analysis.malloc_bytes_per_call.low", "0"), "analysis.malloc_bytes_per_call.low"),
        (changed("complete", 1), "complete is 1"),
        (changed("control", {"schema_version": 1}), "it has no arguments"),
    ],
)
def test_a_file_that_is_no_run_is_refused_with_what_is_wrong_and_the_way_out(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OptionError) as refused:
        collect(tmp_path / "run.json")
    assert said in refused.value.cause
    assert "run.json" in refused.value.cause
    assert refused.value.way_out
    assert refused.value.exit_code == 2


def test_an_infinite_figure_is_refused(tmp_path: Path) -> None:
    text = json.dumps(run_object(blocks=2.0)).replace('"estimate": 2.', '"estimate": 1e999, "was": 2.', 1)
    assert "1e999" in text
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OptionError, match="estimate is Infinity"):
        collect(tmp_path / "run.json")


def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(OptionError, match="at most"):
        collect(tmp_path / "run.json")


def test_a_fifo_does_not_hold_us_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(OptionError, match="not a regular file"):
        collect(tmp_path / "run.json")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="ENOENT"):
        collect(tmp_path / "nowhere")


def test_the_fields_own_object_without_our_additions_is_read(tmp_path: Path) -> None:
    own = (
        "schema_version arguments python torch safetensors kernel hostname pid cpu_affinity torch_threads pythonmalloc "
        "preparation_seconds samples"
    )
    run = {name: value for name, value in run_object().items() if name in own.split()}
    run["arguments"] = {name: run["arguments"][name] for name in ("mode", "tensor_elements", "iterations", "sample_every", "warmup")}
    (tmp_path / "theirs.json").write_text(json.dumps(run))
    (read,) = collect(tmp_path / "theirs.json").runs
    assert (read.case, read.complete, read.verdict) == (Case("get_tensor", 64, 0), True, None)


@pytest.mark.parametrize("torn", [False, True])
def test_the_samples_of_a_killed_run_are_read_as_far_as_they_came(tmp_path: Path, torn: bool) -> None:
    path = tmp_path / "get_tensor-64-1.samples.jsonl"
    path.write_text(samples_text(run_object(), 6, torn=torn))
    (read,) = collect(path).runs
    assert (len(read.samples), read.complete) == (6, False)


def test_a_directory_is_read_without_what_cannot_be_and_that_is_said(tmp_path: Path) -> None:
    directory = matrix_directory(tmp_path / "m", blocks=2.0, size=64.0)
    (directory / "get_tensor-64-1.json").write_text("{")
    (directory / "load_file-64-1.samples.jsonl").write_text(samples_text(run_object("load_file"), 3))
    (directory / "notes.json").write_text("[]")
    found = collect(directory)
    assert len(found.runs) == 7
    assert [sentence.partition(":")[0] for sentence in found.unread] == ["get_tensor-64-1.json", "load_file-64-1.samples.jsonl"]


def test_an_empty_directory_holds_no_runs(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="it holds no runs"):
        collect(tmp_path)


def test_a_run_that_was_killed_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(killed(run_object(), 4)))
    (read,) = collect(tmp_path / "run.json").runs
    assert not read.complete
