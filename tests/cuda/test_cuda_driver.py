"""The cuda driver: the capability first, the pinning call, its failures, and the error that a failure leaves behind."""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from cuda_standin import LAST_ERROR, REGISTER, UNREGISTER, Foundry, Standin

from hwr.cuda.libcudart import Libcudart
from hwr.errors import HwrError, Unavailable
from hwr.outcomes import DrainResult
from hwr.procfs.vmstat import read_vmstat
from hwr.registration.drivers import NOT_CALLED, Drain, Driver, DriverFailed
from hwr.registration.drivers.cuda import CudaDriver

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def driver(standin: Standin) -> CudaDriver:
    """A driver over the stand-in."""
    return CudaDriver(standin.path)


def failure(call: Callable[[], None]) -> DriverFailed:
    """Return what a call fails with."""
    with pytest.raises(DriverFailed) as caught:
        call()
    return caught.value


def test_a_mapping_is_pinned_and_unpinned_with_the_read_only_flag(
    standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]
) -> None:
    promised: Driver = driver
    address = mapped(4 * MIB)
    assert promised.supported() is None
    promised.register(address, 4 * MIB)
    promised.unregister(address, 4 * MIB)
    pin, unpin = standin.calls(REGISTER, UNREGISTER)
    assert (pin.address, pin.bytes, pin.flags, pin.perms, pin.result, pin.registered) == (address, 4 * MIB, 0x08, "r--s", 0, 1)
    assert (unpin.address, unpin.result, unpin.registered) == (address, 0, 0)
    assert not driver.memlock_applies
    assert standin.lost() == 0


def test_the_capability_is_asked_before_anything_is_pinned(standin: Standin, driver: CudaDriver) -> None:
    standin.configure(readonly_supported=0)
    answer = driver.supported()
    assert answer is not None
    assert answer.word == "capability"
    assert answer.reason.startswith("readonly_unsupported: ")
    assert not standin.calls(REGISTER)


def test_a_driver_that_cannot_pin_read_only_mappings_answers_like_the_field_s(
    standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]
) -> None:
    """B300, driver 610 (vLLM-Omni #6240): 801 for the flag, 1 without it; a private writable mapping is taken."""
    standin.configure(readonly_supported=0)
    address = mapped(MIB)
    refused = failure(lambda: driver.register(address, MIB))
    assert (refused.number, refused.name) == (801, "cudaErrorNotSupported")
    runtime = runtime_of(driver)
    register = runtime.function(REGISTER)
    assert callable(register)
    assert register(address, MIB, 0) == 1
    with mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        there = int(numpy.frombuffer(private, numpy.uint8).ctypes.data)
        assert register(there, MIB, 0) == 0
        driver.unregister(there, MIB)


@pytest.mark.parametrize(
    ("words", "reason"), [({"devices": 0}, "cudaErrorNoDevice (100)"), ({"corrupt": 35}, "cudaErrorInsufficientDriver (35)")]
)
def test_without_a_device_there_is_a_reason_and_nothing_pending(
    standin: Standin, driver: CudaDriver, words: dict[str, object], reason: str
) -> None:
    standin.configure(**words)
    answer = driver.supported()
    assert answer is not None
    assert answer.word == "platform"
    assert reason in answer.reason
    standin.configure(devices=1, corrupt=0)
    assert runtime_of(driver).last_error() == 0


