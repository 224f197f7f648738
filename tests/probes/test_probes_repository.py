"""The state of a repository is kept as git tells it, or a note says why not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diag.probes.repository import PATCH, REVISION, WORKING_TREE, snapshot


def git(where: Path, *arguments: str) -> bytes:
    """Run git."""
    return subprocess.run(["git", *arguments], cwd=where, check=True, capture_output=True, timeout=60).stdout


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's configuration."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit."""
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    git(where, "config", "user.email", "a@example.org")
    git(where, "config", "user.name", "a")
    (where / "kept").write_bytes(b"one\n")
    git(where, "add", "kept")
    git(where, "commit", "-q", "-m", "one")
    return where


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where it is written."""
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_revision_status_and_a_patch_that_applies(repository: Path, out: Path) -> None:
    (repository / "kept").write_bytes(b"two\0\xff\n")
    (repository / "new\nname").write_bytes(b"")
    (repository / "below").mkdir()
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "config", "diff.relative", "true")
    assert snapshot(out, repository / "below") == ()
    head = git(repository, "rev-parse", "HEAD").strip()
    revision = (out / REVISION).read_bytes().splitlines()
    assert revision[:2] == [head, b"branch main"]
    assert revision[2].endswith(b"-dirty")
    assert (out / WORKING_TREE).read_bytes() == b' M kept\n?? "new\\nname"\n'
    git(repository, "checkout", "-q", "kept")
    git(repository, "apply", str(out / PATCH))
    assert (repository / "kept").read_bytes() == b"two\0\xff\n"
    assert sorted(os.listdir(out)) == sorted((REVISION, WORKING_TREE, PATCH))


def test_a_clean_detached_head(repository: Path, out: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    assert snapshot(out, repository) == ()
    assert b"\nbranch (detached)\n" in (out / REVISION).read_bytes()
    assert (out / PATCH).read_bytes() == b""
    assert (out / WORKING_TREE).read_bytes() == b""


def test_a_repository_without_a_commit(repository: Path, tmp_path: Path, out: Path) -> None:
    where = tmp_path / "empty"
    where.mkdir()
    git(where, "init", "-q")
    (where / "new").write_text("x\n")
    git(where, "add", "new")
    (note,) = snapshot(out, where)
    assert "no commit yet" in note
    assert (out / REVISION).read_bytes().startswith(b"(no commit)\n")
    assert b"+x\n" in (out / PATCH).read_bytes()


def test_outside_of_a_repository_there_is_a_note_and_no_file(tmp_path: Path, out: Path) -> None:
    (note,) = snapshot(out, tmp_path)
    assert note == "not inside a repository: no state of one is kept"
    assert os.listdir(out) == []


def test_a_bare_repository_has_no_state(tmp_path: Path, out: Path) -> None:
    git(tmp_path, "init", "-q", "--bare", "bare")
    (note,) = snapshot(out, tmp_path / "bare")
    assert "no working tree" in note


def test_a_repository_of_another_user_is_a_note(repository: Path, out: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(repository, 65534, 65534)
    os.chown(repository / ".git", 65534, 65534)
    (note,) = snapshot(out, repository)
    assert "safe.directory" in note
    assert os.listdir(out) == []


def test_without_git_there_is_a_note(repository: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(out))
    assert snapshot(out, repository) == ("no state of a repository: git is not installed",)


def test_the_variables_of_git_are_gits(repository: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(repository))
    assert snapshot(out, tmp_path) == ()
    assert (out / REVISION).read_bytes().startswith(git(repository, "rev-parse", "HEAD"))


def test_no_program_of_the_repositorys_is_run_and_nothing_is_written_there(repository: Path, tmp_path: Path, out: Path) -> None:
    (repository / "touched").write_bytes(b"same\n")
    git(repository, "add", "touched")
    git(repository, "commit", "-q", "-m", "two")
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    evil.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(evil))
    git(repository, "config", "diff.external", str(evil))
    git(repository, "config", "core.pager", str(evil))
    (repository / "kept").write_bytes(b"two\n")
    os.utime(repository / "touched", (1, 1))  # git status would note in the index that it is the same
    index = (repository / ".git/index").read_bytes()
    assert snapshot(out, repository) == ()
    assert not (tmp_path / "ran").exists()
    assert (repository / ".git/index").read_bytes() == index


def test_a_deadline_and_an_earlier_revision_are_notes(repository: Path, out: Path) -> None:
    assert snapshot(out, repository) == ()
    git(repository, "commit", "-q", "--allow-empty", "-m", "two")
    (note,) = snapshot(out, repository)
    assert "earlier runs of this directory belong to that one" in note
    (note,) = snapshot(out, repository, deadline_s=0.0)
    assert "took too long" in note


def test_a_directory_that_cannot_be_written_is_a_note(repository: Path, out: Path) -> None:
    (note,) = snapshot(out / "absent", repository)
    assert note.startswith("the repository's state could not be written: ENOENT")
