"""Another environment is measured through its own interpreter: an older safetensors beside this one's torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

OLDER = "0.5.3"
SMALL = ("--iterations", "8000", "--sample-every", "800", "--warmup", "200")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with an older safetensors; everything else is found where this one finds it."""
    directory = tmp_path_factory.mktemp("older")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=120)
    packages = next(directory.glob("lib/python3*/site-packages"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), f"safetensors=={OLDER}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode and not os.environ.get("HWR_REQUIRE_SERVICES"):
        pytest.skip(f"safetensors {OLDER} cannot be installed here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory / "bin" / "python"


def hwr_diag(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run([sys.executable, "-m", "diag.cli.main", "retention", *arguments], capture_output=True, text=True, timeout=240)


def test_the_older_version_retains_alike(older: Path) -> None:
    """`--python`: the versions of the report are the other environment's, and so is the figure."""
    done = hwr_diag("run", "--mode", "get_tensor", "--python", str(older), "--no-control", "--json", *SMALL)
    assert done.returncode == 1, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["safetensors"], told["executable"]) == (OLDER, str(older))
    assert told["analysis"]["verdict"] == "retained"
    assert told["analysis"]["blocks_by_size"]["32"] == pytest.approx(1, abs=0.02)


def test_two_environments_side_by_side(older: Path, tmp_path: Path) -> None:
    """compare: the same verdicts, and the version is what differs."""
    for name, python in (("after", sys.executable), ("before", str(older))):
        done = hwr_diag(
            "matrix", "-o", str(tmp_path / name), "--python", python, "--modes", "get_tensor,reuse", "--tensor-elements", "64",
            "--offset-bytes", "0", "--repetitions", "1", *SMALL,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
    done = hwr_diag("compare", str(tmp_path / "before"), str(tmp_path / "after"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert OLDER in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize(
    ("arguments", "verdict", "blocks"),
    [
        (("--mode", "get_tensor", "--tensor-elements", "64"), "retained", 1),
        (("--mode", "get_tensor", "--tensor-elements", "16"), "flat", 0),
        (("--mode", "get_tensor", "--tensor-elements", "16", "--offset-bytes", "4000"), "retained", 2),
        (
            (
                "--mode",
                "reuse",
            ),
            "flat",
            0,
        ),
        (("--mode", "hwr_lease", "--iterations", "100000", "--sample-every", "10000"), "flat", 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_million_calls(arguments: tuple[str, ...], verdict: str, blocks: int) -> None:
    """The form for a report: the defaults of the field, a million calls (a tenth of it for a lease, which does far more a call)."""
    done = hwr_diag("run", *arguments, "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    found = told["analysis"]
    sys.stdout.write(f"\n{' '.join(arguments)}: {found['verdict']} {found['blocks_per_call']} {found['bytes_per_call']}\n")
    assert (found["verdict"], done.returncode) == (verdict, 1 if blocks else 0)
    assert found["blocks_per_call"]["low"] <= blocks <= found["blocks_per_call"]["high"]
    assert round(found["bytes_per_call"]["estimate"]) in range(32 * blocks - 2, 32 * blocks + 3)