def test_the_device_that_was_asked_is_the_worker_s_own(standin: Standin, mapped: Callable[[int], int]) -> None:
    """A pin on device 0 by every rank would give every rank a context there."""
    standin.configure(devices=4)
    driver = CudaDriver(standin.path, device=3)
    address = mapped(PAGE)
    assert driver.supported() is None
    driver.register(address, PAGE)
    driver.unregister(address, PAGE)
    assert [call.flags for call in standin.calls("cudaSetDevice")] == [3]
    far = CudaDriver(standin.path, device=9)
    answer = far.supported()
    assert answer is not None
    assert "cudaErrorInvalidDevice (101)" in answer.reason
    refused = failure(lambda: far.register(address, PAGE))
    assert refused.number == 101
    assert far.drain().clean


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        (2, "cudaErrorMemoryAllocation", "out of memory"),
        (304, "cudaErrorOperatingSystem", "OS call failed"),
        (998, "unrecognized", "unrecognized"),
    ],
)
def test_a_failure_has_the_runtime_s_own_words_and_is_consumed_once(
    standin: Standin, driver: CudaDriver, mapped: Callable[[int], int], code: int, name: str, text: str
) -> None:
    standin.configure(f"register 1 fail {code}")
    refused = failure(lambda: driver.register(mapped(PAGE), PAGE))
    assert isinstance(refused, HwrError)
    assert refused.number == code
    assert refused.name.startswith(name)
    assert refused.text.startswith(text)
    assert str(pickle.loads(pickle.dumps(refused))) == str(refused)
    pending = runtime_of(driver).pending_error()
    drained = driver.drain()
    assert (pending, drained.result, drained.code, drained.clean) == (code, DrainResult.DRAINED, code, True)
    assert runtime_of(driver).last_error() == 0
    assert driver.drain() == Drain(DrainResult.NOTHING_PENDING)


def test_an_error_of_another_kind_is_said_not_hidden(standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]) -> None:
    standin.configure("register 1 fail 2", "last_error 1 fail 700")
    failure(lambda: driver.register(mapped(PAGE), PAGE))
    drained = driver.drain()
    assert (drained.result, drained.code, drained.clean) == (DrainResult.OTHER, 700, False)
    assert "cudaErrorIllegalAddress" in drained.detail


def test_a_lost_context_is_not_taken_for_a_consumed_error(standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]) -> None:
    standin.configure(corrupt=719)
    refused = failure(lambda: driver.register(mapped(PAGE), PAGE))
    assert refused.number == 719
    drained = driver.drain()
    assert (drained.result, drained.code) == (DrainResult.OTHER, 719)
    assert "it stays" in drained.detail


def test_an_error_of_somebody_else_stays_theirs(standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]) -> None:
    """Whoever made the failed call is entitled to its error; ours succeeded."""
    address = mapped(PAGE)
    runtime = runtime_of(driver)
    register = runtime.function(REGISTER)
    assert callable(register)
    assert register(None, 0, 0) == 1
    driver.register(address, PAGE)
    driver.unregister(address, PAGE)
    assert driver.drain() == Drain(DrainResult.NOTHING_PENDING)
    assert not standin.calls(LAST_ERROR)
    assert runtime.last_error() == 1


def test_a_missing_drain_is_said_and_stops_nothing(foundry: Foundry, tmp_path: Path, mapped: Callable[[int], int]) -> None:
    without = foundry.standin(tmp_path / "without", defines=["NO_LAST_ERROR"])
    without.configure("register 2 fail 2")
    driver = CudaDriver(without.path)
    assert driver.supported() is None
    first, second = mapped(PAGE), mapped(PAGE)
    driver.register(first, PAGE)
    failure(lambda: driver.register(second, PAGE))
    driver.unregister(first, PAGE)
    drained = driver.drain()
    assert (drained.result, drained.clean) == (DrainResult.UNAVAILABLE, False)
    assert "cudaGetLastError" in drained.detail


def test_a_call_that_raises_is_a_failure_like_another(standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]) -> None:
    refused = failure(lambda: driver.register(1.5, PAGE))  # type: ignore[arg-type]
    assert (refused.number, refused.name) == (NOT_CALLED, "ArgumentError")
    assert driver.drain().clean
    assert not standin.calls(REGISTER)


def test_a_library_without_the_call_is_a_failure_and_named_beforehand(
    foundry: Foundry, tmp_path: Path, mapped: Callable[[int], int]
) -> None:
    driver = CudaDriver(foundry.standin(tmp_path / "without", defines=["NO_REGISTER"]).path)
    answer = driver.supported()
    assert answer is not None
    assert answer.word == "platform"
    assert "cudaHostRegister" in answer.reason
    refused = failure(lambda: driver.register(mapped(PAGE), PAGE))
    assert (refused.number, refused.name) == (NOT_CALLED, "function_missing")


def test_without_a_library_every_call_is_a_typed_failure(tmp_path: Path) -> None:
    driver = CudaDriver(tmp_path / "libcudart.so.12")
    answer = driver.supported()
    assert answer is not None
    assert answer.word == "platform"
    assert failure(lambda: driver.register(0, 0)).name == failure(lambda: driver.unregister(0, 0)).name == "libcudart_unavailable"
    assert driver.drain().clean


