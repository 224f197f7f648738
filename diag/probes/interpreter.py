"""The Python that a probe runs under.

Owns the way from a word on a command line to an interpreter that can run the probe, and the processors it may use.
Promises that what cannot run is refused before anything is measured, with the cause and the way out; that a link of a virtual
environment stays a link, since it decides which packages are found. Refuses to import anything there.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from hwr.errors import OptionError, errno_text
from hwr.units import printable

OLDEST: Final = (3, 9)
_OLDEST_TEXT: Final = ".".join(map(str, OLDEST))
# An interpreter on a cold network filesystem takes seconds; `-S` spares it site-packages.
_DEADLINE_S: Final = 30.0
_ANSWER_BYTES: Final = 4096
_ANSWER: Final = re.compile(rb"hwr-python (\d+)\.(\d+)\.\d+\n")
_QUESTION: Final = "import sys; sys.stdout.write('hwr-python %d.%d.%d\\n' % tuple(sys.version_info[:3]))"  # Python 2 can run it too
# CONFIG_NR_CPUS goes up to 8,192 (arch/x86/Kconfig).
_MOST_CPUS: Final = 8192
_RANGE: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4})(?::(\d{1,4}))?)?", re.ASCII)


def runnable(python: str, *, option: str = "--python", environment: Mapping[str, str] | None = None) -> str:
    """Return the absolute path of an interpreter that answers and is new enough; a bare name is looked up on PATH.

    Raises:
        OptionError: it is absent, cannot be executed, is no Python, does not answer, or is too old.
    """

    def refuse(problem: str, remedy: str = f"Give the path of a Python >= {_OLDEST_TEXT}, such as .venv/bin/python.") -> OptionError:
        return OptionError(option=option, problem=problem, remedy=remedy)

    shown = printable(python)
    found = python if "/" in python else shutil.which(python) or (python if python and os.path.lexists(python) else None)
    if found is None:
        raise refuse(f"there is no {shown or 'blank name'} on PATH")
    path = Path(os.path.abspath(found))  # not resolve(): a virtual environment is its link
    if path.is_dir():
        inside = printable(str(path / "bin/python"))
        raise refuse(f"{shown} is a directory", f"Did you mean {inside}?" if (path / "bin/python").exists() else f"Give {inside}.")
    if not os.access(path, os.F_OK):
        raise refuse(f"there is no {shown}")
    if not os.access(path, os.X_OK):
        raise refuse(f"{shown} is not executable for this user")
    try:
        answer = _asked([str(path), "-S", "-c", _QUESTION], environment)
    except OSError as error:
        raise refuse(f"{shown} cannot be started: {errno_text(error)}") from error
    if answer is None:
        raise refuse(f"{shown} did not say its version within {_DEADLINE_S:.0f} s")
    version = _ANSWER.fullmatch(answer)
    if version is None:
        raise refuse(f"{shown} is not a Python that works: it did not say its version")
    if (int(version[1]), int(version[2])) < OLDEST:
        raise refuse(f"{shown} is Python {int(version[1])}.{int(version[2])}; the probe needs {_OLDEST_TEXT} or later")
    return str(path)


def cpus_of(text: str, *, option: str = "--cpu") -> tuple[int, ...]:
    """Return the processors that a list such as `0,2-3` or `0-6:2` names, as taskset(1) reads it.

    Raises:
        OptionError: it is no such list, or names none that a kernel can have.
    """
    chosen: set[int] = set()
    for word in text.split(","):
        part = _RANGE.fullmatch(word.strip())
        first, last, step = (int(part[1]), int(part[2] or part[1]), int(part[3] or 1)) if part else (1, 0, 1)
        if last < first or not step or last >= _MOST_CPUS:
            problem = f"{text!r} is not a list of processors"
            raise OptionError(option=option, problem=problem, remedy="Give numbers and ranges, such as 0,2-3.")
        chosen.update(range(first, last + 1, step))
    return tuple(sorted(chosen))


@contextlib.contextmanager
def bound(cpus: Iterable[int] | None, *, option: str = "--cpu") -> Iterator[None]:
    """Bind the calling thread while the block starts a child, which inherits it: no moment on another processor, no code after fork.

    Raises:
        OptionError: a processor is absent or not allowed here. The kernel takes what is left of a list without a word; we do not.
    """
    if cpus is None:
        yield
        return
    wanted, before = set(cpus), os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # EINVAL: none of them; said below
            os.sched_setaffinity(0, wanted)
        missing = wanted - os.sched_getaffinity(0) if wanted else {-1}
        if missing or os.sched_getaffinity(0) != wanted:
            names = ",".join(map(str, sorted(missing or wanted)))
            here = ",".join(map(str, sorted(before)))
            raise OptionError(option=option, problem=f"this process may not run on {names}", remedy=f"Allowed here: {here}.")
        yield
    finally:
        os.sched_setaffinity(0, before)


def _asked(command: list[str], environment: Mapping[str, str] | None) -> bytes | None:
    """Return what a command prints, at most some kilobytes; None if it does not end in time."""
    deadline = time.monotonic() + _DEADLINE_S
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        bufsize=0,
    ) as child:
        assert child.stdout is not None
        answer = b""
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(child.stdout, selectors.EVENT_READ)
                while len(answer) < _ANSWER_BYTES:
                    left = deadline - time.monotonic()
                    if left <= 0 or not ready.select(left):
                        return None
                    part = child.stdout.read(_ANSWER_BYTES)
                    if not part:
                        break
                    answer += part
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return answer
