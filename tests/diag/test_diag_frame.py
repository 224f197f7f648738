"""`hwr-diag`: verbs are found by name, imported one by one, and end as the table of exit statuses says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import diag
from diag.cli.main import VERBS, parsed

REPOSITORY = Path(diag.__file__).resolve().parents[1]
# None of these is needed to say what there is.
HEAVY = {
    *(
        "torch",
        "safetensors",
        "numpy",
        "textual",
        "rich",
        "prometheus_client",
        "orjson",
        "blake3",
        "psutil",
        "memray",
        "matplotlib",
        "plotext",
    ),
    *("importlib.metadata", "hwr.telemetry", "hwr.options", "hwr.errors", "typing", "dataclasses", "json", "subprocess"),
}
# A verb of the tests. Its first argument says how it ends.
VERB = '''
"""Answer as told."""
import argparse, os, signal, sys
from diag.report.streams import out
from hwr.errors import HwrError, OptionError

def add_arguments(parser):
    parser.add_argument("--how", choices=("fine", "findings", "failed", "usage", "broken", "wait"), required=True)
    parser.set_defaults(command=command)

def command(arguments):
    if arguments.how == "failed":
        raise HwrError(message="the disk has gone")
    if arguments.how == "usage":
        raise OptionError(option="--how", problem="usage", remedy="Say another.")
    if arguments.how == "broken":
        raise KeyError("x")
    if arguments.how == "wait":
        try:
            out("waiting")
            while True:
                signal.pause()
        finally:
            out("cleaned up")
    out(arguments.how)
    return 1 if arguments.how == "findings" else 0
'''
SCRIPT = """
import sys
from diag.cli.main import main
status = 0
try:
    status = main(sys.argv[1:], verbs={"answer": ("answer_verb", "answer as told"), "other": ("nowhere.to.be.found", "never imported")})
except SystemExit as end:
    status = end.code or 0
print(*sorted(sys.modules), file=sys.stderr)
sys.exit(status)
"""
REAL = "import sys; from diag.cli.main import main; sys.exit(main())"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "answer_verb.py").write_text(VERB)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HWR_")}
    kept |= {
        "PYTHONPATH": f"{REPOSITORY}:{tmp_path}",
        "HWR_RUN_DIR": str(tmp_path / "run"),
        "COLUMNS": "200",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return kept


def ask(environment: dict[str, str], *arguments: str, code: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def loaded(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(done.stderr.splitlines()[-1].split())


def test_help_names_every_verb_and_imports_none(environment: dict[str, str]) -> None:
    done = ask(environment, "--help")
    assert done.returncode == 0
    assert "answer as told" in done.stdout
    assert "never imported" in done.stdout
    modules = loaded(done)
    assert not {name for name in modules if name in HEAVY or name.partition(".")[0] in HEAVY}
    assert {name for name in modules if name.split(".")[0] in ("hwr", "diag")} == {"hwr", "hwr.usage", "diag", "diag.cli", "diag.cli.main"}
    assert "answer_verb" not in modules


def test_the_check_of_imports_can_fail(environment: dict[str, str]) -> None:
    """A verb that runs does load the journal's library, and its own module, and still no other verb's."""
    modules = loaded(ask(environment, "answer", "--how", "fine"))
    assert modules >= {"answer_verb", "hwr.telemetry", "orjson"}
    assert not modules & {"torch", "textual", "matplotlib", "memray", "plotext", "nowhere"}


def test_help_of_a_verb_is_the_verbs_own(environment: dict[str, str]) -> None:
    done = ask(environment, "answer", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: hwr-diag answer [-h] --how")
    assert "Answer as told." in done.stdout
    assert "hwr.telemetry" not in loaded(done)


def test_version_is_looked_up_when_it_is_asked_for(environment: dict[str, str]) -> None:
    done = ask(environment, "--version")
    assert (done.returncode, done.stdout) == (0, f"hwr-diag {metadata.version('hwr-suite')}\n")
    assert "importlib.metadata" in loaded(done)


@pytest.mark.parametrize(
    ("arguments", "cause", "way_out"),
    [
        ((), "hwr-diag: the following arguments are required: VERB", "Try: hwr-diag --help"),
        (("retnetion",), "hwr-diag: argument VERB: invalid choice: 'retnetion'", "Did you mean retention? Try: hwr-diag --help"),
        (("zzz",), "hwr-diag: argument VERB: invalid choice: 'zzz'", "Try: hwr-diag --help"),
        (("--verison",), "hwr-diag: no such argument: --verison", "Did you mean --version? Try: hwr-diag --help"),
        (("--zzz", "retention"), "hwr-diag: no such argument: --zzz", "Try: hwr-diag --help"),
        (("--",), "hwr-diag: no such argument: --", "Try: hwr-diag --help"),
        (("",), "hwr-diag: argument VERB: invalid choice: ''", "Try: hwr-diag --help"),
    ],
    ids=str,
)
def test_a_wrong_command_line_is_two_lines(environment: dict[str, str], arguments: tuple[str, ...], cause: str, way_out: str) -> None:
    done = ask(environment, *arguments, code=REAL)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(cause)
    assert second == way_out


def test_a_wrong_argument_of_a_verb_is_two_lines(environment: dict[str, str]) -> None:
    done = ask(environment, "answer", "--hwo", "fine", "--how", "fine")
    assert done.returncode == 2
    assert done.stderr.splitlines()[:2] == [
        "hwr-diag answer: no such argument: --hwo fine",
        "Did you mean --how? Try: hwr-diag answer --help",
    ]


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("fine", 0, ""),
        ("findings", 1, ""),
        ("failed", 3, "hwr-diag: The Host Weight Runtime failed: the disk has gone"),
        ("usage", 2, "hwr-diag: --how: usage"),
        ("broken", 70, "hwr-diag: internal error: KeyError: 'x'"),
    ],
)
def test_a_verb_ends_by_the_table(environment: dict[str, str], how: str, status: int, said: str) -> None:
    """A typed failure is no finding: it could not be measured."""
    done = ask(environment, "answer", "--how", how)
    assert done.returncode == status
    assert done.stdout == (f"{how}\n" if status < 2 else "")
    assert done.stderr.startswith(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_verb_in_order(environment: dict[str, str], number: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT, "answer", "--how", "wait"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest) == (128 + number, "cleaned up\n")
    assert "Traceback" not in said


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_whoever_does_not_read_the_help_ends_it_quietly(environment: dict[str, str], asked: str, buffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", REAL, asked]
    told = {**environment, "PYTHONUNBUFFERED": buffered}
    done = subprocess.run(command, env=told, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_take_no_place_of_another(environment: dict[str, str]) -> None:
    command = f'"{sys.executable}" -c "{REAL}" nonsense 2>&-'
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_every_verb_of_the_table_has_a_module_that_keeps_the_interface() -> None:
    for name in VERBS:
        with pytest.raises(SystemExit) as end:
            parsed([name, "--help"])
        assert end.value.code == 0
