"""Store budgets: ratios of two things measured alternately in one run. Nothing here fails on time; the table says what was met."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from figures import record
from safetensors import safe_open

from hwr.checkpoint.identity import Adaptation, ArtifactIdentity, Component, Layout, Producer, Representation, Source
from hwr.errors import ArtifactInvalid
from hwr.outcomes import PublicationOutcome, TensorKind, ValidationLevel
from hwr.store.domain import Domain, Limits, open_domain
from hwr.store.lookup import judge, lookup
from hwr.store.publish import publish
from hwr.units import GIB, MIB

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

SIZES_GIB = tuple(float(size) for size in os.environ.get("HWR_BENCH_GIB", "0.25,1,4").split(","))
TENSOR_BYTES = 6 * MIB
ROUNDS = 5


@dataclass(frozen=True)
class Slice:
    """One tensor of a mapped file, streamed as a view."""

    name: str
    view: memoryview
    kind: TensorKind = TensorKind.PARAMETER
    dtype: str = "F32"
    shape: tuple[int, ...] = (TENSOR_BYTES // 4 // 1024, 1024)

    def blocks(self) -> Iterator[memoryview]:
        yield self.view


def identity(number: int) -> ArtifactIdentity:
    return ArtifactIdentity(
        Source("bench", str(number)), Component("bench"), Representation("safetensors", "F32"), Layout("bench"), Adaptation(),
        Producer("bench", "1", "1", 1, 1),
    )  # fmt: skip


@pytest.fixture(scope="module", params=SIZES_GIB, ids=lambda size: f"{size:g}GiB")
def payload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[float, Path]]:
    """A file of random bytes in the page cache, as large as the parameter says."""
    directory = tmp_path_factory.mktemp("payload")
    path = directory / "payload.bin"
    count = max(1, int(request.param * GIB) // TENSOR_BYTES)
    block = os.urandom(TENSOR_BYTES)
    with path.open("wb") as file:
        for number in range(count):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.flush()
        os.fsync(file.fileno())
    yield request.param, path
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def published(payload: tuple[float, Path]) -> Iterator[tuple[float, Path, Domain, str]]:
    """The payload, published; also times publication against cp and fsync."""
    size, path = payload
    domain = open_domain(path.parent / "store", limits=Limits(min_free_bytes=0), coordination_timeout_seconds=60)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
        sources = [Slice(f"t{at:05d}", view[at * TENSOR_BYTES : (at + 1) * TENSOR_BYTES]) for at in range(len(view) // TENSOR_BYTES)]
        ratios = []
        for number in range(3):
            copied = seconds(lambda: copy_and_sync(path))
            took = seconds(partial(publish_or_fail, domain, number, sources))
            ratios.append(took / copied)
            if number < 2:
                remove(domain, identity(number).key)
        release(sources)
    record(f"publication over cp + fsync, {size:g} GiB", statistics.median(ratios), "ratio", 0.75, statistics.median(ratios) <= 0.75)
    yield size, path, domain, identity(2).key
    remove(domain, identity(2).key)


def test_full_checksum_against_one_sequential_read(published: tuple[float, Path, Domain, str]) -> None:
    """DESIGN 16: at 4 GiB no more than 1.25 of one sequential read; at least four times as fast as SHA-256 in one thread."""
    size, _, domain, key = published
    directory = domain.layout.artifact(key)
    files = sorted(directory.glob("*.safetensors"))
    judge(directory, key, None, ValidationLevel.FULL_CHECKSUM).close()
    reused, loaded, whole = [], [], []
    for _ in range(ROUNDS):
        read = seconds(lambda: read_all(files))
        fresh = seconds(lambda: load_all(files))
        took = seconds(lambda: judge(directory, key, None, ValidationLevel.FULL_CHECKSUM).close())
        reused.append(took / read)
        loaded.append(took / fresh)
        whole.append(took)
    ratio = statistics.median(reused)
    record(f"full_checksum over a read into one reused 1 MiB buffer, {size:g} GiB", ratio, "ratio", 1.25, ratio <= 1.25)
    ratio = statistics.median(loaded)
    record(f"full_checksum over a read that keeps the bytes, {size:g} GiB", ratio, "ratio", 1.25, ratio <= 1.25)
    if size <= 1:
        ratio = seconds(lambda: [sha256(path) for path in files]) / statistics.median(whole)
        record(f"SHA-256 in one thread over full_checksum, {size:g} GiB (at least)", ratio, "ratio", 4.0, ratio >= 4)


def test_warm_acquire_does_not_grow_with_the_payload(published: tuple[float, Path, Domain, str]) -> None:
    """DESIGN 16: no more than 1.5 of safe_open + get_tensor of the same tensors, manifest checked."""
    import torch

    from hwr.loader.restore import tensor_of

    size, _, domain, key = published
    files = sorted(domain.layout.artifact(key).glob("*.safetensors"))

    def ours() -> None:
        found = lookup(domain, key, None, ValidationLevel.MANIFEST_AND_METADATA)
        assert found.lease is not None
        tensors = [tensor_of(found.lease, entry) for entry in found.lease.tensors()]
        assert tensors
        del tensors
        found.lease.close()

    def stock() -> None:
        held: list[torch.Tensor] = []
        for path in files:
            with safe_open(path, framework="pt") as file:
                held += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        assert held

    ours(), stock()
    ratios = [seconds(ours) / seconds(stock) for _ in range(9)]
    ratio = statistics.median(ratios)
    record(f"warm acquire over safe_open + get_tensor of all, {size:g} GiB", ratio, "ratio", 1.5, ratio <= 1.5)


def test_a_truncation_is_survived(published: tuple[float, Path, Domain, str]) -> None:
    """The child that hashes may die of SIGBUS; the caller gets a typed failure."""
    size, _, domain, key = published
    directory = domain.layout.artifact(key)
    path = sorted(directory.glob("*.safetensors"))[0]
    whole = path.stat().st_size
    script = "import os, sys; os.truncate(sys.argv[1], int(sys.argv[2]))"
    os.chmod(path, 0o600)
    child = subprocess.Popen([sys.executable, "-S", "-c", script, str(path), str(whole // 2)])
    os.chmod(path, 0o444)
    try:
        with pytest.raises(ArtifactInvalid):
            judge_until_it_fails(directory, key)
    finally:
        child.wait()
    record(f"truncation during full_checksum survived, {size:g} GiB", 1, "yes", 1, True)


def test_publication_needs_little_extra_memory() -> None:
    """DESIGN 16: at most 64 MiB more anonymous memory while publishing, casts included."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("publish_memory.py"))], capture_output=True, text=True, check=True)
    extra = int(done.stdout)
    record("extra anonymous memory of a publication with a cast, 1 GiB", extra / MIB, "MiB", 64, extra <= 64 * MIB)


