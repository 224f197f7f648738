"""J6, and where journals lie: the living stay, the old dead go, and nobody else's directory is used."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwr.telemetry import rundir
from hwr.telemetry.alive import AliveFile
from hwr.telemetry.rundir import create_worker_directory, prune, run_directory, run_id, worker_directories

DAY = 86400


def worker(run_dir: Path, run: str, rank: int, *, days: float = 0.0, size: int = 100, alive: bool = True) -> Path:
    made = create_worker_directory(run_dir, run, rank, 100 + rank, 7)
    (made.path / "events.000001.jsonl").write_bytes(b"x" * size)
    if alive:
        (made.path / "alive").write_bytes(b"\0" * 16)
    then = time.time() - days * DAY - 120
    for path in (*made.path.iterdir(), made.path):
        os.utime(path, (then, then))
    return made.path


def test_j6_the_old_dead_go_and_the_living_stay(tmp_path: Path) -> None:
    """J6: after a week a dead worker's directory is deleted, with its run once that is empty; a living one's never."""
    old, older, young = worker(tmp_path, "a", 0, days=8), worker(tmp_path, "a", 1, days=9), worker(tmp_path, "b", 0, days=6)
    living = worker(tmp_path, "a", 2, days=30, alive=False)
    lock = AliveFile(living)
    then = time.time() - 30 * DAY
    for path in (*living.iterdir(), living):
        os.utime(path, (then, then))
    assert prune(tmp_path, now=time.time()) == 2
    assert not old.exists()
    assert not older.exists()
    assert young.exists()
    assert living.exists()
    lock.close()
    for path in (*living.iterdir(), living):
        os.utime(path, (then, then))
    assert prune(tmp_path, now=time.time()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_j6_beyond_the_size_the_oldest_go_first(tmp_path: Path) -> None:
    """J6: over the cap the oldest dead go until the rest fits; the living count and stay, even if they alone are too large."""
    paths = [worker(tmp_path, "a", rank, days=5 - rank, size=1000) for rank in range(4)]
    lock = AliveFile(paths[0])
    then = time.time() - 5 * DAY
    for path in (*paths[0].iterdir(), paths[0]):
        os.utime(path, (then, then))
    assert prune(tmp_path, now=time.time(), keep_bytes=2500) == 2
    assert [path.exists() for path in paths] == [True, False, False, True]
    assert prune(tmp_path, now=time.time(), keep_bytes=10) == 1
    assert [path.exists() for path in paths] == [True, False, False, False]
    lock.close()


def test_j6_what_is_being_made_is_left_alone(tmp_path: Path) -> None:
    """J6: a directory of the last minute may belong to a worker that has not locked it yet, whatever the sizes say."""
    made = create_worker_directory(tmp_path, "a", 0, 1, 7)
    (made.path / "alive").write_bytes(b"")
    assert prune(tmp_path, now=time.time(), keep_seconds=0, keep_bytes=0) == 0
    assert made.path.exists()


def test_j6_what_cannot_be_judged_stays(tmp_path: Path) -> None:
    """J6: files without an alive file are nobody's to delete; an empty old directory is a worker that died at its birth."""
    copied = worker(tmp_path, "a", 0, days=30, alive=False)
    born = create_worker_directory(tmp_path, "b", 1, 1, 7).path
    linked = worker(tmp_path, "c", 2, days=30, alive=False)
    (linked / "alive").symlink_to("/etc/hostname")
    os.utime(born, (1, 1))
    then = time.time() - 30 * DAY
    os.utime(linked, (then, then))
    assert prune(tmp_path, now=time.time()) == 1
    assert copied.exists()
    assert linked.exists()
    assert not born.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link that looks like a worker's directory is none, and what it points to is safe."""
    target = worker(tmp_path / "elsewhere", "a", 0, days=30)
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / target.name).symlink_to(target)
    (tmp_path / "run" / "b").symlink_to(target.parent)
    assert list(worker_directories(tmp_path / "run")) == []
    assert prune(tmp_path / "run", now=time.time()) == 0
    assert target.exists()


