"""A libcudart that a test can tell what to do, and whose calls it can read back; libcudart_standin.c says what it knows.

Each stand-in is a copy of the library in a directory of its own, with its own control file and books, so that several can be in one
process. A conftest takes the fixtures with `from cuda_standin import foundry, standin`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

_SOURCE = Path(__file__).with_name("libcudart_standin.c")
_COMPILE = ("cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-shared", "-fPIC", "-pthread")

REGISTER = "cudaHostRegister"
UNREGISTER = "cudaHostUnregister"
LAST_ERROR = "cudaGetLastError"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one process; what is None was not reached, as in a call that never returned."""

    name: str
    number: int
    pid: int
    tid: int
    address: int
    bytes: int
    flags: int
    aligned: bool
    mapped: bool
    perms: str
    entered_ns: int
    left_ns: int | None = None
    result: int | None = None
    registered: int | None = None
    lost: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """A process that ended by itself: how many registrations it left, and how many of them were unmapped."""

    pid: int
    registered: int
    lost: int


@dataclass(slots=True)
class Standin:
    """One copy of the library: `path` is what a driver is given."""

    path: Path
    log: Path
    _words: dict[str, str] = field(default_factory=dict)
    _actions: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """Where the control file lies."""
        return self.path.parent

    def configure(self, *actions: str, **words: object) -> None:
        """Set words of the control file and replace its actions: configure("register 2 fail 2", readonly_supported=0).

        A live process sees it at its next call.
        """
        self._words.update({word: str(value) for word, value in words.items()})
        self._actions = [f"on {action}" for action in actions]
        lines = [f"log {self.log}", *(f"{word} {value}" for word, value in self._words.items()), *self._actions]
        written = self.directory / "control.new"
        written.write_text("".join(f"{line}\n" for line in lines))
        written.replace(self.directory / "control")

    def release(self) -> None:
        """Let all calls go that are held back."""
        (self.directory / "release").touch()

    def calls(self, *names: str, pid: int | None = None) -> list[Call]:
        """Return the calls so far in the order in which they were entered, of these names or all."""
        calls: list[Call] = []
        inside: dict[tuple[int, int], int] = {}  # a thread is in one call at a time
        for line in self._lines():
            key = line["pid"], line["tid"]
            if line.pop("phase") == "enter":
                inside[key] = len(calls)
                calls.append(Call(name=line.pop("call"), entered_ns=line.pop("ns"), **line))
            elif "result" in line:
                at = inside.pop(key)
                left = {name: line[name] for name in ("result", "registered", "lost")}
                calls[at] = replace(calls[at], left_ns=line["ns"], **left)
        return [call for call in calls if (not names or call.name in names) and pid in (None, call.pid)]

    def inside(self, *names: str, pid: int | None = None) -> list[Call]:
        """Return the calls that were entered and not left."""
        return [call for call in self.calls(*names, pid=pid) if call.left_ns is None]

    def most_inside(self, *names: str) -> int:
        """Return how many calls were in progress at once, over all processes: 1 is one after the other."""
        moments = []
        for call in self.calls(*names):
            moments.append((call.entered_ns, 1))
            if call.left_ns is not None:
                moments.append((call.left_ns, -1))
        most = now = 0
        for _, step in sorted(moments):
            now += step
            most = max(most, now)
        return most

    def lost(self) -> int:
        """Return the most registrations that ever were without their mapping; anything but 0 is a registered range that was unmapped."""
        return max((line["lost"] for line in self._lines() if "lost" in line), default=0)

    def ends(self) -> dict[int, End]:
        """Return what processes that ended by themselves left, by pid."""
        return {line["pid"]: End(line["pid"], line["registered"], line["lost"]) for line in self._lines() if line["phase"] == "end"}

    def forget(self) -> None:
        """Begin the log anew."""
        self.log.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            text = self.log.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines()]


class Foundry:
    """Compiles each variant of the library once."""

    def __init__(self, directory: Path) -> None:
        """Compile into this directory."""
        self._directory = directory
        self._made: dict[tuple[str, ...], Path] = {}

    def library(self, soname: str = "libcudart.so.12", defines: Iterable[str] = ()) -> Path:
        """Return the compiled library; do not load it from there."""
        key = (soname, *defines)
        if key not in self._made:
            target = self._directory / f"{len(self._made)}.so"
            options = [f"-D{define}" for define in defines]
            subprocess.run([*_COMPILE, *options, os.fspath(_SOURCE), f"-Wl,-soname,{soname}", "-o", os.fspath(target)], check=True)
            self._made[key] = target
        return self._made[key]

    def standin(
        self,
        directory: Path,
        name: str = "libcudart.so.12",
        *,
        soname: str | None = None,
        defines: Iterable[str] = (),
        log: Path | None = None,
    ) -> Standin:
        """Put a stand-in into a directory; with a `log`, several share one: one rank is stuck, and all tell of it in one place."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / name
        shutil.copy(self.library(soname or name, defines), path)
        made = Standin(path, log or directory / "calls")
        made.configure()
        return made

    def dependent(self, name: str, runtime: Path) -> Path:
        """Compile what torch's CUDA libraries are to the search: a library that depends on a runtime, and calls it."""
        source, target = self._directory / f"{name}.c", runtime.parent / name
        source.write_text("int cudaGetLastError(void);\nint ask_runtime(void) { return cudaGetLastError(); }\n")
        link = [f"-L{runtime.parent}", f"-l:{runtime.name}", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
        subprocess.run([*_COMPILE, os.fspath(source), *link, "-o", os.fspath(target)], check=True)
        return target


@pytest.fixture(scope="session")
def foundry(tmp_path_factory: pytest.TempPathFactory) -> Foundry:
    """Variants of the library, compiled once a session."""
    return Foundry(tmp_path_factory.mktemp("foundry"))


@pytest.fixture
def standin(foundry: Foundry, tmp_path: Path) -> Standin:
    """A stand-in for this test alone, whose device can register read-only mappings and whose calls all succeed."""
    return foundry.standin(tmp_path / "libcudart")