def release(sources: list[Slice]) -> None:
    """Let go of the mapping."""
    for source in sources:
        source.view.release()


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def judge_until_it_fails(directory: Path, key: str) -> None:
    """Hash again and again; the truncation falls into one of the passes."""
    for _ in range(1000):
        judge(directory, key, None, ValidationLevel.FULL_CHECKSUM).close()


def publish_or_fail(domain: Domain, number: int, sources: list[Slice]) -> None:
    result = publish(domain, identity(number), sources)
    assert result.outcome is PublicationOutcome.PUBLISHED, result.failure


def copy_and_sync(path: Path) -> None:
    """What a careful script does: cp, fsync of the file and of its directory."""
    target = path.with_suffix(".copy")
    subprocess.run(["cp", str(path), str(target)], check=True)
    for name, flags in ((target, os.O_RDONLY), (target.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(name, flags)
        os.fsync(fd)
        os.close(fd)
    target.unlink()


def remove(domain: Domain, key: str) -> None:
    path = domain.layout.artifact(key)
    os.chmod(path, 0o700)
    shutil.rmtree(path)


def read_all(files: list[Path]) -> None:
    buffer = bytearray(MIB)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def load_all(files: list[Path]) -> None:
    """Read every byte once into memory that keeps it: what any loader that copies has to do."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            held = mmap.mmap(-1, path.stat().st_size)
            with memoryview(held) as view:
                at = 0
                while at < len(view) and (count := os.preadv(file.fileno(), [view[at : at + 64 * MIB]], at)):
                    at += count
            held.close()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
