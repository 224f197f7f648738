"""A file is whole or not there, and a directory is one or is said not to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diag.probes.files import make_directory, replacing


def test_a_file_takes_its_place_when_all_of_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


def test_what_went_wrong_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(OSError, match="nowhere"), replacing(tmp_path / "nowhere" / "x"):
        pass


def test_a_file_in_the_place_of_a_directory_is_said_to_be_none(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            make_directory(path)
