"""The store's own helpers serve this room too, and small random models that real libraries wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "store"))

from store_artifacts import store

from hwr.store.domain import Domain


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    """An empty store."""
    return store(tmp_path / "root")
