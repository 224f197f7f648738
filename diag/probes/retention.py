"""One retention run: a fresh process that measures, and the object that tells of it.

Owns the request, the child's command line and environment, and how its end is read. Promises an object with every key of the schema however
the child ended, its samples as far as they came, and that it ends with its deadline, with a signal to us, and with us. Refuses to judge the
figures, and to judge the arguments: the probe does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from diag.probes.child import Child, Stop, signal_name
from diag.probes.following import Following
from diag.probes.interpreter import runnable
from diag.probes.likeness import Likeness, is_like_variable
from diag.probes.neighbours import Watch
from hwr.errors import EXIT_FAILURE, EXIT_NOT_MEASURED, EXIT_OK, EXIT_TIMEOUT, EXIT_USAGE, errno_text
from hwr.procfs.reading import PROC_ROOT
from hwr.units import printable

SCHEMA_VERSION: Final = 1
# The control of every other case: one view, looked up each time.
CONTROL: Final = "reuse"
# The cases of hwr_retention.py; all others are of safetensors_retention.py.
OURS: Final = ("hwr_lease", "call")
POLL_S: Final = 0.15
MESSAGE_LINES: Final = 6
_ERRORS_BYTES: Final = 64 * 1024
_HERE: Final = Path(__file__).parent
# What of our own environment no probe sees: ours, and what makes an interpreter go on after its script.
_WITHHELD: Final = ("HWR_", "PYTHONINSPECT")

# Under memray a call costs some ten times as much, and counts a call are the same after fewer.
ATTRIBUTED_CALLS: Final = 20_000

_SCHEMA_KEYS: Final = (
    "schema_version", "arguments", "python", "torch", "safetensors", "kernel", "hostname", "pid", "cpu_affinity", "torch_threads",
    "pythonmalloc", "preparation_seconds", "samples",
)  # fmt: skip
_ADDED_KEYS: Final = (
    "executable", "implementation", "page_bytes", "file", "allocator", "size_classes", "cached_integer_references", "attribution",
)  # fmt: skip


class Status(StrEnum):
    """How a run ended."""

    ENDED = "ended"  # whole
    TIMEOUT = "timeout"
    SIGNAL = "signal"
    BROKEN = "broken"  # what was measured is not what was meant
    UNUSABLE = "unusable"  # nothing can be measured here
    USAGE = "usage"


_EXIT_CODES: Final = {Status.TIMEOUT: EXIT_TIMEOUT, Status.USAGE: EXIT_USAGE}
_VERDICTS: Final = {"flat": EXIT_OK, "retained": EXIT_FAILURE}


@dataclass(frozen=True, slots=True)
class Request:
    """What is measured, and in what kind of process.

    `environment` goes over the inherited one. With `like`, the variables that a likeness decides are inherited from nobody else.
    """

    mode: str
    tensor_elements: int = 64
    iterations: int = 1_000_000
    sample_every: int = 100_000
    warmup: int = 1_000
    offset_bytes: int = 0
    header_bytes: int | None = None
    tensors: int | None = None
    call: str | None = None
    python: str = sys.executable
    cpu: frozenset[int] | tuple[int, ...] | None = None
    timeout_seconds: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    attribute: bool = False
    like: Likeness | Mapping[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the probe that say what is measured, under the names of the schema."""
        named = ("mode", "tensor_elements", "iterations", "sample_every", "warmup", "offset_bytes", "header_bytes", "tensors", "call")
        return {name: getattr(self, name) for name in named}


def ignore(_: Mapping[str, Any]) -> None:
    """Take a sample and do nothing."""


def measure(
    request: Request,
    samples: Path,
    progress: Callable[[Mapping[str, Any]], None] = ignore,
    *,
    stop: Stop | None = None,
    probe: Path | None = None,
    proc_root: Path = PROC_ROOT,
) -> dict[str, Any]:
    """Measure in a fresh process and return the run object, without control and analysis; `samples` is made anew and left there.

    `progress` gets every sample as it comes. A signal that `stop` notes (`diag.probes.child.stoppable`) ends the child, and the object
    of what came so far is returned. With `request.attribute` the run is repeated under memray first: memory there compares with nothing,
    so only its stacks are taken; if there are none, that is how the run ended.

    Raises:
        OptionError: the interpreter or a processor of the request cannot be used. A child that fails is told in the object instead.
    """
    stop = stop or Stop()
    attribution = None
    if request.attribute:
        fewer = min(request.iterations, ATTRIBUTED_CALLS)
        attributed = _measure(dataclasses.replace(request, iterations=fewer), samples, ignore, stop, probe, proc_root)
        if not attributed["complete"]:
            return attributed
        attribution = attributed["attribution"]
    told = _measure(dataclasses.replace(request, attribute=False), samples, progress, stop, probe, proc_root)
    return {**told, "attribution": attribution}