def test_worker_directories_are_found_from_each_level(tmp_path: Path) -> None:
    """A run directory, a run, or a worker's directory itself may be given."""
    path = worker(tmp_path, "run-1", 5)
    for given_path in (tmp_path, path.parent, path):
        (found,) = worker_directories(given_path)
        assert (found.path, found.run_id, found.rank, found.pid, found.start_ns) == (path, "run-1", 5, 105, 7)
    assert list(worker_directories(tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HWR_RUN_ID": "a", "TORCHELASTIC_RUN_ID": "b"}, "a"),
        ({"HWR_RUN_ID": "  ", "TORCHELASTIC_RUN_ID": "b"}, "b"),
        ({"HWR_RUN_ID": "none"}, "none"),
        ({"HWR_RUN_ID": "../../etc/x y\n"}, "_.._etc_x_y"),
        ({"HWR_RUN_ID": ".."}, "run"),
        ({"HWR_RUN_ID": "x" * 300}, "x" * 100),
    ],
)
def test_run_id(environ: dict[str, str], expected: str) -> None:
    """HWR_RUN_ID, else torchelastic's unless it is `none`; what a file name cannot have is replaced."""
    assert run_id(environ) == expected


def test_run_id_is_made_once_and_exported(tmp_path: Path, python: Callable[..., str]) -> None:
    """Without one, the first process makes it and its children have the same; a blank one counts as none."""
    for environ in ({}, {"TORCHELASTIC_RUN_ID": "none"}):
        assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}", run_id(environ))
    code = """
import os, subprocess, sys
from hwr import telemetry
telemetry.configure(run_dir=sys.argv[1], rank=int(sys.argv[2]))
if sys.argv[2] == "0":
    subprocess.run([sys.executable, "-c", sys.argv[3], sys.argv[1], "1", ""], check=True)
"""
    python(code, tmp_path, 0, code, HWR_RUN_ID=" ")
    found = list(worker_directories(tmp_path))
    assert sorted(item.rank for item in found) == [0, 1]
    assert len({item.run_id for item in found}) == 1


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_run_id_is_one_safe_name(text: str) -> None:
    """Whatever the environment says, the run is a directory right below the run directory."""
    name = run_id({"HWR_RUN_ID": text})
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name)


@pytest.mark.parametrize(("rank", "expected"), [("3", 3), ("²", 0), ("-1", 0), ("", 0), ("9" * 5000, 0), ("x", 0)])
def test_a_strange_rank_is_rank_0(rank: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK may hold anything; what is no number is 0 and stops nobody."""
    from hwr import telemetry

    monkeypatch.setenv("RANK", rank)
    directory = telemetry.configure(run_dir=tmp_path)
    assert directory is not None
    assert directory.name.startswith(f"r{expected}.")


def test_the_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was configured, else HWR_RUN_DIR, else the shared directory, else a private one."""
    assert run_directory("/given", {"HWR_RUN_DIR": "/environ"}) == Path("/given")
    assert run_directory(None, {"HWR_RUN_DIR": "/environ"}) == Path("/environ")
    if not rundir.SHARED_RUN_DIR.exists():
        assert run_directory(None, {}) == rundir.private_run_directory()
        assert rundir.private_run_directory().name == f"hwr-{os.geteuid()}"


PRIVATE = """
import os, sys, tempfile
from hwr import telemetry
print(telemetry.configure())
"""


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("trap", ["owner", "mode", "link", "none"])
def test_a_private_directory_of_somebody_else_is_refused(trap: str, tmp_path: Path, python: Callable[..., str]) -> None:
    """In a temporary directory that all may write: a directory of another owner, one that others may write, and a link are refused."""
    private = tmp_path / f"hwr-{os.geteuid()}"
    if trap == "link":
        (tmp_path / "target").mkdir(mode=0o700)
        private.symlink_to(tmp_path / "target")
    elif trap != "none":
        private.mkdir(mode=0o700)
        if trap == "owner":
            os.chown(private, 65534, 65534)
        else:
            private.chmod(0o777)
    if rundir.SHARED_RUN_DIR.exists():
        pytest.skip("this node has a shared run directory")
    told = python(PRIVATE, TMPDIR=str(tmp_path))
    if trap == "none":
        assert told.startswith(f"{private}/")
        assert private.stat().st_mode & 0o777 == 0o700
    else:
        assert told == "None\n"
        assert list(tmp_path.rglob("*.jsonl")) == []
