"""A fresh store for a test, and who may run it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_artifacts import put, store

from hwr.store.domain import Domain


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    """An empty store."""
    return store(tmp_path / "root")


@pytest.fixture
def stored(domain: Domain) -> Domain:
    """A store with one small artifact, `a`."""
    put(domain)
    return domain


@pytest.fixture
def as_root() -> None:
    """Skip where namespaces and other users are out of reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
