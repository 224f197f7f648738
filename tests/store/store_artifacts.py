"""Small artifacts, stores and processes for the tests of this room: real files, real locks, real children."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hwr
from hwr import telemetry
from hwr.checkpoint.identity import Adaptation, ArtifactIdentity, Component, Layout, Producer, Representation, Source
from hwr.outcomes import PublicationOutcome, TensorKind, ValidationLevel
from hwr.store.domain import Domain, Limits, open_domain
from hwr.store.lookup import LookupResult, lookup
from hwr.store.publish import Publication, publish

REPOSITORY = Path(hwr.__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
META = ValidationLevel.MANIFEST_AND_METADATA
FULL = ValidationLevel.FULL_CHECKSUM
DEADLINE_SECONDS = 30.0
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@dataclass(frozen=True)
class Given:
    """A tensor of these bytes (hwr.store.writer.TensorSource), streamed in blocks."""

    name: str
    data: bytes
    dtype: str = "U8"
    shape: tuple[int, ...] | None = None
    kind: TensorKind = TensorKind.PARAMETER
    block_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.shape is None:
            object.__setattr__(self, "shape", (len(self.data),))

    def blocks(self) -> Iterator[memoryview]:
        for at in range(0, len(self.data), self.block_bytes):
            yield memoryview(self.data)[at : at + self.block_bytes]


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros that takes no memory."""

    name: str
    nbytes: int
    dtype: str = "U8"
    kind: TensorKind = TensorKind.PARAMETER
    block_bytes: int = 1 << 20

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.nbytes,)

    def blocks(self) -> Iterator[memoryview]:
        block = memoryview(bytes(self.block_bytes))
        for at in range(0, self.nbytes, len(block)):
            yield block[: min(len(block), self.nbytes - at)]


SMALL = (Given("weight", bytes(range(256)) * 40), Given("bias", b"\1\2\3\4" * 3, "F32", (3,)))


def identity(name: str = "a") -> ArtifactIdentity:
    """An identity that differs by its source's fingerprint."""
    return ArtifactIdentity(
        source=Source("model", name),
        component=Component("component"),
        representation=Representation("safetensors", "float32"),
        layout=Layout("as_loaded"),
        adaptation=Adaptation(),
        producer=Producer("producer", "1", "fingerprint", 1, 1),
    )


def key_of(name: str = "a") -> str:
    return identity(name).key


def store(root: str | os.PathLike[str], timeout: float = DEADLINE_SECONDS, **limits: int | None) -> Domain:
    """Open a store; no free space is reserved unless asked for."""
    return open_domain(root, limits=Limits(**{"min_free_bytes": 0, **limits}), coordination_timeout_seconds=timeout)


def put(domain: Domain, name: str = "a", tensors: Sequence[Any] = SMALL, **options: Any) -> Publication:
    """Publish, and insist on it."""
    done = publish(domain, identity(name), tensors, **options)
    assert done.outcome is PublicationOutcome.PUBLISHED, done
    return done


def find(domain: Domain, name: str = "a", level: ValidationLevel = META, timeout: float | None = None) -> LookupResult:
    deadline = None if timeout is None else time.monotonic() + timeout
    return lookup(domain, key_of(name), identity(name).to_json(), level, deadline)


def hits(domain: Domain, name: str = "a", level: ValidationLevel = META) -> bool:
    """Whether it is served; the lease is closed again."""
    found = find(domain, name, level)
    if found.lease is None:
        return False
    found.lease.close()
    return True


def artifact(domain: Domain, name: str = "a") -> Path:
    return domain.layout.artifact(key_of(name))


def payload(domain: Domain, name: str = "a") -> Path:
    (path,) = artifact(domain, name).glob("*.safetensors")
    return path


def flip(path: Path, offset: int) -> None:
    """Flip a byte as root may, through the read-only mode; offset -1 is the last byte."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def left_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait for a condition, and return what it came true with."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        told = condition()
        if told:
            return told
        assert time.monotonic() < deadline, f"{what} did not come true"
        os.sched_yield()


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(REPOSITORY), str(HERE)))
    return {"PYTHONPATH": path, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def run(code: str, *arguments: object, prefix: Sequence[str] = (), status: int = 0) -> str:
    """Run Python that may use this module; return what it prints."""
    script = f"import sys\nfrom store_artifacts import *\n{code}"
    command = [*prefix, sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd="/", timeout=120, check=False)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@contextlib.contextmanager
def running(code: str, *arguments: object, ready: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Run Python that may use this module beside the test; it prints `ready`, then waits for its standard input to end."""
    script = f"import sys\nfrom store_artifacts import *\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        try:
            if ready:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def when(kind: type[Any], act: Callable[[Any], Any], where: Callable[[Any], bool] = lambda event: True) -> Iterator[None]:
    """Do something at the moment an event of this kind is emitted, once; the emitting thread waits for it."""
    done: list[bool] = []

    def listen(event: Any, _: Any) -> None:
        if isinstance(event, kind) and not done and where(event):
            done.append(True)
            act(event)

    with telemetry.process.recording_hub() as hub:
        stop = hub.listen(listen)
        try:
            yield
        finally:
            stop()
    assert done, f"no {kind.__name__} was emitted"
