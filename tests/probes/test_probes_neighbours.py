"""Who has the probe's libraries mapped is seen to come and go, and nobody who hangs is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from probes_standins import until

from diag.probes.neighbours import Watch, library_keys

WAIT = [sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.read()"]


def waiting() -> subprocess.Popen[str]:
    """Start a Python that waits until its standard input ends."""
    process = subprocess.Popen(WAIT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    """End it."""
    process.communicate()


class Clock:
    """A clock that a test sets forward, so that every look is due."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def fake(root: Path, pid: int, library: str | None, *, inode: int = 77, start: int = 5) -> None:
    """Write a process of a /proc on disk."""
    (root / str(pid)).mkdir(parents=True, exist_ok=True)
    line = f"7f00-7f01 r-xp 00000000 fe:01 {inode} {library}\n" if library else "7f00-7f01 rw-p 00000000 00:00 0\n"
    (root / str(pid) / "maps").write_text(line)
    numbers = " ".join(str(start if at == 19 else 0) for at in range(1, 50))
    (root / str(pid) / "stat").write_text(f"{pid} (na\x1bme) S {numbers}\n")


TORCH = "/env/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"


def test_the_libraries_are_those_of_the_probe_and_its_interpreter() -> None:
    text = b"".join(
        b"7f00-7f01 r-xp 00000000 fe:01 %d    %s\n" % (number, path.encode())
        for number, path in enumerate((
            TORCH, "/e/safetensors/_safetensors_rust.abi3.so", "/usr/lib/libc.so.6", "/usr/bin/python3.11", "/lib/libpython3.12.so.1.0",
            "/usr/share/python3/data", "/home/libtorch/other.so",
        ))
    )  # fmt: skip
    assert library_keys(text) == (b" fe:01 0 ", b" fe:01 1 ", b" fe:01 3 ", b" fe:01 4 ")


def test_a_process_that_starts_and_one_that_ends_are_told(tmp_path: Path) -> None:
    probe, before = waiting(), waiting()
    watch = Watch(probe.pid, clock=Clock())
    until(lambda: watch.look() is None and before.pid in watch._known)  # the first look has come to it
    after = waiting()
    until(lambda: watch.look() is None and after.pid in watch._known)
    ended(before)
    watch.look()
    ended(probe)
    told = watch.finish()
    ended(after)
    assert told is not None
    assert after.pid in {entry["pid"] for entry in told["started"]}
    assert before.pid in {entry["pid"] for entry in told["ended"]}
    assert before.pid not in {entry["pid"] for entry in told["started"]}
    assert not {probe.pid, os.getpid()} & {entry["pid"] for word in ("started", "ended") for entry in told[word]}


def test_a_process_that_loads_the_libraries_long_after_it_started_is_told(tmp_path: Path) -> None:
    fake(tmp_path, 1, TORCH)
    fake(tmp_path, 2, None)
    watch = Watch(1, proc_root=tmp_path, clock=Clock())
    until(lambda: watch.look() is None and not watch._asked)
    fake(tmp_path, 2, TORCH)
    assert watch.finish() == {"started": [{"pid": 2, "name": "na\\x1bme"}], "ended": [], "unread": 0}


def test_a_number_that_was_given_to_another_process_is_two_neighbours(tmp_path: Path) -> None:
    fake(tmp_path, 1, TORCH)
    fake(tmp_path, 2, TORCH, start=5)
    watch = Watch(1, proc_root=tmp_path, clock=Clock())
    until(lambda: 2 in watch._known or watch.look() is not None)
    fake(tmp_path, 2, TORCH, start=6)
    told = watch.finish()
    assert told == {"started": [{"pid": 2, "name": "na\\x1bme"}], "ended": [{"pid": 2, "name": "na\\x1bme"}], "unread": 0}


def test_a_library_of_another_file_is_no_neighbour(tmp_path: Path) -> None:
    fake(tmp_path, 1, TORCH)
    watch = Watch(1, proc_root=tmp_path, clock=Clock())
    fake(tmp_path, 2, TORCH, inode=78)
    fake(tmp_path, 3, TORCH, inode=177)
    assert watch.finish() == {"started": [], "ended": [], "unread": 0}


def test_who_does_not_answer_is_unread_and_nobody_waits_again(tmp_path: Path) -> None:
    fake(tmp_path, 1, TORCH)
    for pid in (2, 3):
        fake(tmp_path, pid, None)
        (tmp_path / f"{pid}/maps").unlink()
        os.mkfifo(tmp_path / f"{pid}/maps")
    fake(tmp_path, 4, TORCH)
    watch = Watch(1, proc_root=tmp_path, clock=Clock(), answer_s=0.1)
    until(lambda: watch.look() is None and 4 in watch._known)
    begun = time.monotonic()
    told = watch.finish()
    assert told == {"started": [], "ended": [], "unread": 2}
    assert time.monotonic() - begun < 1.0
    for pid in (2, 3):
        os.close(os.open(tmp_path / f"{pid}/maps", os.O_WRONLY | os.O_NONBLOCK))  # lets the threads go


def test_what_another_user_hides_is_unread() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    code = "import os\nfrom diag.probes.neighbours import Watch\nwatch = Watch(os.getpid())\nprint(watch.finish()['unread'])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/", timeout=60)
    assert int(done.stdout) > 0, done.stderr


def test_a_probe_that_is_gone_has_no_neighbours(tmp_path: Path) -> None:
    watch = Watch(1, proc_root=tmp_path)
    watch.look()
    assert watch.finish() is None
