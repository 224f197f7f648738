"""The curves: above the baseline, with the control and `closed`, drawn as a file or as text."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image
from retention_builders import killed, matrix_directory, run_object, samples_text

import diag
from diag.cli.main import parsed
from diag.probes.retention_files import collect
from diag.report.retention_draw import drawn_text
from diag.report.retention_plot import Drawing, Measure, drawing_of
from hwr.errors import OptionError, Unavailable

REPOSITORY = Path(diag.__file__).resolve().parents[1]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run that keeps two blocks and 64 bytes a call, with its control."""
    control = run_object("reuse", judged=False)
    path = tmp_path / "get_tensor-64-1.json"
    path.write_text(json.dumps(run_object(blocks=2.0, size=64.0) | {"control": control}))
    return path


def drawn(path: Path, measure: Measure = Measure.ANONYMOUS) -> Drawing:
    drawing = drawing_of(collect(path), measure)
    assert isinstance(drawing, Drawing)
    return drawing


def plotted(*words: str | Path) -> int:
    chosen = parsed(["retention", "plot", *map(str, words)])
    status: int = chosen.command(chosen)
    return status


def test_a_run_is_drawn_above_its_baseline_beside_its_control(run_file: Path) -> None:
    (panel,) = drawn(run_file).panels
    run, control = panel.lines
    assert run.points[0] == (0, 0.0)
    assert run.points[-1] == (20_000, 64 * 20_000 // 4096 * 4)  # KiB
    assert run.closed == run.points[-1]
    assert (control.is_control, {value for _, value in control.points}) == (True, {0.0})


def test_blocks_are_drawn_as_counts(run_file: Path) -> None:
    drawing = drawn(run_file, Measure.BLOCKS)
    assert drawing.panels[0].lines[0].points[-1] == (20_000, 40_000)
    assert drawing.y_label == "interpreter blocks above the baseline"


def test_a_figure_that_a_run_does_not_have_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run_object(counts_blocks=False)))
    found = drawing_of(collect(tmp_path / "run.json"), Measure.BLOCKS)
    assert found == Unavailable("run.json: no interpreter blocks")


def test_the_control_of_a_matrix_is_found_by_its_name(tmp_path: Path) -> None:
    directory = matrix_directory(tmp_path / "m", blocks=2.0, size=64.0)
    (directory / "get_tensor-64-1.json").write_text(json.dumps(run_object(size=64.0) | {"control_file": "reuse-64-1.json"}))
    assert [line.label for line in drawn(directory / "get_tensor-64-1.json").panels[0].lines] == ["get_tensor", "reuse (control)"]


def test_a_control_is_never_read_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "reuse-64-1.json").write_text(json.dumps(run_object("reuse")))
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "run.json"
    path.write_text(json.dumps(run_object(size=64.0) | {"control_file": "../reuse-64-1.json"}))
    assert len(drawn(path).panels[0].lines) == 1


def test_a_killed_run_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "get_tensor-64-1.samples.jsonl"
    path.write_text(samples_text(run_object(size=64.0), 6, torn=True))
    (line,) = drawn(path).panels[0].lines
    assert (line.label, len(line.points), line.closed) == ("get_tensor (did not end)", 1 + 4, None)


def test_a_directory_that_holds_a_killed_run_only_is_drawn_as_far_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "get_tensor-64-1.samples.jsonl").write_text(samples_text(run_object(size=64.0), 6, torn=True))
    assert plotted(tmp_path) == 0
    assert "get_tensor (did not end)" in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_baseline_has_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(killed(run_object(), 1)))
    with pytest.raises(OptionError, match=r"nothing to draw: run\.json: no baseline"):
        plotted(tmp_path / "run.json")


def test_a_matrix_has_a_panel_for_each_size_and_offset_and_a_line_for_each_run(tmp_path: Path) -> None:
    drawing = drawn(matrix_directory(tmp_path / "m", blocks=2.0, size=64.0))
    assert (drawing.rows, drawing.columns) == (2, 1)
    assert [panel.title for panel in drawing.panels] == ["64 elements, offset 0", "64 elements, offset 4000"]
    assert [(line.mode, line.repetition) for line in drawing.panels[0].lines] == [
        ("get_tensor", 1),
        ("get_tensor", 2),
        ("reuse", 1),
        ("reuse", 2),
    ]


def test_a_png_is_a_picture_of_a_useful_size(tmp_path: Path) -> None:
    directory = matrix_directory(tmp_path / "m", blocks=2.0, size=64.0)
    assert plotted(directory, "-o", tmp_path / "m.png") == 0
    with Image.open(io.BytesIO((tmp_path / "m.png").read_bytes())) as image:
        assert image.format == "PNG"
        assert min(image.size) > 600
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert (0x00, 0x72, 0xB2) in colours  # the line of get_tensor was drawn


def test_an_svg_says_its_words_as_text_and_is_the_same_twice(tmp_path: Path, run_file: Path) -> None:
    for name in ("one.svg", "two.svg"):
        assert plotted(run_file, "-o", tmp_path / name) == 0
    text = (tmp_path / "one.svg").read_text()
    words = " ".join(element.text or "" for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text"))
    for word in ("get_tensor", "reuse (control)", "closed", "calls", "anonymous memory above the baseline, KiB", "safetensors 0.8.0"):
        assert word in words
    assert text == (tmp_path / "two.svg").read_text()


@pytest.mark.parametrize("name", ["m.pdf", "m", "m.png.gz"])
def test_another_suffix_is_refused_before_anything_is_written(tmp_path: Path, run_file: Path, name: str) -> None:
    with pytest.raises(OptionError) as refused:
        plotted(run_file, "-o", tmp_path / name)
    assert ".png or .svg" in refused.value.way_out
    assert not (tmp_path / name).exists()


def test_in_a_pipe_it_is_plain_text_of_the_terminals_width(run_file: Path) -> None:
    environment = {**os.environ, "COLUMNS": "90"}
    command = [sys.executable, "-m", "diag.cli.main", "retention", "plot", str(run_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) in (89, 90)
    for word in ("get_tensor", "reuse (control)", "closed", "20,000", "calls"):
        assert word in done.stdout


def test_on_a_terminal_it_has_colour(run_file: Path) -> None:
    assert "\x1b[" in drawn_text(drawn(run_file), 80, colour=True)


@pytest.mark.parametrize(("library", "output"), [("matplotlib", ["-o", "x.png"]), ("plotext", [])])
def test_a_missing_library_is_one_error_with_the_way_to_get_it(tmp_path: Path, run_file: Path, library: str, output: list[str]) -> None:
    script = f"import sys; sys.modules[{library!r}] = None; from diag.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "retention", "plot", str(run_file), *output]
    environment = {**os.environ, "HWR_RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    first, second = done.stderr.splitlines()
    assert done.returncode == 3
    assert f"{library} is not installed" in first
    assert second == "Install it: pip install 'hwr-suite[plot]'."
    assert done.stdout == ""
