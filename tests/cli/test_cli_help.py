"""`hwr --help` and `--version`: complete, quick, and without the libraries that a run needs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hwr
from hwr.options import OPTIONS

REPOSITORY = Path(hwr.__file__).resolve().parents[1]
HEAVY = {"torch", "safetensors", "transformers", "diffusers", "textual", "numpy"}
# Runs the command in this interpreter and tells on the last line what it loaded.
SCRIPT = f"""
import sys
from hwr.cli.main import main
status = 0
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code or 0
print(sorted({HEAVY!r} & set(sys.modules)))
sys.exit(status)
"""
# R1, as it is asked for: full names with the short ones that are their aliases.
R1 = {
    "--host-weight-runtime-mode": "--mode",
    "--host-weight-runtime-root": "--root",
    "--host-weight-runtime-validation": "--validation",
    "--enable-distributed-layerwise-offload": "--dlo",
    "--dlo-use-allgather": "--allgather",
    "--dlo-no-use-allgather": None,
    "--dlo-host-registration-mode": None,
    "--dlo-host-registration-limit-gib": None,
    "--dlo-resident-layers": None,
}
COMMANDS = (
    ("run",),
    ("publish",),
    ("store",),
    ("store", "ls"),
    ("store", "show"),
    ("store", "verify"),
    ("store", "explain"),
    ("demo",),
)


def ask(*arguments: str, code: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HWR_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), *((*command, "--help") for command in COMMANDS)], ids=" ".join)
def test_asking_for_help_loads_no_large_library(arguments: tuple[str, ...]) -> None:
    done = ask(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    *said, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert said


def test_the_version_is_the_distributions() -> None:
    assert ask("--version").stdout.splitlines()[0] == f"hwr {metadata.version('hwr-suite')}"


def test_r1_the_help_of_run_names_every_option_with_its_alias() -> None:
    text = ask("run", "--help").stdout
    for full, alias in R1.items():
        assert full in text
        if alias is not None:
            (line,) = [line for line in text.splitlines() if line.strip().startswith(full)]
            assert f", {alias}" in line
    for row in OPTIONS:
        for flag in (*row.flags, *row.off):
            assert flag in text, flag
        assert row.variable in text


@pytest.mark.parametrize(
    ("arguments", "cause", "way_out"),
    [
        ((), "hwr: the following arguments are required: COMMAND", "Try: hwr --help"),
        (("fly",), "hwr: argument COMMAND: invalid choice: 'fly'", "Try: hwr --help"),
        (("run",), "hwr run: the following arguments are required: MODEL_DIR", "Try: hwr run --help"),
        (("run", "x", "--roott", "/y"), "hwr: no such argument: --roott /y", "Did you mean --root?"),
        (("store", "ls"), "hwr: --host-weight-runtime-root: it is not set", "Say which store: --root DIRECTORY."),
        (("store", "show", "abc", "--root", "/nowhere"), "hwr: /nowhere: the store cannot be used: ENOENT", "Give --root"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line_is_two_lines(arguments: tuple[str, ...], cause: str, way_out: str, tmp_path: Path) -> None:
    code = (
        f"import os\nos.environ['HWR_RUN_DIR'] = {str(tmp_path)!r}\nimport sys\nfrom hwr.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = ask(*arguments, code=code)
    assert done.returncode == (1 if "show" in arguments else 2)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith(cause)
    assert second.startswith(way_out)


def test_whoever_stops_reading_ends_the_command_quietly() -> None:
    """`hwr run --help | head -1` is no failure of ours."""
    command = f'"{sys.executable}" -m hwr.cli.main run nowhere --print-config | head -1; echo "${{PIPESTATUS[0]}}"'
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] in ("0", "141")
