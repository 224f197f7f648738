"""Where a matrix is measured: enough to refuse mixing two environments, without importing what is described."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from retention_builders import plan_of

import diag
from diag.probes.environment import BINDING, binding, describe
from diag.probes.matrix import differences
from hwr.errors import Unavailable

REPOSITORY = Path(diag.__file__).resolve().parents[1]


def described(python: str = sys.executable, environment: dict[str, str] | None = None, **roots: Path) -> dict[str, object]:
    found = describe(python, dict(os.environ) if environment is None else environment, **roots)
    assert not isinstance(found, Unavailable)
    return found


def test_the_versions_of_the_interpreter_that_measures_are_told() -> None:
    found = json.loads(json.dumps(described()))
    for name in ("torch", "safetensors"):
        assert found["packages"][name]["version"] == metadata.version(name)
        assert len(found["packages"][name]["record_sha256"]) == 64
    assert len(found["packages"]["safetensors"]["native_sha256"]) == 64
    assert set(binding(found)) == set(BINDING)


def test_an_environment_without_the_libraries_has_no_version_of_them(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    found = json.loads(json.dumps(described(str(tmp_path / "bare" / "bin" / "python"))))
    assert found["packages"] == {"torch": {"version": None}, "safetensors": {"version": None}}


def test_what_cannot_be_asked_is_unavailable_with_a_reason() -> None:
    assert describe("/nowhere/python", {}) == Unavailable("ENOENT (No such file or directory)")
    assert describe("/bin/false", {}) == Unavailable("it ended with 1")
    assert describe("/bin/true", {}) == Unavailable("it ended with 0")


def test_a_checkout_in_the_current_directory_is_not_taken_for_what_the_probe_finds(tmp_path: Path) -> None:
    (tmp_path / "hashlib.py").write_text("raise SystemExit('the wrong module')")
    script = (
        "import os, sys; from diag.probes.environment import describe; del os.environ['PYTHONSAFEPATH']\n"
        "print(isinstance(describe(sys.executable, dict(os.environ)), dict))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "True"


def test_the_allocator_environment_binds_and_the_governor_does_not(tmp_path: Path) -> None:
    governor = tmp_path / "devices/system/cpu/cpu0/cpufreq"
    governor.mkdir(parents=True)
    (governor / "scaling_governor").write_text("powersave\n")
    plain, tuned = described(), described(environment={**os.environ, "MALLOC_ARENA_MAX": "1"}, sys_root=tmp_path)
    assert tuned["governor"] == "powersave"
    said = differences(plan_of(environment=binding(plain)).to_json(), plan_of(environment=binding(tuned)))
    assert "allocator.environment.MALLOC_ARENA_MAX: none there, 1 now" in said
    assert not [sentence for sentence in said if "governor" in sentence]


def test_what_this_machine_does_not_tell_is_none(tmp_path: Path) -> None:
    found = described(proc_root=tmp_path, sys_root=tmp_path)
    assert (found["transparent_hugepage"], found["governor"]) == (None, None)
    assert isinstance(found["cpu"], dict)
    assert found["cpu"]["model"] is None
