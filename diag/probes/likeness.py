"""What a live worker's interpreter, processors and allocator are, so that a probe can be like it.

Owns the ladder from a process to its interpreter: its first argument, its VIRTUAL_ENV, the environment that its libraries lie in, its
binary. Promises the same binary as the worker runs, and how it was found; that a worker which holds its memory lock is given up after a
deadline; and to keep no other variable of its environment than those of the allocator and the interpreter. Refuses to signal or trace it.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from diag.probes.environment import ALLOCATOR
from hwr.errors import EXIT_NOT_MEASURED, EXIT_TIMEOUT, HwrError, OptionError, Unavailable, errno_text
from hwr.outcomes import FailureCode
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT
from hwr.procfs.status import read_status
from hwr.units import printable

OPTION: Final = "--like"
ANSWER_S: Final = 5.0
# What an interpreter needs to find what the worker found; paths in it are made absolute.
INTERPRETER: Final = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_PYTHON_NAME: Final = re.compile(r"(python|pypy)[\d.]*(-dbg|d|t)?\Z", re.ASCII)
_LIBPYTHON: Final = re.compile(rb"/lib(?:python\d|pypy)[^/\n]*$", re.MULTILINE)
_SITE_PACKAGES: Final = re.compile(rb" (/[^\n]*?)/lib(?:64)?/(?:python|pypy)[^/\n]*/site-packages/[^\n]*\.so", re.MULTILINE)
_DELETED: Final = " (deleted)"

Answer = TypeVar("Answer")


class From(StrEnum):
    """How an interpreter was found."""

    ARGV0 = "argv0"
    VIRTUAL_ENV = "virtual_env"
    SITE_PACKAGES = "site_packages"
    EXE = "exe"
    GIVEN = "given"


class WorkerUnreadable(HwrError):
    """--like {pid}: {problem}
    {remedy}"""

    code = FailureCode.UNREADABLE
    exit_code = EXIT_NOT_MEASURED


class WorkerSilent(WorkerUnreadable):
    """--like {pid}: {problem}
    {remedy}"""

    exit_code = EXIT_TIMEOUT


@dataclass(frozen=True, slots=True)
class Likeness:
    """What of a worker a probe can take on. `environment` has the variables of its allocator and its interpreter as they were at exec."""

    pid: int
    python: str
    python_from: From
    cpu_affinity: tuple[int, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "pid": self.pid,
            "python": self.python,
            "python_from": self.python_from.value,
            "cpu_affinity": list(self.cpu_affinity),
            "environment": dict(self.environment),
        }


def is_like_variable(name: str) -> bool:
    """Say whether a variable is one that a likeness decides: where the worker has none, neither has the probe."""
    return name in INTERPRETER or ALLOCATOR.fullmatch(name) is not None


def like(pid: int, *, python: str | None = None, proc_root: Path = PROC_ROOT, answer_s: float = ANSWER_S) -> Likeness:
    """Return what a process is like; with `python` it is that interpreter instead, which has its own paths.

    Raises:
        OptionError: there is no such process, or it is none that has a Python interpreter.
        WorkerUnreadable: it belongs to another user.
        WorkerSilent: its memory lock is held, so that it cannot be read now.
    """
    status = read_status(pid, proc_root)
    if isinstance(status, Unavailable):
        raise _refused(pid, "there is no such process", "Give the PID of a live worker.")
    if status.tgid not in (None, pid):
        raise _refused(pid, f"it is a thread of process {status.tgid}", f"Give that: --like {status.tgid}.")
    if status.state in ("Z", "X"):
        raise _refused(pid, "it has ended and waits for its parent (zombie)", "Give the PID of a live worker.")
    if status.kernel_thread or (status.kernel_thread is None and status.vm_size is None):
        raise _refused(pid, f"it is a kernel thread ({printable(status.name)})", "Give the PID of a live worker.")
    worker = _answered(pid, answer_s, lambda: _Worker.read(proc_root / str(pid)))
    chosen, found_by = (python, From.GIVEN) if python is not None else _interpreter(pid, worker)
    kept = worker.kept()
    if python is not None:
        kept = {name: value for name, value in kept.items() if name not in INTERPRETER}
    try:
        cpus = tuple(sorted(os.sched_getaffinity(pid)))
    except OSError as error:
        raise _refused(pid, f"its processors are not known: {errno_text(error)}", "Give the PID of a live worker.") from error
    return Likeness(pid, chosen, found_by, cpus, kept)


@dataclass(frozen=True, slots=True)
class _Worker:
    """What /proc says of it. The environment is that at exec; the arguments may have been overwritten since (setproctitle)."""

    directory: Path
    exe: str
    cwd: str
    argv0: str
    environ: Mapping[str, str]
    maps: bytes

    @classmethod
    def read(cls, directory: Path) -> _Worker:
        """Read it; may block for as long as its memory lock is held.

        Raises:
            OSError: it is not allowed, or it has ended.
        """
        environ: dict[str, str] = {}
        for entry in (directory / "environ").read_bytes().split(b"\0"):
            name, equals, value = entry.partition(b"=")
            if equals:
                environ.setdefault(os.fsdecode(name), os.fsdecode(value))
        return cls(
            directory=directory,
            exe=os.readlink(directory / "exe"),
            cwd=os.readlink(directory / "cwd"),
            argv0=os.fsdecode((directory / "cmdline").read_bytes().partition(b"\0")[0]),
            environ=environ,
            maps=(directory / "maps").read_bytes(),
        )

    def runs(self, path: str) -> bool:
        """Say whether a file is the binary that it runs: the same inode, whatever links lead there."""
        try:
            found, own = os.stat(path), os.stat(self.directory / "exe")
        except (OSError, ValueError):
            return False
        return os.path.samestat(found, own) and os.access(path, os.X_OK)

    def kept(self) -> dict[str, str]:
        """Return its variables of allocator and interpreter, with paths that mean the same elsewhere."""
        kept = {name: value for name, value in self.environ.items() if is_like_variable(name)}
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
            if kept.get(name):
                kept[name] = ":".join(os.path.join(self.cwd, entry) if entry else self.cwd for entry in kept[name].split(":"))
        if kept.get("PYTHONHOME"):
            kept["PYTHONHOME"] = ":".join(os.path.join(self.cwd, entry) for entry in kept["PYTHONHOME"].split(":"))
        if "LD_PRELOAD" in kept:  # a name without a slash is searched for, as ld.so(8) says
            words = re.split(r"[ :]+", kept["LD_PRELOAD"])
            kept["LD_PRELOAD"] = ":".join(os.path.join(self.cwd, word) if "/" in word else word for word in words if word)
        return kept


def _interpreter(pid: int, worker: _Worker) -> tuple[str, From]:
    is_python = _PYTHON_NAME.match(os.path.basename(worker.exe.removesuffix(_DELETED))) is not None
    if not is_python:
        shown = printable(worker.exe)
        if _LIBPYTHON.search(worker.maps):
            raise _refused(pid, f"{shown} embeds a Python and is no interpreter itself", "Name one with the same packages: --python PATH.")
        raise _refused(pid, f"it is not a Python process (it runs {shown})", "Give the PID of a worker, or an interpreter: --python PATH.")
    for found_by, path in _candidates(worker):
        if worker.runs(path):
            return path, found_by
    if worker.exe.endswith(_DELETED):
        problem = f"its interpreter {printable(worker.exe.removesuffix(_DELETED))} was deleted or replaced since it started"
    else:
        problem = f"its interpreter {printable(worker.exe)} is another file here, or cannot be executed (another mount namespace?)"
    raise _refused(pid, problem, "Run this inside its container, or name an interpreter: --python PATH.")


def _candidates(worker: _Worker) -> Iterator[tuple[From, str]]:
    """Yield paths in the order of the ladder. A path is not resolved: which environment it is depends on where its link lies."""
    if "/" in worker.argv0:
        yield From.ARGV0, os.path.normpath(os.path.join(worker.cwd, worker.argv0))
    elif worker.argv0:
        for directory in worker.environ.get("PATH", os.defpath).split(":"):
            path = os.path.join(worker.cwd, directory, worker.argv0)
            if os.path.isfile(path):
                yield From.ARGV0, os.path.normpath(path)
                break
    prefixes = list(dict.fromkeys(os.fsdecode(match[1]) for match in _SITE_PACKAGES.finditer(worker.maps)))
    name = os.path.basename(worker.exe.removesuffix(_DELETED))
    virtual = worker.environ.get("VIRTUAL_ENV")
    # A shell's VIRTUAL_ENV is inherited by whatever it starts: believed only if the loaded libraries do not say otherwise.
    if virtual and (not prefixes or any(_same(prefix, virtual) for prefix in prefixes)):
        yield from ((From.VIRTUAL_ENV, os.path.join(virtual, "bin", word)) for word in ("python", "python3", name))
    for prefix in prefixes:
        if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
            yield from ((From.SITE_PACKAGES, os.path.join(prefix, "bin", word)) for word in ("python", "python3", name))
    yield From.EXE, worker.exe


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def _answered(pid: int, seconds: float, read: Callable[[], Answer]) -> Answer:
    """Return what `read` returns, in a thread of its own: it may block in the kernel, and then nobody waits for it."""
    answers: queue.SimpleQueue[Answer | OSError] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(read())
        except OSError as error:
            answers.put(error)

    threading.Thread(target=run, name="hwr-like", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        remedy = "Try again when it is not starting, forking or mapping; or say what you want: --python PATH --cpu LIST."
        raise WorkerSilent(pid=pid, problem=f"no answer within {seconds:g} s: its memory lock is held", remedy=remedy) from None
    if isinstance(answer, PermissionError):
        remedy = f"Run this as its user or with {CAP_SYS_PTRACE}, or say what you want: --python PATH --cpu LIST."
        raise WorkerUnreadable(pid=pid, problem=f"it may not be read by this user: {errno_text(answer)}", remedy=remedy) from answer
    if isinstance(answer, OSError):
        raise _refused(pid, f"it ended while it was read ({errno_text(answer)})", "Give the PID of a live worker.") from answer
    return answer


def _refused(pid: int, problem: str, remedy: str) -> OptionError:
    return OptionError(option=f"{OPTION} {pid}", problem=problem, remedy=remedy)
