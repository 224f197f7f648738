"""What a command loads: the import linter cannot see deferral, `sys.modules` can."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import diag

HEAVY = ("torch", "safetensors", "transformers", "diffusers", "textual", "numpy", "memray", "matplotlib", "plotext")

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
        ("import hwr.units", ["x"]),
        ("import hwr; hwr.Options.of(host_weight_runtime_mode='preferred', host_weight_runtime_root='/does/not/exist')", ["x"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "--help"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "run", "--help"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "run", "/nowhere", "--print-config"]),
        ("runpy.run_module('diag.cli.main', run_name='__main__')", ["hwr-diag", "--help"]),
        ("runpy.run_module('diag.cli.main', run_name='__main__')", ["hwr-diag", "retention", "--help"]),
        ("runpy.run_module('diag.top.main', run_name='__main__')", ["hwr-top", "--help"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "agent", "--help"]),
        ("runpy.run_module('hwr.cli.main', run_name='__main__')", ["hwr", "agent", "--once", "--run-dir", "/nowhere"]),
        ("import diag.node.agent, diag.node.replay", ["x"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value[:40],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(action: str, argv: list[str]) -> None:
    """The base install has no torch: agent, hwr-top, hwr-diag and every help text work without it."""
    assert not loaded_after(action, argv).intersection(HEAVY)


def test_the_probe_can_fail() -> None:
    """A probe that sees nothing would prove nothing."""
    assert "torch" in loaded_after("import torch", ["x"])


def test_a_word_is_imported_without_the_others() -> None:
    """`import hwr` costs next to nothing: what a public name needs is imported with the name."""
    code = "import sys, json, re; import hwr.units; print(*(name for name in sys.modules if name.startswith('hwr')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == {"hwr", "hwr.units"}


def test_every_public_name_is_there() -> None:
    """Lazy or not, each name of `__all__` can be had, and no other."""
    import hwr

    assert all(getattr(hwr, name) is not None for name in hwr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hwr.nothing  # noqa: B018


def test_the_probe_is_a_file_of_its_own() -> None:
    """R22: it runs under any interpreter, so it imports nothing of ours, deferred or not; elsewhere such an import is seen."""
    probes = Path(diag.__file__).parent / "probes"
    assert not _ours((probes / "safetensors_retention.py").read_text(encoding="utf-8"))
    assert _ours((probes / "hwr_retention.py").read_text(encoding="utf-8"))
    assert _ours("def late():\n    import hwr.units\n") == _ours("from hwr.units import MIB") == {"hwr"}
    assert _ours("from . import retention") == {"."}


def _ours(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module).partition(".")[0])
    return names & {"hwr", "diag", "."}
