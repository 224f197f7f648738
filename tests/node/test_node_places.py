"""Where journals are looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diag.node.places import run_directories
from hwr.telemetry.rundir import run_directory

UID = 4242


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A `/run/hwr` and a temporary directory; neither is there yet, or only the second."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "run-hwr", tmp_path / "tmp"


def private(temporary: Path, uid: int, mode: int = 0o700) -> Path:
    path = temporary / f"hwr-{uid}"
    path.mkdir()
    path.chmod(mode)
    os.chown(path, uid, uid)
    return path


def look(places: tuple[Path, Path], uid: int = UID, environ: dict[str, str] | None = None) -> tuple[Path, ...]:
    return run_directories((), environ or {}, shared=places[0], temporary=places[1], uid=uid)


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def test_those_that_were_given_are_the_only_ones(places: tuple[Path, Path], tmp_path: Path) -> None:
    """In the order given, each once, absolute, there or not; the environment is not asked."""
    places[0].mkdir()
    given = (tmp_path / "b", tmp_path / "a", tmp_path / "b", Path("relative"))
    found = run_directories(given, {"HWR_RUN_DIR": "/elsewhere"}, shared=places[0], temporary=places[1], uid=UID)
    assert found == (tmp_path / "b", tmp_path / "a", Path.cwd() / "relative")


def test_the_environments_is_the_only_one(places: tuple[Path, Path]) -> None:
    """As for a writer."""
    places[0].mkdir()
    assert look(places, environ={"HWR_RUN_DIR": "/elsewhere"}) == (Path("/elsewhere"),)
    assert run_directory(None, {"HWR_RUN_DIR": "/elsewhere"}) == Path("/elsewhere")
    assert look(places, environ={"HWR_RUN_DIR": ""}) != (Path(""),)


def test_the_shared_one_comes_first_where_it_can_be_written(places: tuple[Path, Path]) -> None:
    """The first is where our own journal goes: the shared directory if it is there, else the private one; the other is looked at too."""
    shared, temporary = places
    assert look(places) == (temporary / f"hwr-{UID}", shared)
    shared.mkdir()
    assert look(places) == (shared, temporary / f"hwr-{UID}")


def test_a_shared_one_that_we_may_not_write_is_read_only(as_root: None, places: tuple[Path, Path]) -> None:
    """A user outside of the group goes to its private directory, as its workers do."""
    places[0].mkdir(mode=0o755)
    code = (
        "import os, sys; from pathlib import Path; from diag.node.places import run_directories;"
        "print(*run_directories((), {}, shared=Path(sys.argv[1]), temporary=Path(sys.argv[2])))"
    )
    os.chmod(places[0].parent, 0o755)
    for parent in places[0].parents[1:3]:
        os.chmod(parent, 0o755)
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, *map(str, places)], capture_output=True, text=True, cwd="/", env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(places[1] / "hwr-65534"), str(places[0])]


def test_root_looks_at_every_users_and_others_only_at_their_own(as_root: None, places: tuple[Path, Path]) -> None:
    """Root's list has the private directories of all; a user's has no other user's."""
    for uid in (0, 1000, 65534):
        private(places[1], uid)
    (places[1] / "hwr-").mkdir()
    (places[1] / "hwr-1000x").mkdir()
    names = [path.name for path in look(places, uid=0)]
    assert names == ["hwr-0", "run-hwr", "hwr-1000", "hwr-65534"]
    assert [path.name for path in look(places, uid=1000)] == ["hwr-1000", "run-hwr"]


@pytest.mark.parametrize("trap", ["owner", "mode", "link", "file"])
@pytest.mark.parametrize("uid", [0, 1000])
def test_a_private_directory_that_is_not_what_its_name_says(as_root: None, places: tuple[Path, Path], trap: str, uid: int) -> None:
    """Of another owner, writable by others, a link or a file: neither searched nor written, be it our own or another user's."""
    path = places[1] / f"hwr-{uid}"
    if trap == "owner":
        private(places[1], uid)
        os.chown(path, 1001, 1001)
    elif trap == "mode":
        private(places[1], uid, 0o777)
    elif trap == "link":
        (places[1] / "elsewhere").mkdir()
        path.symlink_to(places[1] / "elsewhere")
        os.chown(path, uid, uid, follow_symlinks=False)
    else:
        path.write_bytes(b"")
        os.chown(path, uid, uid)
    assert path not in look(places, uid=0)
    assert path not in look(places, uid=uid)
    assert look(places, uid=uid)  # there is always a first


def test_a_shared_directory_that_is_a_file(places: tuple[Path, Path]) -> None:
    """Listed, so that what is wrong with it is said, and not first."""
    places[0].write_bytes(b"")
    assert look(places) == (places[1] / f"hwr-{UID}", places[0])


def test_thousands_of_private_directories_are_bounded(as_root: None, places: tuple[Path, Path]) -> None:
    """Whoever can make directories there cannot make us follow all of them, and not push ours out."""
    for uid in range(1, 200):
        private(places[1], uid)
    found = look(places, uid=0)
    assert len(found) == 64
    assert found[:2] == (places[1] / "hwr-0", places[0])
