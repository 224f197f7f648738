"""The store's own helpers serve this room too: what is validated is what was published."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "store"))

from store_artifacts import put, store

from hwr.store.domain import Domain


@pytest.fixture
def stored(tmp_path: Path) -> Domain:
    """A store with one small artifact, `a`."""
    domain = store(tmp_path / "root")
    put(domain)
    return domain


@pytest.fixture
def as_root() -> None:
    """Skip where a read-only file cannot be changed."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
