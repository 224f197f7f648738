"""Children of a command: none outlives it, and a second signal does not tear the clean-up of the first."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hwr
from hwr.ending import Terminated, terminated

REPOSITORY = Path(hwr.__file__).resolve().parents[1]
# A command whose child arms the kernel's parent-death signal and waits.
COMMAND = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
child.wait()
"""
CHILD = """
import signal, sys
from hwr.cli.children import end_with_parent
from hwr.ending import terminated
with terminated() as stop:
    end_with_parent(int(sys.argv[1]))
    print("waiting", flush=True)
    while True:
        signal.pause()
print("ended", stop.signal, flush=True)
"""


@pytest.fixture
def command() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen([sys.executable, "-c", COMMAND, CHILD], env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, "nothing was said for a minute"
    return process.stdout.readline()


def test_a_child_ends_in_order_when_its_command_is_killed(command: subprocess.Popen[str]) -> None:
    assert line(command) == "waiting\n"
    command.kill()
    assert line(command) == f"ended {int(signal.SIGTERM)}\n"


def test_a_child_whose_command_is_gone_already_ends_at_once() -> None:
    code = "from hwr.cli.children import end_with_parent\nend_with_parent(1 << 30)\nprint('goes on')"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")


def test_a_second_signal_does_not_tear_the_clean_up_of_the_first() -> None:
    told: list[str] = []
    with terminated(lambda: told.append("told")) as stop:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            told.append("cleaned up")
    assert told == ["told", "cleaned up"]
    assert (stop.signal, stop.exit_code) == (signal.SIGTERM, 128 + signal.SIGTERM)


def test_handlers_are_given_back_and_a_signal_may_be_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with terminated(ignore=(signal.SIGINT,)) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert stop.exit_code == 0
    assert {number: signal.getsignal(number) for number in before} == before


def test_other_exceptions_pass() -> None:
    with pytest.raises(KeyError), terminated():
        raise KeyError("mine")
    assert issubclass(Terminated, BaseException)
    assert not issubclass(Terminated, Exception)


STUBBORN = """
import signal, subprocess, sys, time
from hwr.cli import children
children.PATIENCE_SECONDS = float(sys.argv[1])
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); [signal.pause() for _ in range(9)]"
with subprocess.Popen([sys.executable, "-c", code]) as child, children.forwarding([child]) as stop:
    print("ready", flush=True)
    child.wait()
    print(child.returncode, stop.signal, flush=True)
"""


def test_a_child_that_does_not_answer_is_killed_when_asked_again() -> None:
    """A rank in a driver call hears no SIGTERM; whoever asks a second time, after a while, means it."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen([sys.executable, "-c", STUBBORN, "0.2"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert {line(process), line(process)} == {"ready\n", "deaf\n"}
        assert process.stdout is not None
        asked = 0
        while not asked or not select.select([process.stdout], [], [], 0.1)[0]:
            process.send_signal(signal.SIGTERM)
            asked += 1
        assert 1 < asked < 100
        assert line(process) == f"{-signal.SIGKILL} {int(signal.SIGTERM)}\n"
