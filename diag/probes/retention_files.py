"""Reading what retention runs left: a run, the samples of one that was killed, or a directory of runs.

Owns the way from a path to run objects whose shape is known. Promises that every key which the views use has its type, that a file in
progress or killed is read as far as it came, and that whatever is wrong with a file becomes one error of two lines that names it.
Refuses to trust: not a JSON object, a number that JSON does not have, another schema, a file above 64 MiB, anything but a regular file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

from diag.probes.matrix import CALL, Case
from hwr.errors import OptionError, errno_text
from hwr.units import MIB, one_line

SCHEMA_VERSION: Final = 1
MAX_FILE_BYTES: Final = 64 * MIB  # a run of a million calls sampled every thousand, with its attribution, is below 1 MiB
MAX_FILES: Final = 20_000
MAX_SAMPLES: Final = 1_000_000

RUN_NAME: Final = re.compile(r"(?P<mode>[a-z_]{1,40})-(?P<elements>\d{1,18})(?:-o(?P<offset>\d{1,18}))?-(?P<repetition>\d{1,9})\.json\Z")
SAMPLES_SUFFIX: Final = ".samples.jsonl"
PHASES: Final = frozenset({"before_file", "baseline", "loop", "closed"})
VERDICTS: Final = frozenset({"retained", "flat", "inconclusive"})
MEASURES: Final = ("rss_bytes", "private_bytes", "anonymous_bytes")


class NotOfThisKind(ValueError):
    """A document is not what its reader takes; the text says where it differs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run object and the file that it was read from."""

    name: str
    data: Mapping[str, Any]

    @property
    def mode(self) -> str:
        """The case."""
        return str(self.data["arguments"]["mode"])

    @property
    def tensor_elements(self) -> int:
        """Elements of the tensor."""
        return int(self.data["arguments"]["tensor_elements"])

    @property
    def offset_bytes(self) -> int:
        """Where the tensor begins in the data section; a file of the field's own probe has it at 0."""
        return int(self.data["arguments"].get("offset_bytes") or 0)

    @property
    def case(self) -> Case:
        """What was measured; a function of the user's has no tensor, whatever stands in the arguments."""
        return Case(self.mode, self.tensor_elements, self.offset_bytes) if self.mode != CALL else Case(self.mode, 1, 0)

    @property
    def complete(self) -> bool:
        """Whether the probe came to its end."""
        return bool(self.data.get("complete", True))

    @property
    def verdict(self) -> str | None:
        """The verdict of its analysis, None if it was not judged."""
        analysis = self.data.get("analysis")
        return None if analysis is None else str(analysis["verdict"])

    @property
    def samples(self) -> list[Mapping[str, Any]]:
        """The samples, as far as the probe came."""
        return list(self.data["samples"])

    def measure(self, name: str) -> Mapping[str, Any] | None:
        """Return an estimate of the analysis by its name, None where there is none."""
        found = (self.data.get("analysis") or {}).get(name)
        return found if isinstance(found, dict) else None

    def place(self) -> tuple[int, int] | None:
        """Return the absolute begin and end of the tensor in the file, None where the run does not say."""
        found = self.data.get("file") or {}
        begin, end = found.get("begin"), found.get("end")
        return (begin, end) if _is_int(begin) and _is_int(end) else None


