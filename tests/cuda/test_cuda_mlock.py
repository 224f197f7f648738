"""The mlock driver, on the real kernel."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from hwr.errors import Unavailable
from hwr.outcomes import DrainResult
from hwr.procfs.file_id import FileId
from hwr.procfs.smaps import file_use, read_smaps
from hwr.procfs.status import read_status
from hwr.registration.drivers import NOT_CALLED, Drain, Driver, DriverFailed
from hwr.registration.drivers.mlock import MlockDriver

PAGE = mmap.PAGESIZE
MIB = 1 << 20

# Lock 4 MiB, and after that 32 KiB; the file is made by whoever runs this.
_LOW_LIMIT = """
import mmap, numpy, os, sys, tempfile
from hwr.registration.drivers import DriverFailed
from hwr.registration.drivers.mlock import MlockDriver

def locked():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1])

file = tempfile.TemporaryFile()
file.truncate(4 << 20)
mapping = mmap.mmap(file.fileno(), 4 << 20, access=mmap.ACCESS_READ)
address = int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data)
driver = MlockDriver()
try:
    driver.register(address, 4 << 20)
except DriverFailed as failure:
    print(failure.number, failure.name, failure.text, sep="|")
    print(failure)
print(locked())
driver.register(address, 32 << 10)
print(locked())
driver.unregister(address, 32 << 10)
print(locked())
"""


def locked_of(path: Path) -> tuple[int, int]:
    """Return VmLck of this process and `Locked` of its mappings of a file, in bytes."""
    status = read_status("self")
    vmas = read_smaps("self")
    assert not isinstance(status, Unavailable)
    assert not isinstance(vmas, Unavailable)
    file = FileId.in_tables(path)
    assert not isinstance(file, Unavailable)
    locked = file_use(vmas, file).amounts.locked
    assert status.locked is not None
    assert locked is not None
    return status.locked, locked


def test_a_range_is_locked_and_unlocked_in_whole_pages(tmp_path: Path) -> None:
    driver: Driver = MlockDriver()
    path = tmp_path / "payload"
    path.write_bytes(bytes(8 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 8 * MIB, access=mmap.ACCESS_READ) as mapping:
        address = int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data)
        assert driver.supported() is None
        assert driver.memlock_applies
        before = locked_of(path)
        driver.register(address, 4 * MIB)
        driver.register(address + 4 * MIB, 2 * MIB)
        during = locked_of(path)
        driver.unregister(address + 4 * MIB, 2 * MIB)
        driver.unregister(address, 4 * MIB)
        after = locked_of(path)
    assert during[0] - before[0] == during[1] == 6 * MIB
    assert after == before
    assert driver.drain() == Drain(DrainResult.NOTHING_PENDING)


def test_two_processes_that_lock_one_file_share_its_pages(tmp_path: Path, python: Callable[..., str]) -> None:
    """`Locked` is proportional: over the processes it sums to the file once, while VmLck is the plan in each."""
    path = tmp_path / "payload"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4 * MIB, access=mmap.ACCESS_READ) as mapping:
        MlockDriver().register(int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data), 4 * MIB)
        ours, alone = locked_of(path)
        code = """
import mmap, numpy, sys
from hwr.procfs.file_id import FileId
from hwr.procfs.smaps import file_use, read_smaps
from hwr.procfs.status import read_status
from hwr.registration.drivers.mlock import MlockDriver
with open(sys.argv[1], "rb") as file:
    mapping = mmap.mmap(file.fileno(), 4 << 20, access=mmap.ACCESS_READ)
MlockDriver().register(int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data), 4 << 20)
id = FileId.in_tables(sys.argv[1])
shares = [file_use(read_smaps(pid), id).amounts.locked for pid in ("self", int(sys.argv[2]))]
print(read_status("self").locked, *shares)
"""
        theirs, their_share, our_share = map(int, python(code, path, os.getpid()).split())
    assert theirs == alone == 4 * MIB
    assert ours >= alone
    assert their_share + our_share == 4 * MIB


def test_a_low_limit_refuses_with_the_kernel_s_words_and_leaves_nothing_locked(nobody: list[str], python: Callable[..., str]) -> None:
    """As uid 65534 with 64 KiB to lock; what fits the limit is locked afterwards, so nothing was left counted."""
    said = python(_LOW_LIMIT, prefix=["prlimit", "--memlock=65536:65536", *nobody]).splitlines()
    assert said[0] == "12|ENOMEM|Cannot allocate memory"
    assert said[1] == "mlock failed: ENOMEM (12): Cannot allocate memory"
    assert "RLIMIT_MEMLOCK" in said[2]
    assert said[3:] == ["0", "32", "0"]


def test_a_limit_of_nothing_says_so(nobody: list[str], python: Callable[..., str]) -> None:
    said = python(_LOW_LIMIT.partition("print(locked())")[0], prefix=["prlimit", "--memlock=0:0", *nobody]).splitlines()
    assert said[0] == "1|EPERM|Operation not permitted"


def test_a_lock_that_fails_half_way_is_taken_back(tmp_path: Path) -> None:
    """Beyond the end of a file there are no pages: the kernel marks the range first and fails while it faults it in."""
    path = tmp_path / "payload"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4 * MIB, access=mmap.ACCESS_READ) as mapping:
        address = int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data)
        os.truncate(path, MIB)
        before = locked_of(path)
        with pytest.raises(DriverFailed) as caught:
            MlockDriver().register(address, 4 * MIB)
        assert locked_of(path) == before
    assert caught.value.name == "ENOMEM"


def test_what_is_not_mapped_can_be_neither_locked_nor_unlocked() -> None:
    driver = MlockDriver()
    for call in (driver.register, driver.unregister):
        with pytest.raises(DriverFailed, match=r"m(un)?lock failed: ENOMEM \(12\)"):
            call(PAGE, PAGE)


def test_a_call_that_raises_is_a_failure_like_another() -> None:
    with pytest.raises(DriverFailed) as caught:
        MlockDriver().register(1.5, PAGE)  # type: ignore[arg-type]
    assert (caught.value.number, caught.value.name) == (NOT_CALLED, "ArgumentError")
