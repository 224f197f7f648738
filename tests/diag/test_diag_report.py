"""What every verb says: findings, one JSON object, an exit status, and two streams that fail as what they are."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

import diag
from diag.report.document import document, dumped, print_document, write_document
from diag.report.exits import Exit, combined, of_findings
from diag.report.findings import Finding
from diag.report.streams import LINE_SECONDS, NotWritten, Progress, note, out
from hwr.outcomes import Severity

REPOSITORY = Path(diag.__file__).resolve().parents[1]
RETAINED = Finding(code="retained", subject="get_tensor, 64 elements", text="1 block per call stays", evidence={"blocks_per_call": 1.0})


class Terminal(StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


class Full(StringIO):
    """A stream with a full disk behind it."""

    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("statuses", "together"),
    [
        ([0, 0], Exit.FINE),
        ([0, 1, 0], Exit.FINDINGS),
        ([1, 3, 0], Exit.NOT_MEASURED),
        ([1, 4], Exit.TIMEOUT),
        ([4, 3, 1], Exit.NOT_MEASURED),
        ([2, 3], Exit.USAGE),
        ([70, 2], Exit.INTERNAL),
        ([70, 137, 1], 137),
        ([], Exit.NOT_MEASURED),
        ([0, 99], Exit.NOT_MEASURED),
        ([0, -9], Exit.NOT_MEASURED),
    ],
)
def test_what_was_not_measured_comes_before_findings(statuses: list[int], together: int) -> None:
    """Unknown is not fine: nothing at all, and a status of nobody's, are not either."""
    assert combined(statuses) == together


def test_statuses_are_those_of_a_shell() -> None:
    assert [int(status) for status in Exit] == [0, 1, 2, 3, 4, 70]
    assert of_findings([]) is Exit.FINE
    assert of_findings([RETAINED]) is Exit.FINDINGS


def test_a_finding_is_one_printable_line_with_a_stable_code() -> None:
    found = Finding(code="retained", subject="a\x1b[31m\nb", text="x\ty", severity=Severity.ERROR)
    assert found.line() == "ERROR retained  a\\x1b[31m b: x y"
    assert list(found.to_json()) == ["code", "severity", "subject", "text", "evidence"]
    for wrong in ("Retained", "two words", "", "a__b"):
        with pytest.raises(ValueError):
            Finding(code=wrong, subject="s", text="t")
    with pytest.raises(ValueError):
        Finding(code="good_to_know", subject="s", text="t", severity=Severity.INFO)


def test_a_document_begins_alike_in_every_verb() -> None:
    told = document("retention", [RETAINED], runs=3)
    assert list(told) == ["schema_version", "tool", "verb", "version", "findings", "runs"]
    assert (told["schema_version"], told["tool"], told["verb"]) == (1, "hwr-diag", "retention")
    assert json.loads(dumped(told))["findings"][0]["evidence"] == {"blocks_per_call": 1.0}
    with pytest.raises(ValueError, match="version"):
        document("retention", [], version="mine")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        dumped({"bytes_per_call": value})
    with pytest.raises(ValueError):
        write_document(tmp_path / "run.json", {"bytes_per_call": value})
    assert list(tmp_path.iterdir()) == []


def test_an_object_of_the_field_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Schema 1 of a retention run has keys of its own; nothing is added, the text is ASCII."""
    given = {"schema_version": 1, "arguments": {"mode": "reuse"}, "hostname": "kn\u00f6del\x1b"}
    print_document(given)
    said = capsys.readouterr().out
    assert json.loads(said) == given
    assert said.isascii()
    assert said.startswith('{\n  "schema_version": 1,\n')
    assert said.endswith("}\n")


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_document(path, {"n": 1})
    write_document(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 2}
    with pytest.raises(TypeError):
        write_document(path, {"n": object()})
    assert json.loads(path.read_text()) == {"n": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_file_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    (tmp_path / "run.json" / "x").touch()
    for path, problem in ((tmp_path / "nowhere" / "run.json", "ENOENT"), (tmp_path / "run.json", "EISDIR|ENOTEMPTY")):
        with pytest.raises(NotWritten, match=problem) as refused:
            write_document(path, {"n": 1})
        assert refused.value.exit_code == Exit.NOT_MEASURED
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_report_that_cannot_be_written_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(NotWritten, match="the report could not be written: ENOSPC"):
        out("text")


def test_notes_are_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    note("two\nlines\x1b[31m")
    assert capsys.readouterr() == ("", "hwr-diag: note: two lines\\x1b[31m\n")


def test_notes_that_cannot_be_written_end_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    note("x")
    with Progress(stream=Full()) as progress:
        progress.tell("x")


def test_progress_is_a_line_now_and_then() -> None:
    now = [0.0]
    stream = StringIO()
    with Progress(stream=stream, clock=lambda: now[0]) as progress:
        for second in range(25):
            now[0] = float(second)
            progress.tell(f"{second}")
        progress.tell("one of many", lasting=True)
    assert stream.getvalue().split("\n") == ["0", str(int(LINE_SECONDS)), str(int(2 * LINE_SECONDS)), "one of many", ""]


def test_progress_on_a_terminal_is_one_line_that_goes_away() -> None:
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress.tell("1 of 2")
        progress.tell("x" * 5000)
        progress.tell("done", lasting=True)
    first, second, third, last = stream.getvalue().split("\r\x1b[K")[1:]
    assert (first, third, last) == ("1 of 2", "done\n", "")
    assert len(second) < 5000
    quiet = Terminal()
    with Progress(quiet=True, stream=quiet) as progress:
        progress.tell("x", lasting=True)
    assert quiet.getvalue() == ""


REPORT = """
import sys
from diag.report.streams import note, out
from hwr.ending import ended
def work():
    for _ in range(100_000):
        note("n")
        out("a line of the report")
    return 0
sys.exit(ended(work, enabled=False, program="hwr-diag"))
"""


@pytest.mark.parametrize("pipe", ["| head -1", "2>&1 | head -1"])
def test_whoever_stops_reading_ends_the_report_quietly(pipe: str) -> None:
    command = f'"{sys.executable}" -c "$REPORT" 2>/dev/null {pipe}; echo "${{PIPESTATUS[0]}}"'
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "REPORT": REPORT}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("141", "")