def test_the_table_of_refusals(standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]) -> None:
    """What the runtime refuses: nothing at all, what overlaps, what is not mapped, what is too large, what it does not know."""
    address = mapped(4 * MIB)
    standin.configure(max_bytes=f"{2 * MIB} 2")
    driver.register(address + 100, MIB)  # a range need not begin on a page
    cases = [
        (address, 0, 1),
        (0, MIB, 1),
        (address, 2 * MIB, 712),
        (address + MIB, 2 * MIB, 712),
        (address + MIB, 3 * MIB, 2),
        (PAGE, PAGE, 1),
    ]
    assert [failure(lambda at=at, n=n: driver.register(at, n)).number for at, n, _ in cases] == [code for *_, code in cases]
    assert failure(lambda: driver.unregister(address, MIB)).number == 713
    driver.unregister(address + 100, MIB)
    assert [call.aligned for call in standin.calls(REGISTER)][:2] == [False, True]


def test_a_registration_that_could_not_be_undone_stays_in_the_books(
    standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]
) -> None:
    address = mapped(PAGE)
    standin.configure("unregister 1 fail 304")
    driver.register(address, PAGE)
    assert failure(lambda: driver.unregister(address, PAGE)).number == 304
    assert failure(lambda: driver.register(address, PAGE)).number == 712
    driver.unregister(address, PAGE)


@pytest.mark.parametrize("action", ["hold", "pin hold"])
def test_other_threads_run_while_a_call_is_stuck(
    standin: Standin, driver: CudaDriver, mapped: Callable[[int], int], until: Callable[[Callable[[], object]], None], action: str
) -> None:
    """The GIL is free: this thread could not see the call otherwise. And the entry is in the log before the call returns."""
    address = mapped(64 * MIB)
    standin.configure(f"register 1 {action}")
    before = pinned_pages()
    worker = threading.Thread(target=driver.register, args=(address, 64 * MIB), daemon=True)
    worker.start()
    try:
        until(lambda: standin.inside(REGISTER))
        if "pin" in action:
            until(lambda: pinned_pages() - before >= 64 * MIB // PAGE)
        assert worker.is_alive()
        (stuck,) = standin.inside(REGISTER)
        assert (stuck.address, stuck.pid, stuck.tid, stuck.result) == (address, os.getpid(), worker.native_id, None)
    finally:
        standin.release()
        worker.join(20)
    assert not worker.is_alive()
    driver.unregister(address, 64 * MIB)
    if "pin" in action:
        until(lambda: pinned_pages() == before)


def test_a_forked_child_can_neither_pin_nor_unpin(standin: Standin, driver: CudaDriver, mapped: Callable[[int], int]) -> None:
    address = mapped(PAGE)
    driver.register(address, PAGE)
    child = os.fork()
    if child == 0:
        try:
            driver.unregister(address, PAGE)
        except DriverFailed as error:
            os._exit(error.number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    driver.unregister(address, PAGE)


def test_what_was_registered_and_then_unmapped_is_seen(standin: Standin, driver: CudaDriver, tmp_path: Path) -> None:
    """The stand-in watches the one thing that must never happen; this is how it looks."""
    (tmp_path / "file").write_bytes(bytes(PAGE))
    with (tmp_path / "file").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)
    address = int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data)
    driver.register(address, PAGE)
    assert standin.lost() == 0
    mapping.close()
    driver.unregister(address, PAGE)
    assert standin.lost() == 0  # it is in the books no more
    assert driver.supported() is None
    with (tmp_path / "file").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)
    address = int(numpy.frombuffer(mapping, numpy.uint8).ctypes.data)
    driver.register(address, PAGE)
    mapping.close()
    assert driver.supported() is None  # any call looks
    assert standin.lost() == 1


def runtime_of(driver: CudaDriver) -> Libcudart:
    """Return the copy that a driver calls."""
    runtime = driver.runtime
    assert isinstance(runtime, Libcudart)
    return runtime


def pinned_pages() -> int:
    """Return the pages that are pinned on this machine."""
    words = read_vmstat()
    assert not isinstance(words, Unavailable)
    assert words.pinned is not None
    return words.pinned // PAGE
