"""Paths of a store: made once a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwr.outcomes import LockKind
from hwr.store.layout import StoreLayout

KEY = "0123456789abcdef" * 4


def test_an_acquire_joins_no_path_anew() -> None:
    """Parts of a path are interned; made anew and dropped at each acquire they enlarge the interpreter's table by megabytes."""
    one, other = StoreLayout(Path("/store")), StoreLayout(Path("/store"))
    assert one.artifact(KEY) is other.artifact(KEY)
    assert one.deny_marker(KEY) is other.deny_marker(KEY)
    assert one.lock(LockKind.ARTIFACT, KEY) is other.lock(LockKind.ARTIFACT, KEY)
    assert one.artifact(KEY) != StoreLayout(Path("/another")).artifact(KEY)


@pytest.mark.parametrize("key", ["../../etc", "", KEY[:-1], KEY + "0", KEY.upper()])
def test_a_key_is_checked_before_it_is_part_of_a_path(key: str) -> None:
    """A key that is none never reaches the file system."""
    with pytest.raises(ValueError, match="not an artifact key"):
        StoreLayout(Path("/store")).artifact(key)
