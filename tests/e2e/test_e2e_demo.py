"""`hwr demo`: cold then warm, warm from the start the second time, cold again with --fresh, and held until somebody ends it."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_processes import Done, Programs, Running, journals
from e2e_stores import Store

from hwr.cli.demo import prepared
from hwr.errors import OptionError
from hwr.telemetry.alive import is_held


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, minilm_published: Store) -> Iterator[Programs]:
    """Where demos run; a store of the model is there already."""
    programs = Programs(tmp_path_factory.mktemp("demo"))
    minilm_published.copy(programs.base / "store")
    (programs.base / "store" / ".hwr-demo").touch()
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


@dataclass(frozen=True)
class Held:
    """A demo that was held: what it printed by then, its metrics meanwhile, and how it ended."""

    text: str
    url: str
    metrics: str
    done: Done


def hold(place: Programs, number: int, *more: str) -> Held:
    running = place.start_hwr("demo", "--root", place.base / "store", "--hold", *more)
    text = held(running)
    (url,) = re.findall(r"curl -s (\S+) ", text)
    with urllib.request.urlopen(url, timeout=60) as answer:
        metrics = answer.read().decode()
    return Held(text, url, metrics, running.stop(number))


@pytest.fixture(scope="module")
def fresh(place: Programs) -> Held:
    """The first demo: cold, although the store was there, and ended by Ctrl-C."""
    return hold(place, signal.SIGINT, "--fresh")


@pytest.fixture(scope="module")
def again(place: Programs, fresh: Held) -> Held:
    """The second demo on the same root, ended by SIGTERM."""
    assert fresh.done.rc == 0, fresh.done.err
    return hold(place, signal.SIGTERM)


def test_a_fresh_demo_is_cold_then_warm_and_right(fresh: Held, place: Programs) -> None:
    assert fresh.done.rc == 0, fresh.done.err
    assert outcomes(fresh.text) == ["canonical_fallback", "local_hit"]
    assert re.search(r"^embedding +[0-9a-f]{12} +bit-identical +bit-identical$", fresh.text, re.MULTILINE)
    assert re.search(r"^checksum +- +- +86\.7 MiB, [\d.]+ GB/s$", fresh.text, re.MULTILINE)
    # Journals under the root's sibling, of the two starts; stock loading has none.
    cold, warm = journals(place.base / "run")[:2]
    assert cold.state.resolutions == {"canonical_fallback|preferred": 1}
    assert warm.state.resolutions == {"local_hit|preferred": 1}
    assert str(warm.path) in fresh.text
    # The command to look at it works as it is printed.
    assert f"hwr store ls --root {place.base / 'store'}" in fresh.text
    listed = place.hwr("store", "ls", "--root", place.base / "store")
    assert listed.rc == 0
    assert "1 entries" in listed.out


def test_the_next_demo_is_warm_from_the_start(again: Held) -> None:
    assert outcomes(again.text) == ["local_hit", "local_hit"]


def test_metrics_are_there_while_it_holds_and_gone_after(fresh: Held, again: Held) -> None:
    for one in (fresh, again):
        assert 'hwr_resolutions_total{engine="default",mode="preferred",outcome="local_hit",rank="0"} 1.0' in one.metrics
        with pytest.raises(OSError):
            urllib.request.urlopen(one.url, timeout=60)


def test_the_agent_says_what_it_saw_from_outside(again: Held) -> None:
    """The worker that holds, what it does, its memory; the artifact, all of it in the page cache."""
    assert re.search(r"^node agent: http://127\.0\.0\.1:\d+/metrics \(\d+ series\)$", again.text, re.MULTILINE)
    assert re.search(
        r"^  worker default/0: up, serving, stall none, transport registered, [\d.]+ MiB anonymous, ", again.text, re.MULTILINE
    )
    assert re.search(r"^  artifact [0-9a-f]{12}: 86\.\d MiB in the page cache, 0 B of it diverged", again.text, re.MULTILINE)


def test_ctrl_c_ends_it_well_and_sigterm_takes_the_held_process_along(fresh: Held, again: Held, place: Programs) -> None:
    assert (fresh.done.rc, again.done.rc) == (0, 128 + signal.SIGTERM)
    found = journals(place.base / "run")
    assert sorted(journal.state.res["hwr.role"] for journal in found) == ["agent"] * 2 + ["worker"] * 4
    for journal in found:
        assert journal.state.exited
        assert journal.state.leases == {}
        assert is_held(journal.path) is False


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_that_no_demo_made_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "domain.json").write_bytes(b"{}")
    with pytest.raises(OptionError):
        prepared(str(tmp_path), fresh=fresh)
    assert (tmp_path / "domain.json").read_bytes() == b"{}"


def test_fresh_removes_nothing_but_a_store(tmp_path: Path) -> None:
    root = prepared(str(tmp_path / "root"), fresh=False)
    (root / "file").write_bytes(b"mine")
    (root / "artifacts" / "a").mkdir(parents=True)
    (root / "artifacts" / "a").chmod(0o555)
    (root / "domain.json").write_bytes(b"{}")
    prepared(str(root), fresh=True)
    assert sorted(path.name for path in root.iterdir()) == [".hwr-demo", "file"]
