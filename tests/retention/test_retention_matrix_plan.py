"""Which runs a matrix has, in which order, under which names, and what its runs say together."""

from __future__ import annotations

import dataclasses
import re
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from retention_builders import killed, plan_of, run_object, run_of

from diag.cli import retention_matrix
from diag.probes.environment import call_digest
from diag.probes.matrix import MODES, Case, Plan, Step, differences, runs_of, stem
from diag.probes.retention import CONTROL
from diag.report.retention_matrix_summary import NOT_REACHED, repetition_of, summarize
from diag.report.retention_matrix_text import COLUMNS, run_line, text
from diag.report.retention_text import case_text
from diag.report.streams import Progress
from hwr.errors import OptionError

ENVIRONMENT = {"python": {"implementation": "CPython", "version": "3.11.2", "executable": "/usr/bin/python3"}, "packages": {}, "cpu": {}}


def test_every_case_is_measured_in_every_repetition() -> None:
    plan = Plan()
    assert {(step.case.mode, step.case.tensor_elements, step.case.offset_bytes, step.repetition) for step in plan.steps()} == set(
        product(plan.modes, plan.tensor_elements, plan.offset_bytes, (1, 2))
    )


def test_repetitions_of_a_case_lie_apart_in_time() -> None:
    steps = Plan().steps()
    half = len(steps) // 2
    assert {step.repetition for step in steps[:half]} == {1}
    assert {step.repetition for step in steps[half:]} == {2}


def test_the_control_is_the_first_of_its_group() -> None:
    steps = plan_of(modes=("get_tensor", "reuse", "load_file"), repetitions=1, offset_bytes=(0,)).steps()
    assert [step.case.mode for step in steps] == [CONTROL, "get_tensor", "load_file"]
    assert [step.control_stem for step in steps] == [None, "reuse-64-1", "reuse-64-1"]


def test_the_control_is_measured_though_nobody_asked_for_it_and_that_is_said() -> None:
    plan = plan_of(modes=("get_tensor",), repetitions=1, offset_bytes=(0,))
    control, other = plan.steps()
    assert (control.case.mode, control.asked, other.asked) == (CONTROL, False, True)
    assert "measured too" in text(summarize(plan, {}), ENVIRONMENT)


@pytest.mark.parametrize(("offset", "name"), [(0, "get_slice-4096-2"), (4000, "get_slice-4096-o4000-2")])
def test_r24_names(offset: int, name: str) -> None:
    assert Step(Case("get_slice", 4096, offset), 2).stem == stem("get_slice", 4096, offset, 2) == name


def test_a_function_of_the_users_is_measured_once_a_repetition_beside_the_first_control() -> None:
    plan = plan_of(modes=("get_tensor", "call"), call="a.py:f", tensor_elements=(16, 64))
    calls = [step for step in plan.steps() if step.case.mode == "call"]
    assert [(step.stem, step.control_stem) for step in calls] == [("call-16-1", "reuse-16-1"), ("call-16-2", "reuse-16-2")]
    assert len(plan.steps()) == runs_of(plan.modes, 4, plan.repetitions)


def test_no_size_and_no_place_is_claimed_of_a_function_of_the_users() -> None:
    plan = plan_of(modes=("call",), call="a.py:f", repetitions=1, offset_bytes=(0,))
    summary = summarize(plan, {step.stem: run_of(plan, step, file=None) for step in plan.steps()})
    assert summary.to_json()["cases"][0]["tensor_elements"] is None
    assert re.search(r"^call +- +- +- +1 flat", text(summary, ENVIRONMENT), re.MULTILINE)
    run = run_object("call")
    run["arguments"]["call"] = "a.py:f"
    assert case_text(run) == "call, a.py:f, 20,000 calls"


def test_another_function_under_the_same_name_is_another_plan(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    plans = []
    for body in ("1", "2"):
        file.write_text(f"def f(): return {body}\n")
        plans.append(plan_of(modes=("call",), call=f"{file}:f", call_sha256=call_digest(f"{file}:f")))
    (said,) = differences(plans[0].to_json(), plans[1])
    assert said.startswith("the file of --call: ")
    assert call_digest("package.module:f") is call_digest(None) is None
    directory = tmp_path / "directory.py"
    directory.mkdir()
    with pytest.raises(OptionError, match=r"--call .*EISDIR"):
        call_digest(f"{directory}:f")


@pytest.mark.parametrize("entry", ["retained", "not measured"])
def test_the_line_of_a_run_fits_a_hundred_columns(entry: str) -> None:
    plan = plan_of(tensor_elements=(4096,), offset_bytes=(65536,))
    step = plan.steps()[1]
    run = run_of(plan, step, blocks=3.0, size=12345.6) if entry == "retained" else killed(run_of(plan, step), 5)
    stream = StringIO()
    line = f"hwr-diag: 120/144 {run_line(repetition_of(step, run))}, 12m05s left"
    Progress(stream=stream).tell(line + (" and more" * 20 if entry != "retained" else ""), lasting=True)
    assert len(stream.getvalue()) <= 101
    assert entry != "retained" or stream.getvalue().endswith(" left\n")


def test_the_command_line_offers_the_modes_of_the_plan() -> None:
    assert retention_matrix.MODES == MODES


@pytest.mark.parametrize(
    "wrong", [{"modes": ()}, {"modes": ("reuse", "reuse")}, {"repetitions": 0}, {"modes": ("call",)}, {"call": "a.py:f"}]
)
def test_a_plan_that_contradicts_itself_cannot_be_made(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        plan_of(**wrong)


def test_a_plan_read_back_is_the_plan_that_was_written() -> None:
    assert differences(plan_of().to_json(), plan_of()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"iterations": 5}, "--iterations: 20000 there, 5 now"),
        ({"tensor_elements": (16, 64)}, "--tensor-elements: 64 there, 16,64 now"),
        ({"cpu": (0,)}, "--cpu: none there, 0 now"),
        ({"environment": {"python": {"version": "3.13.0"}}}, "python.version: 3.11.2 there, 3.13.0 now"),
    ],
)
def test_what_differs_between_two_plans_is_named(changed: dict[str, object], said: str) -> None:
    assert differences(plan_of().to_json(), plan_of(**changed)) == [said]


