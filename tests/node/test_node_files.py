"""The agent's own files: one owner, whole files, nothing that somebody planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diag.node.files import ANNOUNCEMENT, LOCK, TOTALS, AgentFiles, read_object
from hwr.errors import Unavailable


def test_one_agent_has_the_place_and_the_next_gets_it(tmp_path: Path) -> None:
    """The second one writes nothing and says why; when the first has gone, its announcement has too."""
    first, second = AgentFiles(tmp_path), AgentFiles(tmp_path)
    assert first.claim() is None
    refused = second.claim()
    assert isinstance(refused, Unavailable)
    assert "another agent" in refused.reason
    assert first.announce({"url": "http://127.0.0.1:1"}) is None
    assert isinstance(second.announce({"url": "http://127.0.0.1:2"}), Unavailable)
    assert read_object(tmp_path / ANNOUNCEMENT) == {"url": "http://127.0.0.1:1"}
    first.close()
    assert not (tmp_path / ANNOUNCEMENT).exists()
    assert second.claim() is None
    second.close()


def test_a_killed_agent_leaves_its_sums_and_not_its_place(tmp_path: Path) -> None:
    """The kernel gives the lock back; the sums are there for the next."""
    code = (
        "import sys, os; from pathlib import Path; from diag.node.files import AgentFiles\n"
        "files = AgentFiles(Path(sys.argv[1])); assert files.claim() is None; files.keep_totals({'a|b': 3.0}); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    next_one = AgentFiles(tmp_path)
    assert next_one.claim() is None
    assert next_one.totals() == {"a|b": 3.0}
    next_one.close()


@pytest.mark.parametrize("text", ["", "[]", '{"a": NaN}', '{"a": -1}', '{"a": "1"}', "{" * 2000, "\x00"])
def test_sums_that_make_no_sense_are_none(tmp_path: Path, text: str) -> None:
    """What a torn or alien file says is not added to anything."""
    (tmp_path / TOTALS).write_text(text)
    assert AgentFiles(tmp_path).totals() == {}


def test_planted_files_are_neither_followed_nor_written_through(tmp_path: Path) -> None:
    """A link is not read and its target stays as it was; a FIFO keeps nobody waiting; another user's file is not believed."""
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"a": 1}))
    place = tmp_path / "run"
    place.mkdir()
    (place / TOTALS).symlink_to(secret)
    (place / ANNOUNCEMENT).symlink_to(secret)
    files = AgentFiles(place)
    assert files.claim() is None
    assert files.totals() == {}
    assert files.announce({"url": "x"}) is None
    assert json.loads(secret.read_text()) == {"a": 1}
    assert read_object(place / ANNOUNCEMENT) == {"url": "x"}
    files.close()
    os.mkfifo(place / "fifo")
    assert isinstance(read_object(place / "fifo"), Unavailable)
    (place / LOCK).unlink()
    (place / LOCK).symlink_to(secret)
    assert isinstance(AgentFiles(place).claim(), Unavailable)
    if os.geteuid() == 0:
        (place / TOTALS).unlink()
        (place / TOTALS).write_text('{"a": 1}')
        os.chown(place / TOTALS, 65534, 65534)
        assert AgentFiles(place).totals() == {}


def test_a_place_that_is_gone_or_read_only_is_a_reason(tmp_path: Path) -> None:
    """No exception leaves: the agent answers without its files."""
    files = AgentFiles(tmp_path / "absent")
    assert isinstance(files.claim(), Unavailable)
    assert isinstance(files.announce({}), Unavailable)
    files.close()
