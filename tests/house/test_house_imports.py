"""What a command loads: the import linter cannot see deferral, `sys.modules` can."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "safetensors", "transformers", "diffusers", "textual", "numpy")

_PROBE = """
import json, runpy, sys
sys.argv = json.loads(sys.argv[1])
try:
    {action}
except SystemExit:
    pass
print(json.dumps(sorted(name for name in sys.modules if "." not in name)), file=sys.stderr)
"""


def loaded_after(action: str, argv: list[str]) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after an action."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(action=action), json.dumps(argv)], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    ("action", "argv"),
    [
        ("import hwr", ["x"]),
        ("import hwr.telemetry", ["x"]),
        ("import hwr; hwr.Options.of(host_weight_runtime_mode='preferred', host_weight_runtime_root='/does/not/exist')", ["x"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "--help"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "run", "--help"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "run", "/nowhere", "--print-config"]),
        ("runpy.run_module('diag.cli.main', run_name='__main__')", ["hwr-diag", "--help"]),
        ("runpy.run_module('diag.top.main', run_name='__main__')", ["hwr-top", "--help"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value[:40],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(action: str, argv: list[str]) -> None:
    """The base install has no torch: agent, hwr-top, hwr-diag and every help text work without it."""
    assert not loaded_after(action, argv).intersection(HEAVY)


def test_the_probe_can_fail() -> None:
    """A probe that sees nothing would prove nothing."""
    assert "torch" in loaded_after("import torch", ["x"])