def _measure(
    request: Request,
    samples: Path,
    progress: Callable[[Mapping[str, Any]], None],
    stop: Stop,
    probe: Path | None,
    proc_root: Path,
) -> dict[str, Any]:
    run = _Run(request)
    with contextlib.ExitStack() as stack:
        try:
            following = Following(samples)
            scratch = tempfile.TemporaryDirectory(prefix="hwr-diag-", ignore_cleanup_errors=True)
            environment = run.environment(stack.enter_context(scratch))
            python = runnable(request.python, environment=environment)
            run.command = [python, *_arguments(request, probe or probe_of(request.mode), samples)]
            child = stack.enter_context(Child(run.command, environment, request.cpu))
        except OSError as error:
            where = f": {printable(str(error.filename))}" if error.filename else ""
            run.ending(Status.UNUSABLE, [f"the probe could not be started{where}: {errno_text(error)}"])
            return run.told()
        run.follow(child, following, progress, stop, proc_root)
        run.read(child, stop)
    return run.told()


def exit_code_of(run: Mapping[str, Any]) -> int:
    """Return the exit status that a run stands for: 0 flat, 1 retained, 2 usage, 3 not measured or inconclusive, 4 timeout."""
    if run["ending"]["status"] != Status.ENDED:
        return _EXIT_CODES.get(run["ending"]["status"], EXIT_NOT_MEASURED)
    analysis = run.get("analysis") or {}
    return _VERDICTS.get(str(analysis.get("verdict")), EXIT_NOT_MEASURED)


def probe_of(mode: str) -> Path:
    """Return the file that measures a case."""
    return _HERE / ("hwr_retention.py" if mode in OURS else "safetensors_retention.py")


