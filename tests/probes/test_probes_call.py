"""`--call`: what it names is found as a user expects, and whatever the function does wrong is told as the function's."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from diag.probes import hwr_retention
from diag.probes.hwr_retention import Call, function_of, probe, target


@pytest.fixture(autouse=True)
def _search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's process is its own; this one gets its search path back."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def written(directory: Path, text: str) -> str:
    """Write a file of functions, and return its path."""
    (directory / "functions.py").write_text(text)
    return str(directory / "functions.py")


def called(text: str) -> Call:
    """Return the case, prepared."""
    case = Call(argparse.Namespace(call=text))
    case.prepare("")
    return case


@pytest.mark.parametrize("text", ["", "x", ":f", "x.py", "x.py:", "x.py:1f", ":", "a-b:f", "a..b:f", " "])
def test_what_names_no_function_is_a_usage_error_before_torch_is_loaded(text: str, tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not FILE\.py:FUNCTION"):
        target(text)
    if text in ("", "x", ":f"):
        done = subprocess.run(
            [sys.executable, hwr_retention.__file__, "--mode", "call", f"--call={text}"], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert f"argument --call: {text!r} is not FILE.py:FUNCTION" in done.stderr


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"there is no file .*functions\.py"):
        target(f"{tmp_path}/functions.py:f")
    assert target(written(tmp_path, "") + ":f")
    assert target("package.module:f") == "package.module:f"


def test_a_file_finds_the_modules_beside_it_as_a_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_functions.py").write_text("answer = 42\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    text = written(tmp_path, "from beside_the_functions import answer\ndef f(): return answer\n")
    assert function_of(f"{text}:f")() == 42


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def g(): pass", r"functions\.py has no function f"),
        ("f = 1", r"f of .*functions\.py cannot be called"),
        (
            "import not_to_be_found_anywhere",
            r"functions\.py cannot be run: ModuleNotFoundError: No module named 'not_to_be_found_anywhere'",
        ),
        ("1 / 0", r"functions\.py cannot be run: ZeroDivisionError"),
        ("raise SystemExit(0)", r"functions\.py cannot be run: SystemExit"),
    ],
)
def test_a_file_that_gives_no_function_cannot_be_measured(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(probe.Unusable, match=said):
        called(written(tmp_path, body) + ":f")


def test_a_module_that_lacks_the_function_says_so() -> None:
    with pytest.raises(probe.Unusable, match="json has no function f"):
        called("json:f")
    assert callable(called("json:dumps").function)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def f(): import not_to_be_found_anywhere", "the function raised ModuleNotFoundError: No module named"),
        ("def f(): raise ValueError('bad')", "the function raised ValueError: bad"),
        ("def f(): raise SystemExit(0)", "the function raised SystemExit: 0"),
    ],
)
def test_what_the_function_raises_is_told_as_its_own(tmp_path: Path, body: str, said: str) -> None:
    case = called(written(tmp_path, body) + ":f")
    with pytest.raises(probe.Broken, match=said):
        case.loop(1)


def test_what_its_close_raises_is_told_as_its_own(tmp_path: Path) -> None:
    case = called(written(tmp_path, "def f(): pass\ndef close(): raise ValueError('bad')\nf.close = close\n") + ":f")
    case.loop(3)
    with pytest.raises(probe.Broken, match="its close raised ValueError: bad"):
        case.close()


class _Sampler(probe.Sampler):
    """One that takes no samples."""

    def take(self, iterations: int, loop_ns: int, alive: int = 0) -> None:
        """Do nothing."""


def test_what_a_function_returns_is_called_a_result_and_no_tensor(tmp_path: Path) -> None:
    case = called(written(tmp_path, "kept = []\nclass Some: pass\ndef f():\n    kept.append(Some())\n    return kept[-1]\n") + ":f")
    asked = argparse.Namespace(iterations=3, sample_every=3)
    with pytest.raises(probe.Broken, match="the result of iteration 3 is alive after a garbage collection"):
        probe.loops(case, asked, _Sampler(1, None))
