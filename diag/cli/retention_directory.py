"""The directory of a matrix: one at a time, resumable.

Owns its lock, its plan, and which runs in it count. Promises that a name in it is either absent or whole (written aside, then renamed),
that a second matrix is refused while one works there, and that runs of another plan or another environment are never mixed in.
Refuses a directory that holds something else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from diag.probes.files import make_directory
from diag.probes.matrix import Plan, Step, differences
from diag.probes.retention_files import SAMPLES_SUFFIX, NotOfThisKind, checked_run, read_object
from diag.report.document import write_bytes, write_document
from hwr.errors import OptionError, errno_text

PLAN: Final = "plan.json"
ENVIRONMENT: Final = "environment.json"
SUMMARY: Final = "summary.json"
SUMMARY_TEXT: Final = "summary.txt"
MAX_SAID: Final = 4


class MatrixDirectory:
    """A directory that this process alone measures into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: Path) -> Iterator[MatrixDirectory]:
        """Make the directory if need be, and hold its lock over the block. The kernel drops the lock however this process ends.

        Raises:
            OptionError: it cannot be made or locked, or another process measures into it.
        """
        made(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise refused(path, errno_text(error)) from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise refused(path, f"it cannot be locked: {errno_text(error)}", "Say a directory of a local filesystem.") from None
                raise refused(
                    path, "another matrix is being measured into it", "Wait for its end, or say another directory: -o DIR."
                ) from None
            yield cls(path)
        finally:
            os.close(fd)

    def written_plan(self) -> dict[str, Any] | None:
        """Return the plan that was written here, None if there is none yet.

        Raises:
            OptionError: the directory holds something else, or its plan cannot be read.
        """
        try:
            return read_object(self.path / PLAN)
        except NotOfThisKind as error:
            if not (self.path / PLAN).exists():
                others = [name for name in os.listdir(self.path) if not name.startswith(".")]
                if others:
                    problem = f"it has no {PLAN} and is not empty ({sorted(others)[0]})"
                    raise refused(self.path, problem, "Say a new or empty directory: -o DIR.") from None
                return None
            raise refused(self.path, f"{PLAN}: {error}") from None

    def adopt(self, plan: Plan, environment: Mapping[str, Any]) -> bool:
        """Write the plan, or make sure that it is the one that was written; return whether this goes on with an earlier start.

        Raises:
            OptionError: other arguments or another environment were measured here.
        """
        written = self.written_plan()
        if written is None:
            self.write(PLAN, plan.to_json())
            self.write(ENVIRONMENT, environment)
            return False
        said = differences(written, plan)
        if said:
            more = f" (and {len(said) - MAX_SAID} more)" if len(said) > MAX_SAID else ""
            raise refused(
                self.path,
                f"it holds a matrix that was begun differently: {'; '.join(said[:MAX_SAID])}{more}",
                "Say another directory: -o DIR, or repeat the arguments and the environment that it was begun with.",
            )
        if not (self.path / ENVIRONMENT).is_file():  # killed between the two
            self.write(ENVIRONMENT, environment)
        return True

    def kept(self, step: Step, plan: Plan) -> dict[str, Any] | None:
        """Return a run that was measured whole by an earlier start, None if it is to be measured."""
        try:
            run = checked_run(read_object(self.path / f"{step.stem}.json"))
        except NotOfThisKind:
            return None
        asked = {"mode": step.case.mode, "tensor_elements": step.case.tensor_elements, "iterations": plan.iterations}
        asked |= {"sample_every": plan.sample_every, "warmup": plan.warmup, "offset_bytes": step.case.offset_bytes}
        same = all(run["arguments"].get(name) == value for name, value in asked.items())
        whole = run.get("complete") is True and run.get("analysis") is not None
        return run if same and whole else None

    def samples(self, step: Step) -> Path:
        """Return where a run's samples go while it is in progress; those of an interrupted one are replaced."""
        path = self.path / f"{step.stem}{SAMPLES_SUFFIX}"
        path.unlink(missing_ok=True)
        return path

    def finish(self, step: Step, run: Mapping[str, Any]) -> None:
        """Write the run under its name; its samples are in it."""
        self.write(f"{step.stem}.json", run)
        (self.path / f"{step.stem}{SAMPLES_SUFFIX}").unlink(missing_ok=True)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON object under a name, whole or not at all."""
        write_document(self.path / name, value)

    def write_text(self, name: str, text: str) -> None:
        """Write a text under a name, whole or not at all."""
        write_bytes(self.path / name, text.encode())


def made(path: Path) -> None:
    """Make the directory of `-o` if need be.

    Raises:
        OptionError: it cannot be made, or is something else.
    """
    try:
        make_directory(path)
    except OSError as error:
        raise refused(path, errno_text(error)) from None


def refused(path: Path, problem: str, remedy: str = "Say another directory: -o DIR.") -> OptionError:
    """Return the refusal of the directory of `-o`."""
    return OptionError(option=f"-o {path}", problem=problem, remedy=remedy)
