"""An interpreter that cannot run the probe is refused before anything is measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from diag.probes.interpreter import cpus_of, runnable
from hwr.errors import OptionError


def script(path: Path, text: str, mode: int = 0o755) -> str:
    """Write an executable."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def test_a_link_of_a_virtual_environment_stays_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert runnable(str(link)) == str(link)
    monkeypatch.chdir(tmp_path)
    assert runnable("./python") == str(link)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runnable("python") == str(link)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 0", "not a Python that works"),
        ("exec cat /dev/zero", "not a Python that works"),
        ("echo hwr-python 3.8.1", "is Python 3.8; the probe needs 3.9 or later"),
        ("echo hwr-python 2.7.18", "is Python 2.7"),
    ],
)
def test_what_is_no_python_or_too_old_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as raised:
        runnable(script(tmp_path / "python", text))
    assert raised.value.way_out
    assert raised.value.exit_code == 2


def test_what_is_absent_a_directory_or_not_executable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    with pytest.raises(OptionError, match=r"is a directory\nDid you mean .*/env/bin/python\?"):
        runnable(str(tmp_path / "env"))
    with pytest.raises(OptionError, match=r"there is no .*/absent"):
        runnable(str(tmp_path / "absent"))
    with pytest.raises(OptionError, match="no such-python on PATH"):
        runnable("such-python")
    with pytest.raises(OptionError, match="blank name"):
        runnable("")
    with pytest.raises(OptionError, match="not executable"):
        runnable(script(tmp_path / "plain", "exit 0", 0o644))
    (tmp_path / "garbage").write_bytes(b"\0\1\2\3")
    (tmp_path / "garbage").chmod(0o755)
    with pytest.raises(OptionError, match="cannot be started: ENOEXEC"):
        runnable(str(tmp_path / "garbage"))
    with pytest.raises(OptionError, match=r"^--like 7: "):
        runnable(str(tmp_path / "absent"), option="--like 7")


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("0-6:3", (0, 3, 6)), ("3,1", (1, 3)), (" 1 , 2 ", (1, 2)), ("1,1", (1,))]
)
def test_a_list_of_processors_reads_as_taskset_reads_it(text: str, cpus: tuple[int, ...]) -> None:
    assert cpus_of(text) == cpus


@pytest.mark.parametrize("text", ["", ",", "a", "3-1", "-1", "0-", "0-4:0", "99999", "0-999999999", "1.5", "٣", "0x1"])
def test_what_is_no_list_of_processors_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"--cpu: .* is not a list of processors"):
        cpus_of(text)


def test_asking_leaves_no_process(tmp_path: Path) -> None:
    path = script(tmp_path / "python", f"echo $$ > {tmp_path}/pid; exec cat /dev/zero")
    with pytest.raises(OptionError):
        runnable(path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