class _Run:
    """A run while it goes on."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.command: list[str] = []
        self._set: dict[str, str | None] = {}
        self._started = datetime.datetime.now(datetime.UTC)
        self._seconds = 0.0
        self._begin: dict[str, Any] = {}
        self._samples: list[dict[str, Any]] = []
        self._end: dict[str, Any] | None = None
        self._whole: dict[str, Any] | None = None
        self._ending: dict[str, Any] = {}
        self._neighbours: dict[str, Any] | None = None
        self._warnings: list[str] = []
        self._timed_out = False

    def environment(self, scratch: str) -> dict[str, str]:
        """Return the child's environment, and note what is set in it, None for what is taken out."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_WITHHELD)}
        own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1", "TMPDIR": scratch}
        self._set = {**self.request.environment, **own}
        if self.request.like is not None:
            self._set.update((name, None) for name in inherited if is_like_variable(name) and name not in self._set)
        return {name: value for name, value in {**inherited, **self._set}.items() if value is not None}

    def follow(
        self, child: Child, following: Following, progress: Callable[[Mapping[str, Any]], None], stop: Stop, proc_root: Path
    ) -> None:
        """Hand on what comes until the child has ended, by itself or by us."""
        watch: Watch | None = None
        deadline = self.request.timeout_seconds
        while True:
            over = child.wait(min(POLL_S, deadline - child.seconds))
            self._take(following, progress)
            if watch is None and self._begin and not over:  # from here on it has its libraries
                watch = Watch(child.pid, proc_root=proc_root)
            if watch is not None:
                watch.look()
            if over:
                break
            self._timed_out = child.seconds >= deadline
            if self._timed_out or stop.signal:
                child.end(stop)
                self._take(following, progress)
                break
        self._seconds = child.seconds
        following.torn()
        self._warnings += following.problems
        if watch is not None:
            self._neighbours = watch.finish()

    def read(self, child: Child, stop: Stop) -> None:
        """Say how it ended, and take its object if it came to its end."""
        lines = [printable(line, 500) for line in child.errors(_ERRORS_BYTES).decode("utf-8", "replace").splitlines() if line.strip()]
        code = child.returncode
        tail = lines[-MESSAGE_LINES:]
        if stop.signal and code != 0:
            self.ending(Status.SIGNAL, [f"hwr-diag was asked to end by {stop.name}, and ended the probe", *tail], code)
        elif self._timed_out and code != 0:
            told = f"no result within {self.request.timeout_seconds:g} s ({self._reached()}): the probe was ended"
            way_out = "raise --timeout, or lower --iterations or --sample-every"
            self.ending(Status.TIMEOUT, [told, way_out, *tail], code)
        elif code is None or code < 0:
            self.ending(Status.SIGNAL, [_killed(code, self._reached()), *tail], code)
        elif code == 0:
            self._take_result(child.output(), tail)
        elif code == EXIT_USAGE and (said := _first(lines, ("usage:", "cannot measure: "))):
            self.ending(Status.USAGE if said.startswith("usage:") else Status.UNUSABLE, tail, code)
        else:
            self.ending(Status.BROKEN, [*([] if code == EXIT_FAILURE else [f"the probe ended with status {code}"]), *tail], code)

    def ending(self, status: Status, lines: list[str], code: int | None = None) -> None:
        """Note how it ended."""
        killed = code is not None and code < 0
        self._ending = {
            "status": status.value,
            "exit_code": None if killed else code,
            "signal": signal_name(-code) if killed and code is not None else None,
            "message": "\n".join(lines),
        }

    def told(self) -> dict[str, Any]:
        """Return the object."""
        whole = self._ending["status"] == Status.ENDED
        facts: dict[str, Any] = dict.fromkeys((*_SCHEMA_KEYS, *_ADDED_KEYS))
        facts.update(schema_version=SCHEMA_VERSION, arguments=self.request.arguments, samples=[])
        facts.update((self._whole or {}) if whole else {**self._begin, "samples": self._samples})
        if self._neighbours is not None and (self._neighbours["started"] or self._neighbours["ended"]):
            self._warnings.append(_changed(self._neighbours))
        like = self.request.like
        return {
            **facts,
            "complete": whole,
            "ending": self._ending,
            "run": {
                "command": [printable(word) for word in self.command],
                "environment": self._set,
                "timeout_seconds": self.request.timeout_seconds,
                "started": self._started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "seconds": round(self._seconds, 3),
                "like": like.to_json() if isinstance(like, Likeness) else like,
            },
            "neighbours": self._neighbours,
            "control": None,
            "analysis": None,
            "warnings": self._warnings,
        }

    def _take(self, following: Following, progress: Callable[[Mapping[str, Any]], None]) -> None:
        for line in following.lines():
            begin, sample, end = line.get("begin"), line.get("sample"), line.get("end")
            if isinstance(begin, dict):
                self._begin = begin
            elif isinstance(sample, dict):
                self._samples.append(sample)
                progress(sample)
            elif isinstance(end, dict):
                self._end = end

    def _take_result(self, output: bytes, tail: list[str]) -> None:
        try:
            value = json.loads(output)
        except ValueError:
            value = None
        if not isinstance(value, dict) or not all(key in value for key in _SCHEMA_KEYS):
            value = self._end
            if value is not None:
                self._warnings.append("the probe's standard output holds more than its object; the one in the samples file was taken")
        if value is None:
            self.ending(Status.BROKEN, ["the probe ended with status 0 and printed no object", *tail], 0)
            return
        self._whole = value
        self.ending(Status.ENDED, tail, 0)

    def _reached(self) -> str:
        done = max((sample.get("iterations") or 0 for sample in self._samples), default=None)
        if done is None:
            return "it had not begun to measure"
        return f"{done:,} of {self.request.iterations:,} calls were sampled"


def _arguments(request: Request, probe: Path, samples: Path) -> list[str]:
    words = [str(probe)]
    for name, value in request.arguments.items():
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")  # one word: a value may begin with a dash
    words.append(f"--samples={os.path.abspath(samples)}")
    return [*words, "--attribute"] if request.attribute else words


def _killed(code: int | None, reached: str) -> str:
    if code is None:
        return f"the kernel does not let go of the probe, which SIGKILL should have ended ({reached})"
    by = " (the kernel's out-of-memory killer, or somebody)" if signal_name(-code) == "SIGKILL" else ""
    return f"the probe was ended by {signal_name(-code)}, which hwr-diag did not send{by}; {reached}"


def _first(lines: list[str], begins: tuple[str, ...]) -> str | None:
    return next((line for line in lines if line.startswith(begins)), None)


def _changed(neighbours: Mapping[str, Any]) -> str:
    def named(word: str) -> str:
        found = neighbours[word]
        shown = ", ".join(f"{entry['name']} ({entry['pid']})" for entry in found[:4])
        return f"{shown}{' and more' if len(found) > 4 else ''} {word}" if found else ""

    said = " and ".join(filter(None, (named("started"), named("ended"))))
    return f"other processes with the same libraries came or went: {said}; private memory changes with them, anonymous memory does not"