@dataclass(frozen=True, slots=True)
class Collected:
    """The runs of a path; `environment` is that of a matrix, else empty; `unread` has a sentence for each file that was left out."""

    path: Path
    runs: tuple[Run, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def collect(path: Path, *, argument: str = "PATH", samples: bool = False) -> Collected:
    """Read a run, the samples of a killed one, or a directory of runs; with `samples` one that holds killed runs only, too.

    Raises:
        OptionError: there is nothing to read, or what is there is not such a file.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise _refused(argument, path, errno_text(error)) from None
    if stat.S_ISDIR(found.st_mode):
        return _directory(path, argument, samples=samples)
    try:
        run = samples_run(path) if path.name.endswith(SAMPLES_SUFFIX) or path.suffix == ".jsonl" else read_run(path)
    except NotOfThisKind as error:
        raise _refused(argument, path, str(error)) from None
    return Collected(path, (run,))


def read_run(path: Path) -> Run:
    """Read one run object.

    Raises:
        NotOfThisKind: it cannot be read, or is not the object of a run.
    """
    return Run(path.name, checked_run(read_object(path)))


def samples_run(path: Path) -> Run:
    """Read the samples that a probe wrote as it went; a torn last line is where it was killed.

    Raises:
        NotOfThisKind: it cannot be read, or does not begin as such a file does.
    """
    begin: dict[str, Any] | None = None
    samples: list[Any] = []
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = _parsed(line)
        except NotOfThisKind:
            if begin is None:
                raise
            break  # torn: nothing after it can be trusted to be whole
        if isinstance(entry.get("end"), dict):
            return Run(path.name, checked_run(entry["end"]))
        if begin is None:
            if not isinstance(entry.get("begin"), dict):
                raise NotOfThisKind(f"line {number} is not the begin of a run")
            begin = entry["begin"]
        elif "sample" in entry:
            samples.append(entry["sample"])
    if begin is None:
        raise NotOfThisKind("it is empty")
    return Run(path.name, checked_run({**begin, "samples": samples, "complete": False}))


def read_object(path: Path) -> dict[str, Any]:
    """Read one JSON object, strictly.

    Raises:
        NotOfThisKind: it cannot be read, is no regular file, is too large, or is not a JSON object.
    """
    return _parsed(_read(path))


def checked_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return the run object if all that the views use has its type.

    Raises:
        NotOfThisKind: another schema, a key that is missing, or a value of another type.
    """
    version = run.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise NotOfThisKind(f"schema_version is {_shown(version)}, and this version reads {SCHEMA_VERSION}")
    arguments = _member(run, "arguments", dict)
    if not re.fullmatch(r"[a-z_]{1,40}", _member(arguments, "mode", str)):
        raise NotOfThisKind(f"arguments.mode is {_shown(arguments['mode'])}")
    for name, required in (("tensor_elements", True), ("iterations", True), ("offset_bytes", False)):
        if required or arguments.get(name) is not None:
            _counted(arguments, name)
    if arguments["tensor_elements"] < 1:
        raise NotOfThisKind(f"arguments.tensor_elements is {arguments['tensor_elements']}")
    samples = _member(run, "samples", list)
    if len(samples) > MAX_SAMPLES:
        raise NotOfThisKind(f"it has {len(samples)} samples")
    for index, sample in enumerate(samples):
        _checked_sample(sample, f"samples[{index}]")
    if run.get("complete") is not None and not isinstance(run["complete"], bool):
        raise NotOfThisKind(f"complete is {_shown(run['complete'])}")
    for name in ("file", "allocator", "ending", "control", "run", "torch_threads"):
        if run.get(name) is not None:
            _member(run, name, dict)
    if run.get("control") is not None:
        checked_run({**run["control"], "control": None})
    if run.get("analysis") is not None:
        _checked_analysis(_member(run, "analysis", dict))
    return run


def _directory(path: Path, argument: str, *, samples: bool) -> Collected:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise _refused(argument, path, errno_text(error)) from None
    wanted = [name for name in names if RUN_NAME.match(name)]
    if len(wanted) > MAX_FILES:
        raise _refused(argument, path, f"it holds {len(wanted)} runs; at most {MAX_FILES} are read")
    runs, unread = _read_all(path, wanted, read_run)
    finished = {name.removesuffix(".json") for name in wanted}
    killed = [name for name in names if name.endswith(SAMPLES_SUFFIX) and name.removesuffix(SAMPLES_SUFFIX) not in finished]
    if samples and not runs:
        runs, unreadable = _read_all(path, killed, samples_run)
        unread += unreadable
    else:
        unread += [one_line(f"{name}: in progress or killed; see `hwr-diag retention plot {path / name}`", 1000) for name in killed]
    if not runs:
        raise _refused(argument, path, f"no run can be read in it ({unread[0]})" if unread else "it holds no runs")
    environment: dict[str, Any] = {}
    if "environment.json" in names:
        try:
            environment = read_object(path / "environment.json")
        except NotOfThisKind as error:
            unread.append(one_line(f"environment.json: {error}"))
    return Collected(path, tuple(runs), environment, tuple(unread))


def _read_all(path: Path, names: list[str], read: Callable[[Path], Run]) -> tuple[list[Run], list[str]]:
    """Return the runs of these files, and a sentence for each that is none."""
    runs, unread = [], []
    for name in names:
        try:
            runs.append(read(path / name))
        except NotOfThisKind as error:
            unread.append(one_line(f"{name}: {error}"))
    return runs, unread


def _checked_sample(sample: Any, where: str) -> None:
    if not isinstance(sample, dict) or sample.get("phase") not in PHASES:
        raise NotOfThisKind(f"{where} is not a sample")
    _counted(sample, "iterations", where)
    for name in MEASURES:
        _counted(sample, name, where)
    if sample.get("allocated_blocks") is not None:
        _counted(sample, "allocated_blocks", where)


def _checked_analysis(analysis: dict[str, Any]) -> None:
    if analysis.get("verdict") not in VERDICTS:
        raise NotOfThisKind(f"analysis.verdict is {_shown(analysis.get('verdict'))}")
    for name in ("blocks_per_call", "malloc_bytes_per_call", "bytes_per_call"):
        estimate = analysis.get(name)
        if estimate is None:
            continue
        if not isinstance(estimate, dict):
            raise NotOfThisKind(f"analysis.{name} is {_shown(estimate)}")
        for part in ("estimate", "low", "high", "resolution"):
            value = estimate.get(part)
            if isinstance(value, bool) or not isinstance(value, int | float | None) or (value is not None and not math.isfinite(value)):
                raise NotOfThisKind(f"analysis.{name}.{part} is {_shown(value)}")


def _member(holder: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in holder:
        raise NotOfThisKind(f"it has no {name}")
    if not isinstance(holder[name], kind):
        raise NotOfThisKind(f"{name} is {_shown(holder[name])}")
    return holder[name]


def _counted(holder: Mapping[str, Any], name: str, where: str = "arguments") -> None:
    value = holder.get(name)
    if not _is_int(value) or not 0 <= value < 1 << 63:
        raise NotOfThisKind(f"{where}.{name} is {_shown(value) if name in holder else 'missing'}")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return one_line(json.dumps(value), 60)


def _read(path: Path) -> bytes:
    with _opened(path) as fd:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise NotOfThisKind("it is not a regular file")
        if facts.st_size > MAX_FILE_BYTES:
            raise NotOfThisKind(f"it has {facts.st_size} bytes; a run has at most {MAX_FILE_BYTES}")
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold us up
    except (OSError, ValueError) as error:
        raise NotOfThisKind(errno_text(error) if isinstance(error, OSError) else "its name cannot be opened") from None
    try:
        yield fd
    except OSError as error:
        raise NotOfThisKind(errno_text(error)) from None
    finally:
        os.close(fd)


def _constant(text: str) -> Any:
    raise NotOfThisKind(f"{text} is not JSON")


_DECODER: Final[Callable[[str], Any]] = json.JSONDecoder(parse_constant=_constant).decode


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        value = _DECODER(raw.decode("utf-8"))
    except NotOfThisKind:
        raise
    except RecursionError:
        raise NotOfThisKind("it is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise NotOfThisKind(f"it is not JSON: {one_line(str(error), 120)}") from None
    if not isinstance(value, dict):
        raise NotOfThisKind("it is not a JSON object")
    return value


def _refused(argument: str, path: Path, problem: str) -> OptionError:
    return OptionError(
        option=f"{argument} {path}",
        problem=problem,
        remedy="Give the JSON of a run, a directory that `hwr-diag retention run -o` or `matrix -o` wrote, or its .samples.jsonl.",
    )
