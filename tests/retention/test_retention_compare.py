"""Two environments side by side: what differs is said, and what cannot be told is never the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from retention_builders import killed, matrix_directory, run_object, samples_text

from diag.cli.main import parsed
from diag.probes.matrix import Case
from diag.probes.retention_files import collect
from diag.report.retention_compare import Comparison, lines, side_by_side
from hwr.errors import OptionError


def written(path: Path, run: dict[str, Any]) -> Path:
    path.write_text(json.dumps(run))
    return path


def compared(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    chosen = parsed(["retention", "compare", *map(str, words)])
    status = chosen.command(chosen)
    return status, capsys.readouterr().out


def test_the_same_twice_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (matrix_directory(tmp_path / name, blocks=2.0, size=64.0) for name in ("before", "after"))
    status, told = compared(capsys, before, after)
    assert status == 0
    assert "0 of 4 cases differ, 4 are the same." in told
    assert "Nothing that the runs tell of their environments differs." in told


def test_a_case_that_was_mended_is_a_finding_and_only_what_differs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = matrix_directory(tmp_path / "before", safetensors="0.5.3", blocks=2.0, size=64.0)
    after = matrix_directory(tmp_path / "after", safetensors="0.8.0")
    status, told = compared(capsys, before, after, "--json")
    found = json.loads(told)
    assert status == 1
    assert found["environment"] == {"safetensors": {"before": "0.5.3", "after": "0.8.0"}}
    assert {(case["mode"], case["comparison"]) for case in found["cases"]} == {("get_tensor", "differs"), ("reuse", "same")}
    assert [finding["code"] for finding in found["findings"]] == ["differs", "differs"]
    assert found["cases"][0]["reasons"][0] == "retained before, flat after"


def test_the_same_verdict_with_intervals_apart_differs(tmp_path: Path) -> None:
    before, after = (collect(written(tmp_path / f"{blocks}.json", run_object(blocks=blocks, size=32.0 * blocks))) for blocks in (1.0, 2.0))
    (pair,) = side_by_side(before, after).pairs
    assert pair.comparison is Comparison.DIFFERS
    assert pair.reasons == ("blocks per call differ", "bytes per call differ")


@pytest.mark.parametrize("other", ["killed", "unjudged"])
def test_what_has_no_verdict_on_one_side_is_unknown_and_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    whole = written(tmp_path / "whole.json", run_object(blocks=2.0, size=64.0))
    run = killed(run_object(), 5) if other == "killed" else run_object(blocks=2.0, size=64.0, judged=False)
    status, told = compared(capsys, whole, written(tmp_path / "other.json", run))
    assert status == 3
    assert "1 case cannot be told" in told
    assert "not measured" in told


def test_nothing_in_common_is_not_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = written(tmp_path / "one.json", run_object("get_tensor"))
    other = written(tmp_path / "other.json", run_object("get_slice"))
    status, told = compared(capsys, one, other)
    assert status == 3
    assert "Nothing can be compared" in told
    assert "Only before: get_tensor, 64 elements, offset 0." in told


def test_a_case_that_one_side_has_is_listed_and_the_answer_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = matrix_directory(tmp_path / "before")
    after = matrix_directory(tmp_path / "after", modes=("get_tensor", "reuse", "load_file"))
    status, told = compared(capsys, before, after)
    assert status == 3
    told = " ".join(told.split())
    assert "Only after: load_file, 64 elements, offset 0; load_file, 64 elements, offset 4000." in told
    assert "0 of 4 cases differ, 4 are the same. This is no whole answer: 2 cases are on one side only." in told


@pytest.mark.parametrize("mended", [False, True])
def test_a_run_that_cannot_be_read_leaves_no_whole_answer_whatever_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mended: bool
) -> None:
    before = matrix_directory(tmp_path / "before", blocks=2.0, size=64.0)
    after = matrix_directory(tmp_path / "after", **({} if mended else {"blocks": 2.0, "size": 64.0}))
    (after / "get_tensor-64-1.json").write_text("{")
    status, told = compared(capsys, before, after, "--json")
    found = json.loads(told)
    assert (status, found["complete"], len(found["findings"])) == (3, False, 2 if mended else 0)
    _, told = compared(capsys, before, after)
    assert "This is no whole answer: 1 file was left out." in told


def test_a_run_that_was_killed_names_the_command_that_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = matrix_directory(tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    samples = tmp_path / "killed" / "get_tensor-64-1.samples.jsonl"
    samples.write_text(samples_text(run_object(), 6))
    chosen = parsed(["retention", "compare", str(whole), str(tmp_path / "killed")])
    with pytest.raises(OptionError, match=re.escape(f"hwr-diag retention plot {samples}`")):
        chosen.command(chosen)


def test_a_function_of_the_users_is_one_case_whatever_the_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = written(tmp_path / "one.json", run_object("call", 64))
    other = written(tmp_path / "other.json", run_object("call", 16, 4000))
    status, told = compared(capsys, one, other)
    assert status == 0
    assert re.search(r"^call +- +- +before +flat", told, re.MULTILINE)
    _, told = compared(capsys, one, other, "--json")
    (case,) = json.loads(told)["cases"]
    assert (case["tensor_elements"], case["offset_bytes"]) == (None, None)


def test_two_runs_of_one_case_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = matrix_directory(tmp_path / "before", blocks=2.0, size=64.0)
    status, _ = compared(capsys, before / "get_tensor-64-2.json", before / "get_tensor-64-1.json")
    assert status == 0


def test_repetitions_that_disagree_are_not_called_the_same(tmp_path: Path) -> None:
    before, after = (matrix_directory(tmp_path / name, blocks=2.0, size=64.0) for name in ("before", "after"))
    written(after / "get_tensor-64-2.json", run_object())
    pairs = {pair.case: pair for pair in side_by_side(collect(before), collect(after)).pairs}
    assert pairs[Case("get_tensor", 64, 0)].after.verdicts == ("flat", "retained")
    assert pairs[Case("get_tensor", 64, 0)].comparison is Comparison.UNKNOWN


def test_the_allocator_environment_and_the_arguments_are_told_where_they_differ(tmp_path: Path) -> None:
    plain = collect(written(tmp_path / "plain.json", run_object()))
    allocator = {"libc": "glibc 2.36", "environment": {"MALLOC_ARENA_MAX": "1"}}
    tuned = collect(written(tmp_path / "tuned.json", run_object(iterations=40_000, allocator=allocator)))
    assert side_by_side(plain, tuned).environment == {
        "arguments.iterations": ("20000", "40000"),
        "arguments.sample_every": ("2000", "4000"),
        "allocator.environment.MALLOC_ARENA_MAX": ("-", "1"),
    }


def test_text_from_a_file_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    before = collect(written(tmp_path / "a.json", run_object()))
    after = collect(written(tmp_path / "b.json", run_object(safetensors="0.8\x1b[31m\n9")))
    told = "\n".join(lines(side_by_side(before, after)))
    assert "\x1b" not in told
    assert "0.8\\x1b[31m 9" in told


def test_an_input_that_is_no_run_names_its_side(tmp_path: Path) -> None:
    good = written(tmp_path / "good.json", run_object())
    (tmp_path / "bad.json").write_text("{}")
    chosen = parsed(["retention", "compare", str(good), str(tmp_path / "bad.json")])
    with pytest.raises(OptionError, match=r"AFTER .*schema_version"):
        chosen.command(chosen)


def test_the_text_fits_a_terminal_of_a_hundred_columns(tmp_path: Path) -> None:
    before = collect(matrix_directory(tmp_path / "b", blocks=3.0, size=12345.6))
    after = collect(matrix_directory(tmp_path / "a", safetensors="0.5.3", blocks=2.0, size=123.4))
    told = [line for line in lines(side_by_side(before, after)) if not line.startswith(("before  /", "after   /"))]
    assert max(map(len, told)) <= 100
    assert "leak" not in "\n".join(told).lower()
