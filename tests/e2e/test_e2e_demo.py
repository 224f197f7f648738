"""`hwr demo`: cold then warm, warm from the start the second time, cold again with --fresh, and held until somebody ends it."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_processes import Done, Programs, Running, journals
from e2e_stores import Store

from hwr.telemetry.alive import is_held


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    programs = Programs(tmp_path_factory.mktemp("demo"))
    yield programs
    programs.close()
    Store(programs.base / "store").remove()


def outcomes(text: str) -> list[str]:
    (line,) = re.findall(r"^outcome +- +(\S+) +(\S+)$", text, re.MULTILINE)
    return list(line)


def held(running: Running) -> str:
    """Read what a demo prints until it holds."""
    text = ""
    while "holding" not in text:
        line = running.line()
        assert line, text + running.stop(signal.SIGKILL).err
        text += line
    return text


@pytest.fixture(scope="module")
def first(place: Programs) -> Done:
    return place.hwr("demo", "--root", place.base / "store")


def test_the_first_demo_is_cold_then_warm_and_right(first: Done, place: Programs) -> None:
    assert first.rc == 0, first.err
    assert outcomes(first.out) == ["canonical_fallback", "local_hit"]
    assert re.search(r"^embedding +[0-9a-f]{12} +bit-identical +bit-identical$", first.out, re.MULTILINE)
    assert re.search(r"^checksum +- +- +86\.7 MiB, [\d.]+ GB/s$", first.out, re.MULTILINE)
    # Journals under the root's sibling, of the two starts; stock loading has none.
    found = journals(place.base / "run")
    assert [journal.state.resolutions for journal in found] == [{"canonical_fallback|preferred": 1}, {"local_hit|preferred": 1}]
    assert all(journal.state.exited and journal.state.leases == {} for journal in found)
    assert str(found[1].path) in first.out
    # The command to look at it works as it is printed.
    assert f"hwr store ls --root {place.base / 'store'}" in first.out
    listed = place.hwr("store", "ls", "--root", place.base / "store")
    assert listed.rc == 0
    assert "1 entries" in listed.out


def test_the_next_demo_is_warm_from_the_start_and_holds_until_ctrl_c(first: Done, place: Programs) -> None:
    assert first.rc == 0
    running = place.start_hwr("demo", "--root", place.base / "store", "--hold")
    text = held(running)
    assert outcomes(text) == ["local_hit", "local_hit"]
    (url,) = re.findall(r"curl -s (\S+) ", text)
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert b'outcome="local_hit",rank="0"} 1.0' in answer.read()
    done = running.stop(signal.SIGINT)
    assert done.rc == 0, done.err
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=60)
    assert all(journal.state.exited for journal in journals(place.base / "run"))


def test_fresh_is_cold_again_and_sigterm_takes_the_held_process_along(first: Done, place: Programs) -> None:
    assert first.rc == 0
    running = place.start_hwr("demo", "--root", place.base / "store", "--fresh", "--hold")
    assert outcomes(held(running)) == ["canonical_fallback", "local_hit"]
    done = running.stop(signal.SIGTERM)
    assert done.rc == 128 + signal.SIGTERM
    for journal in journals(place.base / "run"):
        assert journal.state.exited
        assert journal.state.leases == {}
        assert is_held(journal.path) is False


def test_fresh_removes_nothing_but_a_store(place: Programs, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"mine")
    (tmp_path / "precious").chmod(0o777)
    done = place.hwr("demo", "--root", tmp_path / "precious", "--fresh")
    assert done.rc == 1
    assert "others may write it" in done.err
    assert (tmp_path / "precious" / "file").read_bytes() == b"mine"
