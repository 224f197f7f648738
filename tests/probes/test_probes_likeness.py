"""A probe can be like a live worker, or is told why not."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from probes_standins import until

import hwr
from diag.probes.likeness import From, WorkerSilent, WorkerUnreadable, like
from hwr.errors import OptionError

WAIT = "print('ready', flush=True); sys.stdin.read()"
# What setproctitle does: write over the arguments, whose place /proc/PID/stat tells (fields 48 and 49).
RENAME = """
import ctypes, sys
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[45]), int(fields[46])
ctypes.memset(begin, 0, end - begin)
ctypes.memmove(begin, b"worker: 0", 9)
"""

Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python that says when it is ready, and end it afterwards."""
    with contextlib.ExitStack() as stack:

        def child(python: str, code: str, environment: dict[str, str] | None = None, cwd: Path | None = None) -> int:
            command = [python, "-c", f"import sys\n{code}\n{WAIT}"]
            env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | (environment or {})
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=cwd)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process.pid

        yield child


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment with a native module in its site-packages."""
    return make_venv(tmp_path / "venv")


def make_venv(path: Path) -> Path:
    """Make one without pip; it takes a tenth of a second."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(path)], check=True, timeout=120)
    (site,) = glob.glob(f"{path}/lib/python*/site-packages")
    found = sorted(glob.glob(f"{sysconfig.get_path('platstdlib')}/lib-dynload/*.so")) or sorted(
        glob.glob(f"{sys.prefix}/**/*.so", recursive=True)
    )
    shutil.copy(found[0], f"{site}/native.so")
    return path


def load(path: Path) -> str:
    """Return code that maps the environment's native module."""
    return f"import ctypes, glob; kept = ctypes.CDLL(glob.glob('{path}/lib/python*/site-packages/native.so')[0])"


def test_the_first_argument_says_which_environment(venv: Path, start: Start) -> None:
    found = like(start(str(venv / "bin/python"), ""))
    assert (found.python, found.python_from) == (str(venv / "bin/python"), From.ARGV0)
    assert found.cpu_affinity == tuple(sorted(os.sched_getaffinity(0)))
    assert found.to_json()["python_from"] == "argv0"


def test_a_relative_first_argument_is_the_workers(venv: Path, start: Start) -> None:
    assert like(start("bin/python", "", cwd=venv)).python == str(venv / "bin/python")


def test_a_bare_first_argument_is_looked_up_on_the_workers_path(venv: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{venv}/bin:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    found = like(start("python", "", {"PATH": path}))
    assert (found.python, found.python_from) == (str(venv / "bin/python"), From.ARGV0)


def test_a_worker_that_renamed_itself_is_found_by_its_virtual_env(venv: Path, start: Start) -> None:
    pid = start(str(venv / "bin/python"), RENAME, {"VIRTUAL_ENV": str(venv)})
    assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"worker: 0\0")
    found = like(pid)
    assert (found.python, found.python_from) == (str(venv / "bin/python"), From.VIRTUAL_ENV)


def test_a_worker_that_renamed_itself_is_found_by_its_libraries(venv: Path, start: Start) -> None:
    found = like(start(str(venv / "bin/python"), load(venv) + RENAME))
    assert (found.python, found.python_from) == (str(venv / "bin/python"), From.SITE_PACKAGES)


def test_loaded_libraries_are_believed_before_an_inherited_virtual_env(venv: Path, tmp_path: Path, start: Start) -> None:
    other = make_venv(tmp_path / "other")
    found = like(start(str(venv / "bin/python"), load(venv) + RENAME, {"VIRTUAL_ENV": str(other)}))
    assert (found.python, found.python_from) == (str(venv / "bin/python"), From.SITE_PACKAGES)


def test_without_any_trace_it_is_the_binary(venv: Path, start: Start) -> None:
    pid = start(str(venv / "bin/python"), RENAME)
    found = like(pid)
    assert (found.python, found.python_from) == (os.readlink(f"/proc/{pid}/exe"), From.EXE)


def test_a_first_argument_that_is_another_binary_is_not_believed(venv: Path, tmp_path: Path, start: Start) -> None:
    """Somebody replaced the file since: what would run now is not what runs there."""
    python = tmp_path / "copied/python3"
    python.parent.mkdir()
    shutil.copy(os.path.realpath(sys.executable), python)
    pid = start(str(python), "")
    python.unlink()
    shutil.copy(os.path.realpath(sys.executable), python)
    with pytest.raises(OptionError, match="was deleted or replaced since it started") as raised:
        like(pid)
    assert "--python" in raised.value.way_out


