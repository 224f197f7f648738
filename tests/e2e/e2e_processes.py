"""Processes of the tests of the main job: commands and scripts in fresh processes, and what each left behind.

Two ways to run one. `Programs` starts an interpreter. `Forge` forks from one that has imported everything and done nothing: a process
as fresh, without the two seconds that the imports take.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hwr
from hwr.telemetry.reader import JournalReader
from hwr.telemetry.state import WorkerState

REPOSITORY = Path(hwr.__file__).resolve().parents[1]
# Before a forked process begins: another user, or a mount namespace of its own (mount(8) is called with what follows).
NOBODY = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"
DEADLINE_SECONDS = 120.0

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Journal:
    """What one process wrote: its records, and the state that they fold to."""

    path: Path
    records: list[dict[str, Any]]
    state: WorkerState

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the attributes of every event of this name, in order."""
        return [record["attrs"] for record in self.records if record["event"] == name]

    def failures(self) -> list[str]:
        return [attrs["error.code"] for attrs in self.of("hwr.runtime.failure.record")]


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    rc: int
    out: str
    err: str
    run_dir: Path

    @property
    def journals(self) -> list[Journal]:
        return journals(self.run_dir)

    @property
    def journal(self) -> Journal:
        (one,) = self.journals
        return one

    @property
    def state(self) -> WorkerState:
        return self.journal.state

    @property
    def report(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value

    def lines(self) -> list[str]:
        return self.err.splitlines()


def journals(run_dir: Path) -> list[Journal]:
    found = []
    for path in sorted(run_dir.glob("*/r*.*.*")):
        reader = JournalReader(path, from_start=True)
        records = list(reader.records())
        reader.close()
        found.append(Journal(path, records, reader.state))
    return found


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: did not come true in {seconds} s"
        time.sleep(0.005)  # a poll, with the deadline above
    return value


@dataclass
class Running:
    """A process that goes on; `stop` or the end of the test ends it."""

    process: subprocess.Popen[str]
    run_dir: Path

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self, number: int) -> Done:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        return Done(self.process.returncode, out, err, self.run_dir)

    def journal(self) -> Journal | None:
        found = journals(self.run_dir)
        return found[0] if found else None


@dataclass
class Programs:
    """Starts processes that write their journals below `base`, each in a directory of its own."""

    base: Path
    running: list[Running] = field(default_factory=list)

    def hwr(self, *arguments: object, **more: Any) -> Done:
        """Run the command."""
        return self.run([sys.executable, "-m", "hwr.cli.main", *map(str, arguments)], **more)

    def python(self, script: str, *arguments: object, **more: Any) -> Done:
        """Run a script."""
        return self.run([sys.executable, "-c", script, *map(str, arguments)], **more)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        run_dir: Path | None = None,
        stdin: str | None = None,
    ) -> Done:
        run_dir = run_dir or self.run_dir()
        done = subprocess.run(
            command,
            env=self.environment(run_dir, env),
            cwd=self.base,
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr, run_dir)

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, run_dir: Path | None = None) -> Running:
        """Start a process that goes on."""
        run_dir = run_dir or self.run_dir()
        process = subprocess.Popen(
            command,
            env=self.environment(run_dir, env),
            cwd=self.base,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what it forks can be ended with it
        )
        self.running.append(Running(process, run_dir))
        return self.running[-1]

    def start_hwr(self, *arguments: object, **more: Any) -> Running:
        return self.start([sys.executable, "-m", "hwr.cli.main", *map(str, arguments)], **more)

    def start_python(self, script: str, *arguments: object, **more: Any) -> Running:
        return self.start([sys.executable, "-c", script, *map(str, arguments)], **more)

    def run_dir(self) -> Path:
        path = self.base / f"run-{next(_numbers)}"
        path.mkdir(mode=0o700)
        return path

    def environment(self, run_dir: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**clean_environment(), "HWR_RUN_DIR": str(run_dir), **(more or {})}

    def close(self) -> None:
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            with contextlib.suppress(ValueError):  # its pipes were closed when it was stopped
                one.process.communicate(timeout=DEADLINE_SECONDS)


def clean_environment() -> dict[str, str]:
    """Return an environment in which only the test's own settings hold."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HWR_")}
    # Two cores are shared by everything here; threads of a model this small only wait for each other.
    return kept | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


# The process that everything is forked from. It has one thread, and neither telemetry nor a store was ever touched in it.
_FORGE = """
import atexit, ctypes, json, os, resource, subprocess, sys, traceback
import torch, transformers, transformers.utils.logging
from transformers import BertModel, LlamaForCausalLM
import hwr.runtime, hwr.cli.main, hwr.loader.factory, hwr.store.publish
CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 0x44000

def mount(*arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if not mounted:
        assert libc.unshare(CLONE_NEWNS) == 0
        assert libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None) == 0
        mounted.append(True)
    subprocess.run(["mount", *arguments], check=True)

mounted = []
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"rc": os.waitstatus_to_exitcode(status), "pid": pid}), flush=True)
        continue
    for number, path in enumerate((order["out"], order["err"]), 1):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.update(order["env"])
    sys.argv = ["-c", *order["arguments"]]
    if order["files"]:
        held = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + order["files"], 4096))
    status = 0
    try:
        exec(order["prepare"])
        if order["script"] is not None:
            exec(compile(order["script"], "<script>", "exec"), {"__name__": "__main__"})
        else:
            status = hwr.cli.main.main(order["arguments"])
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 70
    # What an interpreter does at its end, except taking two large libraries apart, which takes longer than the tests.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


class Forge:
    """Runs commands and scripts in forks of one warmed-up interpreter, one at a time."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._errors = base / "forge.err"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _FORGE],
                env=clean_environment(),
                cwd=base,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._expect("ready\n")

    def hwr(self, *arguments: object, **more: Any) -> Done:
        """Run the command."""
        return self._run(None, arguments, **more)

    def python(self, script: str, *arguments: object, **more: Any) -> Done:
        """Run a script."""
        return self._run(script, arguments, **more)

    def _run(
        self,
        script: str | None,
        arguments: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        files: int = 0,
        prepare: str = "",
        run_dir: Path | None = None,
    ) -> Done:
        """`files` is how many descriptors it may open, 0 for no limit; `prepare` is done first, where `mount` is at hand."""
        number = next(_numbers)
        run_dir = run_dir or self.base / f"run-{number}"
        run_dir.mkdir(mode=0o700, exist_ok=True)
        out, err = self.base / f"{number}.out", self.base / f"{number}.err"
        order = {
            "script": script,
            "arguments": [str(argument) for argument in arguments],
            "env": {"HWR_RUN_DIR": str(run_dir), **(env or {})},
            "files": files,
            "prepare": prepare,
            "out": str(out),
            "err": str(err),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or self._problem())
        return Done(answer["rc"] if answer["rc"] >= 0 else 128 - answer["rc"], out.read_text(), err.read_text(), run_dir)

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != word:
            self._problem()

    def _problem(self) -> str:
        raise AssertionError(f"the process that others are forked from ended: {self._errors.read_text()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=DEADLINE_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


def tree(root: Path) -> Iterator[Path]:
    """Yield every file and directory below a root."""
    for directory, names, files in os.walk(root):
        yield from (Path(directory) / name for name in (*names, *files))
