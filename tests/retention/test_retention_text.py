"""The report of one run: nothing that was computed is kept back, and nothing looks more certain than it is."""

from __future__ import annotations

import re
from typing import Any

from retention_builders import killed, run_object

from diag.analysis.retention import judge
from diag.report.retention_text import lines


def said_of(run: dict[str, Any]) -> str:
    """Return the report of a run, judged as the verb does."""
    return "\n".join(lines({**run, "analysis": judge(run).to_json()}))


def test_what_came_before_an_early_end_is_told_as_such() -> None:
    """The estimate, its interval and what they rest on, under a headline that says that there is no verdict."""
    said = said_of(killed(run_object(blocks=2.0, size=64.0), 8))
    assert said.startswith("not measured: the probe was ended (get_tensor, ")
    assert "The run ended after 12,000 of 20,000 calls" in said
    assert re.search(r"^per call, so far +estimate +low +high", said, re.MULTILINE)
    assert re.search(r"^  interpreter blocks +2\.000 ", said, re.MULTILINE)
    assert re.search(r"^  anonymous +\+748 KiB +-$", said, re.MULTILINE)


def test_a_whole_run_has_no_word_of_so_far() -> None:
    assert "so far" not in said_of(run_object(blocks=2.0, size=64.0))


def test_what_closing_released_is_told() -> None:
    run = run_object(size=64.0)
    run["samples"][-1]["anonymous_bytes"] -= 1 << 20
    assert re.search(r"^    by closing alone +-1\.00 MiB$", said_of(run), re.MULTILINE)


def test_mallocs_own_count_is_a_row_where_there_is_one() -> None:
    run = run_object(size=64.0)
    assert re.search(r"^  malloc bytes +0\.0 ", said_of(run), re.MULTILINE)
    for sample in run["samples"]:
        sample["malloc_in_use_bytes"] = None
    assert "malloc bytes" not in said_of(run)