def test_only_the_allocators_and_the_interpreters_variables_are_kept(venv: Path, start: Start) -> None:
    given = {
        "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2", "_RJEM_MALLOC_CONF": "narenas:1", "SECRET_TOKEN": "x",
        "PYTHONPATH": "relative:/absolute:", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    }  # fmt: skip
    found = like(start(str(venv / "bin/python"), "", given, cwd=venv))
    assert found.environment["PYTHONPATH"] == f"{venv}/relative:/absolute:{venv}"
    assert found.environment.items() >= {name: given[name] for name in given if name not in ("SECRET_TOKEN", "PYTHONPATH")}.items()
    assert "SECRET_TOKEN" not in found.environment
    assert "PATH" not in found.environment


def test_a_given_interpreter_wins_and_keeps_its_own_paths(venv: Path, start: Start) -> None:
    pid = start(str(venv / "bin/python"), "", {"PYTHONPATH": "/x", "PYTHONMALLOC": "malloc"})
    found = like(pid, python="/some/python")
    assert (found.python, found.python_from) == ("/some/python", From.GIVEN)
    assert dict(found.environment).get("PYTHONMALLOC") == "malloc"
    assert "PYTHONPATH" not in found.environment


def test_its_processors_are_taken(venv: Path, start: Start) -> None:
    chosen = max(os.sched_getaffinity(0))
    pid = start(str(venv / "bin/python"), f"import os; os.sched_setaffinity(0, {{{chosen}}})")
    assert like(pid).cpu_affinity == (chosen,)


def test_what_is_no_python_process_is_refused() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            until(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith(("sleep", "coreutils", "busybox")))
            with pytest.raises(OptionError, match=r"--like \d+: it is not a Python process \(it runs .*\)\n.*--python") as raised:
                like(process.pid)
            assert raised.value.exit_code == 2
        finally:
            process.kill()


def test_who_has_ended_never_was_or_is_a_thread_is_refused(start: Start) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    with pytest.raises(OptionError, match="zombie"):
        like(process.pid)
    process.wait()
    with pytest.raises(OptionError, match="there is no such process"):
        like(process.pid)
    pid = start(sys.executable, "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    (thread,) = {int(name) for name in os.listdir(f"/proc/{pid}/task")} - {pid}
    with pytest.raises(OptionError, match=rf"it is a thread of process {pid}\nGive that: --like {pid}"):
        like(thread)


def test_a_kernel_thread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2/status").write_text("Name:\tkthreadd\nState:\tS (sleeping)\nTgid:\t2\nPid:\t2\nPPid:\t0\n")
    with pytest.raises(OptionError, match=r"it is a kernel thread \(kthreadd\)"):
        like(2, proc_root=tmp_path)


def test_a_worker_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """A FIFO without a writer blocks a reader as a held memory lock does."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/status").write_text("Name:\tpython\nState:\tS (sleeping)\nTgid:\t7\nPid:\t7\nPPid:\t1\nVmSize:\t1 kB\n")
    os.mkfifo(tmp_path / "7/environ")
    with pytest.raises(WorkerSilent, match=r"no answer within 0.2 s: its memory lock is held\n.*--python") as raised:
        like(7, proc_root=tmp_path, answer_s=0.2)
    assert raised.value.exit_code == 4
    os.close(os.open(tmp_path / "7/environ", os.O_WRONLY | os.O_NONBLOCK))  # lets the thread go


def test_another_users_worker_needs_a_capability(start: Start) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    pid = start(sys.executable, "")
    code = f"from diag.probes.likeness import *\ntry: like({pid})\nexcept WorkerUnreadable as error: print(error.exit_code, error)"
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environment = {**os.environ, "PYTHONPATH": str(Path(hwr.__file__).parents[1])}
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/", timeout=60)
    assert done.stdout.startswith(f"3 --like {pid}: it may not be read by this user: EACCES"), done.stderr
    assert "CAP_SYS_PTRACE" in done.stdout
    assert issubclass(WorkerUnreadable, Exception)
