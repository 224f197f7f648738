"""The state of the repository that a measurement was made in.

Owns `revision.txt`, `working-tree.txt` and `working-tree.patch`. Promises git's own bytes, files that are whole or absent, and a note
instead of a failure where there is no repository, no git, no commit, or no trust. Refuses to change anything there: no lock is
taken, no hook, pager or external diff is run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from diag.probes.files import replacing
from hwr.errors import errno_text
from hwr.units import one_line

REVISION: Final = "revision.txt"
WORKING_TREE: Final = "working-tree.txt"
PATCH: Final = "working-tree.patch"
DEADLINE_S: Final = 60.0
# core.fsmonitor may be a program of the repository's. `git diff` writes the index anew unless it is told not to, and so does
# `git describe --dirty`, whatever GIT_OPTIONAL_LOCKS says (git 2.39). The rest keeps a patch applicable whatever is configured.
_GIT: Final = ("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true", "-c", "diff.autoRefreshIndex=false")
_DIFF: Final = (
    "diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip
_UNTRUSTED: Final = "dubious ownership"


class _NoAnswer(Exception):
    """Git did not answer; the text says why."""


def snapshot(directory: Path, where: Path | None = None, *, deadline_s: float = DEADLINE_S) -> tuple[str, ...]:
    """Write the state of the repository around `where` (the current directory) into `directory`; return notes, none if all is there."""
    git = _Git(Path.cwd() if where is None else where, time.monotonic() + deadline_s)
    notes: list[str] = []
    try:
        git.run("rev-parse", "--show-toplevel")
        head = _optional(git, "rev-parse", "--verify", "--quiet", "HEAD")
        if not head:
            notes.append("the repository has no commit yet; the patch begins from nothing")
        branch = _optional(git, "symbolic-ref", "--short", "--quiet", "HEAD") or b"(detached)"
        # Before anything is written: the directory may lie in this repository.
        status = git.run("status", "--porcelain=v1", "--untracked-files=all")
        dirty = b"-dirty" if any(not line.startswith(b"??") for line in status.splitlines()) else b""
        described = (_optional(git, "describe", "--always", "--tags") or b"(nothing)") + dirty
        revision = b"%s\nbranch %s\ndescribe %s\n" % (head or b"(no commit)", branch, described)
        notes += _replaced(directory / REVISION, revision)
        _write(directory / REVISION, lambda file: file.write(revision))
        _write(directory / WORKING_TREE, lambda file: file.write(status))
        base = "HEAD" if head else git.run("hash-object", "-t", "tree", os.devnull).decode("ascii").strip()
        _write(directory / PATCH, lambda file: git.run(*_DIFF, base, "--", into=file))
    except _NoAnswer as error:
        notes.append(str(error))
    except OSError as error:
        notes.append(f"the repository's state could not be written: {errno_text(error)}")
    return tuple(notes)


def _replaced(path: Path, revision: bytes) -> list[str]:
    with contextlib.suppress(OSError):
        before = path.read_bytes()
        if before.partition(b"\n")[0] != revision.partition(b"\n")[0]:
            old = one_line(before.partition(b"\n")[0].decode("utf-8", "replace"), 60)
            return [f"{path.name} was of another revision ({old}) and is replaced: earlier runs of this directory belong to that one"]
    return []


def _optional(git: _Git, *arguments: str) -> bytes:
    """Return an answer without its line's end; empty where git has none."""
    return git.run(*arguments, may_fail=True).removesuffix(b"\n")


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    with replacing(path) as file:
        fill(file)


class _Git:
    def __init__(self, where: Path, deadline: float, environ: Mapping[str, str] | None = None) -> None:
        self._where = where
        self._deadline = deadline
        # GIT_DIR and its kin mean what they mean to git. The language decides how "dubious ownership" is spelt.
        quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "LC_ALL": "C"}
        self._environ = {**(os.environ if environ is None else environ), **quiet}

    def run(self, *arguments: str, may_fail: bool = False, into: BinaryIO | None = None) -> bytes:
        """Return what git prints, or have it print into a file.

        Raises:
            _NoAnswer: there is no git, it failed, or it took too long.
        """
        left = self._deadline - time.monotonic()
        late = _NoAnswer(f"the repository's state is incomplete: git {arguments[0]} took too long")
        if left <= 0:
            raise late
        try:
            done = subprocess.run(
                [*_GIT, *arguments],
                cwd=self._where,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if into is None else into,
                stderr=subprocess.PIPE,
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise late from None
        except FileNotFoundError:
            raise _NoAnswer("no state of a repository: git is not installed") from None
        except OSError as error:
            raise _NoAnswer(f"no state of a repository: git cannot be started: {errno_text(error)}") from None
        if done.returncode and not may_fail:
            raise _NoAnswer(_why(arguments[0], done.stderr))
        answer: bytes = done.stdout or b""
        return b"" if done.returncode else answer


def _why(command: str, said: bytes) -> str:
    text = one_line(said.decode("utf-8", "replace"))
    if "not a git repository" in text:
        return "not inside a repository: no state of one is kept"
    if _UNTRUSTED in text:
        way_out = "git config --global --add safe.directory DIR"
        return f"the repository belongs to another user and git does not trust it ({way_out}): no state is kept"
    if "must be run in a work tree" in text:
        return "the repository here has no working tree: no state is kept"
    return f"the repository's state is incomplete: git {command} said: {text or 'nothing'}"
