"""Errors say what happened, also where docstrings were stripped."""

from __future__ import annotations

import subprocess
import sys


def test_a_message_survives_stripped_docstrings() -> None:
    """`python -OO` has no docstrings, which are the templates of messages."""
    code = "from hwr.errors import LfsPointer; print(LfsPointer(file='x', expected_bytes=5, file_bytes=3))"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("lfs_pointer: expected_bytes=5, file=x, file_bytes=3")
