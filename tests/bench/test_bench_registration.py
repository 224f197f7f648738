"""Registration budget: chunks against one call, alternated in one run, on the mlock driver. Nothing here fails on time."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from figures import record

from hwr.registration.drivers.mlock import MlockDriver
from hwr.registration.ranges import CHUNK_BYTES, Region
from hwr.registration.registered import Export, Registered
from hwr.registration.registrar import register
from hwr.units import GIB, MIB

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

SIZE_BYTES = 2 * GIB
ROUNDS = 9


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Path]:
    """A file of random bytes in the page cache."""
    path = tmp_path / "payload.bin"
    block = os.urandom(64 * MIB)
    with path.open("wb") as file:
        for _ in range(SIZE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    yield path
    path.unlink()


def seconds(path: Path, chunk_bytes: int) -> float:
    """Map and register; return what registering took, all events and locks included."""
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        export = Export(memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)))
    region = Region(path.name, facts.st_dev, facts.st_ino, export.address, export.nbytes, export.writable)
    begun = time.perf_counter()
    outcome = register(
        [region],
        exports=[export],
        driver=MlockDriver(),
        limit_bytes=None,
        deadline_seconds=60.0,
        files=[path],
        chunk_bytes=chunk_bytes,
    )
    took = time.perf_counter() - begun
    assert isinstance(outcome, Registered), outcome
    assert outcome.nbytes == SIZE_BYTES
    assert outcome.close() == ()
    return took


def test_chunks_against_one_call(payload: Path) -> None:
    """DESIGN 16: 256 MiB chunks cost no more than 1.05 of one call."""
    seconds(payload, SIZE_BYTES)
    ratios, whole = [], []
    for number in range(ROUNDS):
        order = (CHUNK_BYTES, SIZE_BYTES) if number % 2 else (SIZE_BYTES, CHUNK_BYTES)
        took = {chunk_bytes: seconds(payload, chunk_bytes) for chunk_bytes in order}
        ratios.append(took[CHUNK_BYTES] / took[SIZE_BYTES])
        whole.append(took[SIZE_BYTES])
    ratio = statistics.median(ratios)
    record("registration in chunks of 256 MiB over one call, mlock, 2 GiB", ratio, "ratio", 1.05, ratio <= 1.05)
    record("registration in one call, mlock, 2 GiB", statistics.median(whole), "s")
