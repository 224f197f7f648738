"""The directory of a matrix: one at a time, whole files, and never two matrices in one."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from retention_builders import killed, plan_of, run_of

from diag.cli.retention_directory import ENVIRONMENT, PLAN, MatrixDirectory
from hwr.errors import OptionError

ENVIRONMENT_OBJECT = {"schema_version": 1}


def _hold(path: Path, ready: Any, release: Any) -> None:
    with MatrixDirectory.locked(path):
        ready.set()
        release.wait(60)


def test_a_second_matrix_in_one_directory_is_refused_and_told_the_way_out(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "m", ready, release))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(OptionError) as refused, MatrixDirectory.locked(tmp_path / "m"):
            pass
        assert "another matrix" in refused.value.cause
        assert "-o DIR" in refused.value.way_out
    finally:
        release.set()
        other.join(60)
    with MatrixDirectory.locked(tmp_path / "m"):
        """The lock went with its process."""


def test_the_lock_goes_with_a_process_that_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, release))
    other.start()
    assert ready.wait(60)
    other.kill()
    other.join(60)
    with MatrixDirectory.locked(tmp_path):
        """It is free."""


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "get_tensor-64-1.json").write_text("{}")
    with MatrixDirectory.locked(tmp_path) as directory, pytest.raises(OptionError, match="is not empty"):
        directory.adopt(plan_of(), ENVIRONMENT_OBJECT)
    assert os.listdir(tmp_path) == ["get_tensor-64-1.json"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    with pytest.raises(OptionError, match=r"-o .*/m: ENOTDIR \(Not a directory\)"), MatrixDirectory.locked(tmp_path / "m"):
        pass


def test_the_same_plan_goes_on(tmp_path: Path) -> None:
    with MatrixDirectory.locked(tmp_path) as directory:
        assert directory.adopt(plan_of(), ENVIRONMENT_OBJECT) is False
    (tmp_path / ENVIRONMENT).unlink()  # killed before it was written
    with MatrixDirectory.locked(tmp_path) as directory:
        assert directory.adopt(plan_of(), ENVIRONMENT_OBJECT) is True
    assert (tmp_path / ENVIRONMENT).is_file()


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"repetitions": 3}, "--repetitions: 2 there, 3 now"), ({"environment": {"python": {"version": "3.14"}}}, "python.version")],
)
def test_another_plan_or_environment_is_refused_with_what_differs_and_the_way_out(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with MatrixDirectory.locked(tmp_path) as directory:
        directory.adopt(plan_of(), ENVIRONMENT_OBJECT)
        before = (tmp_path / PLAN).read_bytes()
        with pytest.raises(OptionError) as refused:
            directory.adopt(plan_of(**changed), ENVIRONMENT_OBJECT)
    assert said in refused.value.cause
    assert "-o DIR" in refused.value.way_out
    assert (tmp_path / PLAN).read_bytes() == before


def test_a_torn_plan_is_refused_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text('{"schema_version": 1, "mod')
    with MatrixDirectory.locked(tmp_path) as directory, pytest.raises(OptionError, match=r"plan\.json: it is not JSON"):
        directory.adopt(plan_of(), ENVIRONMENT_OBJECT)


def test_only_a_whole_and_judged_run_of_the_same_arguments_counts(tmp_path: Path) -> None:
    plan = plan_of()
    step = plan.steps()[1]
    whole = run_of(plan, step)
    file = tmp_path / f"{step.stem}.json"
    with MatrixDirectory.locked(tmp_path) as directory:
        assert directory.kept(step, plan) is None
        directory.finish(step, whole)
        assert directory.kept(step, plan) == whole
        for other in (
            {**whole, "analysis": None},
            {**whole, "complete": False},
            killed(whole, 4),
            {**whole, "arguments": {**whole["arguments"], "iterations": 5}},
            {**whole, "schema_version": 2},
        ):
            file.write_text(json.dumps(other))
            assert directory.kept(step, plan) is None
        file.write_text(json.dumps(whole)[:200])
        assert directory.kept(step, plan) is None


def test_the_samples_of_an_interrupted_run_are_replaced_and_gone_once_it_is_whole(tmp_path: Path) -> None:
    plan = plan_of()
    step = plan.steps()[0]
    with MatrixDirectory.locked(tmp_path) as directory:
        (tmp_path / "reuse-64-1.samples.jsonl").write_text("of the run before")
        samples = directory.samples(step)
        assert not samples.exists()
        samples.write_text("of this run")
        directory.finish(step, run_of(plan, step))
    assert os.listdir(tmp_path) == ["reuse-64-1.json"]