def test_a_longer_timeout_is_no_other_plan() -> None:
    assert differences(plan_of().to_json(), plan_of(timeout_seconds=300.0)) == []


def test_repetitions_that_say_the_same_agree() -> None:
    plan = plan_of()
    summary = summarize(plan, {step.stem: run_of(plan, step) for step in plan.steps()})
    assert [row.agree for row in summary.rows] == [True] * 4
    assert summary.agreement == "The repetitions of all 4 cases agree."
    assert summary.to_json()["complete"]


@pytest.mark.parametrize(
    ("second", "said"),
    [({"blocks": 3.0, "size": 64.0}, "blocks per call 2.000 and 3.000"), ({"blocks": 0.0, "size": 0.0}, "verdicts flat and retained")],
)
def test_repetitions_that_differ_are_named_with_what_they_differ_in(second: dict[str, float], said: str) -> None:
    plan = plan_of()
    runs = {step.stem: run_of(plan, step, **(second if step.stem == "get_tensor-64-2" else {})) for step in plan.steps()}
    summary = summarize(plan, runs)
    assert [row.case.offset_bytes for row in summary.rows if row.agree is False] == [0]
    assert f"1 of 4 cases do not agree: get_tensor, 64 elements, offset 0: {said}." in summary.agreement


def test_one_answer_is_no_agreement() -> None:
    plan = plan_of(repetitions=1)
    summary = summarize(plan, {step.stem: run_of(plan, step) for step in plan.steps()})
    assert {row.agree for row in summary.rows} == {None}
    assert "not known" in summary.agreement


def test_what_was_not_measured_is_listed_with_its_reason_and_is_never_flat() -> None:
    plan = plan_of()
    first, second, *_ = plan.steps()
    runs = {first.stem: run_of(plan, first), second.stem: killed(run_of(plan, second), 5)}
    summary = summarize(plan, runs, interrupted="SIGTERM")
    told = summary.to_json()
    assert (told["complete"], told["interrupted"], told["measured"], told["planned"]) == (False, "SIGTERM", 1, 8)
    assert told["totals"] == {"retained": 0, "flat": 1, "inconclusive": 0, "not_measured": 7}
    why = {entry["file"]: entry["why"] for entry in told["not_measured"]}
    assert why["get_tensor-64-1.json"].startswith("signal: the probe was ended")
    assert why["reuse-64-o4000-2.json"] == NOT_REACHED
    shown = text(summary, ENVIRONMENT)
    assert "Interrupted by SIGTERM after 1 of 8 runs" in shown
    assert "not reached: " in shown


def test_a_verdict_without_a_run_cannot_be_made() -> None:
    row = summarize(plan_of(), {}).rows[0].repetitions[0]
    with pytest.raises(ValueError):
        dataclasses.replace(row, verdict="flat")


def test_the_text_fits_a_terminal_of_a_hundred_columns() -> None:
    plan = plan_of(
        tensor_elements=(4096,), offset_bytes=(65536,), modes=("get_tensor", "get_slice", "load_file", "reopen", "reuse", "hwr_lease")
    )
    warned = {"warnings": ["other processes came or went: a (1) started; private memory changes with them"]}
    runs = {step.stem: run_of(plan, step, blocks=3.0, size=12345.6, **warned) for step in plan.steps()}
    lines = text(summarize(plan, runs), ENVIRONMENT).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert "warning (12 runs): other processes came or went" in lines


def test_the_place_of_the_tensor_is_told_for_each_case() -> None:
    plan = plan_of()
    rows = summarize(plan, {step.stem: run_of(plan, step) for step in plan.steps()}).to_json()["cases"]
    assert {(row["begin"], row["end"]) for row in rows} == {(168, 424), (4168, 4424)}


def test_no_view_says_the_word_that_is_not_ours() -> None:
    plan = plan_of()
    told = text(summarize(plan, {step.stem: run_object(step.case.mode, blocks=1.0, size=32.0) for step in plan.steps()}), ENVIRONMENT)
    assert "leak" not in told.lower()


def test_a_run_is_judged_against_the_control_of_its_group() -> None:
    plan = plan_of(offset_bytes=(0,), repetitions=1)
    control, step = plan.steps()
    drifting = run_object("reuse", blocks=0.5, size=16.0)
    run = retention_matrix.against_control(run_of(plan, step), step, {control.stem: drifting})
    assert run["control_file"] == "reuse-64-1.json"
    assert run["analysis"]["blocks_per_call"]["estimate"] == pytest.approx(1.5, abs=0.01)
    assert run["analysis"]["bytes_per_call"]["control"] == pytest.approx(16.0, abs=0.3)


def test_a_control_that_was_not_measured_is_a_warning_and_not_a_control() -> None:
    plan = plan_of(offset_bytes=(0,), repetitions=1)
    control, step = plan.steps()
    run = retention_matrix.against_control(run_of(plan, step), step, {control.stem: killed(run_object("reuse"), 3)})
    assert run["warnings"] == ["the control was not measured: signal"]
    assert run["analysis"]["blocks_per_call"]["control"] is None
