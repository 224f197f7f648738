"""All or nothing: what refuses before the first call, what rolls back, what ends the start (R5, R6, R13, R14)."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from cuda_standin import LAST_ERROR, REGISTER, UNREGISTER, Foundry, Standin
from prometheus_client import CollectorRegistry
from registration_aids import MIB, go, held_chunks, mapped, payload_file

from hwr import telemetry
from hwr.errors import (
    HostRegistrationBudgetError,
    HostRegistrationCleanupError,
    HostRegistrationDeadline,
    HostRegistrationError,
    HostRegistrationUnsupported,
    WritableRegion,
)
from hwr.outcomes import BudgetSource, DrainResult, FailureCode, Outcome, RegistrationOutcome, RollbackResult, Transport, TransportReason
from hwr.registration.budget import Facts
from hwr.registration.drivers.cuda import CudaDriver
from hwr.registration.registered import Registered
from hwr.registration.registrar import Staged
from hwr.telemetry import events as E


@pytest.fixture
def driver(standin: Standin) -> CudaDriver:
    """A driver over the stand-in."""
    return CudaDriver(standin.path)


def staged(outcome: Registered | Staged) -> Staged:
    assert isinstance(outcome, Staged)
    assert not held_chunks()
    return outcome


def test_every_chunk_is_registered_in_order_and_told_before_and_after(standin: Standin, driver: CudaDriver, tmp_path: Path) -> None:
    """R13: range i/n and chunk k/m stand in begin and end records, with the bytes of each."""
    first = payload_file(tmp_path / "a.safetensors", 2 * MIB + 100)
    second = payload_file(tmp_path / "b.safetensors", MIB)
    with telemetry.record() as told:
        outcome = go(driver, first, second)
    assert isinstance(outcome, Registered)
    begun, ended = told.of(E.ChunkRegistering), told.of(E.ChunkRegistered)
    wanted = [(1, 2, 1, 3, MIB), (1, 2, 2, 3, MIB), (1, 2, 3, 3, 4096), (2, 2, 1, 1, MIB)]
    assert [(one.range, one.ranges, one.chunk, one.chunks, one.bytes) for one in begun] == wanted
    assert [(one.range, one.ranges, one.chunk, one.chunks, one.bytes) for one in ended] == wanted
    assert [one.done_bytes for one in begun] == [0, MIB, 2 * MIB, 2 * MIB + 4096]
    assert [call.bytes for call in standin.calls(REGISTER)] == [one.bytes for one in begun]
    assert outcome.nbytes == 3 * MIB + 4096
    assert outcome.close() == ()
    assert [call.address for call in standin.calls(UNREGISTER)] == [call.address for call in reversed(standin.calls(REGISTER))]
    assert not held_chunks()
    assert standin.lost() == 0


def test_the_log_has_a_line_before_each_call_and_one_after_each_success(
    standin: Standin, driver: CudaDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R6: if the second of two fails there are two begin lines and one end line; no limit reads "none"."""
    caplog.set_level(logging.INFO, "hwr")
    standin.configure("register 2 fail 2")
    with telemetry.record():
        go(driver, payload_file(tmp_path / "a", 2 * MIB), device="cuda:0")
    lines = [record.getMessage() for record in caplog.records if record.name == "hwr.registration"]
    assert lines[0] == "mapping registration begins: device cuda:0, 1 ranges, 2097152 bytes (2.00 MiB) in 2 chunks, budget none"
    calls = [line for line in lines if line.startswith("range ")]
    assert calls[0] == "range 1/1, chunk 1/2, 1048576 bytes: registering"
    assert re.fullmatch(r"range 1/1, chunk 1/2, 1048576 bytes: registered in \d+\.\d{3} s", calls[1])
    assert calls[2:] == ["range 1/1, chunk 2/2, 1048576 bytes: registering"]
    with telemetry.record():
        go(driver, tmp_path / "a", limit_bytes=3 << 29)
    assert any(record.getMessage().endswith("budget 1610612736 bytes") for record in caplog.records)


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_failed_call_is_undone_in_reverse_and_staged(standin: Standin, driver: CudaDriver, payload: Path, failing: int) -> None:
    """R14, first, middle and last chunk: the driver's own text, a clean state, and no pending error for whoever calls next."""
    standin.configure(f"register {failing} fail 2")
    with telemetry.record() as told:
        outcome = staged(go(driver, payload))
    assert outcome.reason is TransportReason.DRIVER_ERROR
    assert isinstance(outcome.failure, HostRegistrationError)
    assert outcome.failure.retryable
    for fact in (f"range 1/1, chunk {failing}/4", "1048576 bytes", payload.name, "cuda", "cudaErrorMemoryAllocation (2): out of memory"):
        assert fact in outcome.failure.cause
    assert outcome.detail == outcome.failure.cause
    calls = standin.calls(REGISTER, UNREGISTER)
    assert len([call for call in calls if call.name == REGISTER]) == failing
    undone = [call.address for call in calls if call.name == UNREGISTER]
    assert undone == [call.address for call in calls if call.name == REGISTER][: failing - 1][::-1]
    (rolled,) = told.of(E.RollbackEnded)
    assert (rolled.result, rolled.chunks, rolled.survivors, rolled.drain) == (RollbackResult.CLEAN, failing - 1, 0, DrainResult.DRAINED)
    assert told.of(E.ChunkRegistered)[-1].outcome is Outcome.FAILED
    assert (standin.lost(), standin.calls()[-1].registered) == (0, 0)
    assert driver.runtime.last_error() == 0  # type: ignore[union-attr]
    assert told.of(E.MappingRegistered)[0].result is RegistrationOutcome.STAGED


def test_an_error_drain_that_is_missing_or_finds_another_error_does_not_stop_the_fallback(foundry: Foundry, tmp_path: Path) -> None:
    """A clean rollback is never fatal; that the pending error may still be there is said."""
    payload = payload_file(tmp_path / "payload", 2 * MIB)
    missing = foundry.standin(tmp_path / "missing", defines=["NO_LAST_ERROR"])
    missing.configure("register 2 fail 2")
    assert "was not cleared (unavailable" in staged(go(CudaDriver(missing.path), payload)).detail
    other = foundry.standin(tmp_path / "other")
    other.configure("register 2 fail 2", "last_error 1 fail 719")
    with telemetry.record() as told:
        assert "was not cleared (other" in staged(go(CudaDriver(other.path), payload)).detail
    assert told.of(E.RollbackEnded)[0].drain is DrainResult.OTHER
    assert other.calls(LAST_ERROR)


@pytest.mark.parametrize(("refused", "survivors"), [(["1"], 1), (["*"], 3)])
def test_a_rollback_that_is_not_clean_ends_the_start_and_keeps_the_memory(
    standin: Standin, driver: CudaDriver, payload: Path, refused: list[str], survivors: int
) -> None:
    """Partial and impossible: typed, not retryable, with what is left; the mapping stays although nobody here holds it any more."""
    standin.configure("register 4 fail 2", *(f"unregister {number} fail 1" for number in refused))
    with telemetry.record() as told, pytest.raises(HostRegistrationCleanupError) as caught:
        go(driver, payload)
    assert not caught.value.retryable
    assert f"{survivors} of 4 chunks" in caught.value.cause
    assert "invalid argument" in caught.value.cause
    assert "out of memory" in caught.value.way_out
    (rolled,) = told.of(E.RollbackEnded)
    assert (rolled.result, rolled.survivors, rolled.survivor_bytes) == (RollbackResult.PARTIAL, survivors, survivors * MIB)
    (ended,) = told.of(E.MappingRegistered)
    assert (ended.result, ended.error_code) == (RegistrationOutcome.FAILED, FailureCode.REGISTRATION_CLEANUP_FAILED)
    left = caught.value.active_registration
    assert isinstance(left, Registered)
    assert len(left.chunks) == survivors
    del caught
    assert len(held_chunks()) == survivors
    standin.configure("register 1 fail 2")
    assert standin.lost() == 0
    assert left.close() == ()  # the driver has changed its mind: the memory may go
    assert not held_chunks()


def test_a_budget_refuses_before_any_call(standin: Standin, driver: CudaDriver, payload: Path) -> None:
    """R14: the winning source is named in the event, and in the failure with what would raise it."""
    with telemetry.record() as told:
        outcome = staged(go(driver, payload, limit_bytes=4 * MIB - 1))
    assert isinstance(outcome.failure, HostRegistrationBudgetError)
    assert outcome.reason is TransportReason.BUDGET
    (record,) = told.of(E.BudgetRecorded)
    assert (record.fits, record.source, record.budget_bytes) == (False, BudgetSource.CONFIGURED, 4 * MIB - 1)
    assert (record.configured_bytes, record.meminfo_bytes, record.memlock_bytes) == (4 * MIB - 1, 1 << 40, None)
    scarce = Facts(memlock_bytes=None, cgroup_headroom_bytes=MIB, available_bytes=1 << 40, reserve_bytes=0)
    assert staged(go(driver, payload, facts=lambda: scarce)).failure.reason == BudgetSource.CGROUP  # type: ignore[union-attr]
    assert not standin.calls(REGISTER, UNREGISTER)
    assert isinstance(go(driver, payload, limit_bytes=4 * MIB), Registered)


def test_a_device_that_cannot_register_read_only_mappings_is_not_asked_to(standin: Standin, driver: CudaDriver, payload: Path) -> None:
    standin.configure(readonly_supported=0)
    outcome = staged(go(driver, payload))
    assert outcome.reason is TransportReason.CAPABILITY
    assert isinstance(outcome.failure, HostRegistrationUnsupported)
    assert "nothing was registered" in outcome.failure.way_out
    assert not standin.calls(REGISTER)
    outcome = staged(go(CudaDriver(payload), payload))  # no library at all
    assert outcome.reason is TransportReason.PLATFORM


def test_a_writable_region_is_refused_before_any_call(standin: Standin, driver: CudaDriver, payload: Path) -> None:
    with pytest.raises(WritableRegion):
        go(driver, payload, mapping=mapped(payload, writable=True))
    assert not standin.calls()
    assert not held_chunks()


def test_nothing_to_register_is_staged(standin: Standin, driver: CudaDriver) -> None:
    assert staged(go(driver)).reason is TransportReason.NO_REGIONS
    assert not standin.calls()


def test_the_deadline_is_honoured_between_calls(standin: Standin, driver: CudaDriver, payload: Path) -> None:
    """What is registered by then is undone; the call in progress was not cut short."""
    clock = iter([0.0, 0.0, 1.0, 2.0, 31.0])
    with telemetry.record() as told:
        outcome = staged(go(driver, payload, deadline_seconds=30.0, clock=lambda: next(clock)))
    assert outcome.reason is TransportReason.DEADLINE
    assert isinstance(outcome.failure, HostRegistrationDeadline)
    assert "2 of 4 chunks (2097152 of 4194304 bytes)" in outcome.failure.cause
    assert len(standin.calls(REGISTER)) == len(standin.calls(UNREGISTER)) == 2
    assert told.of(E.MappingRegistered)[0].outcome is Outcome.TIMEOUT


def test_the_deadline_is_looked_at_after_the_last_call(standin: Standin, driver: CudaDriver, payload: Path) -> None:
    """A last call that returned late is undone like any other: the group may not have waited for it."""
    clock = iter([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 31.0])
    outcome = staged(go(driver, payload, deadline_seconds=30.0, clock=lambda: next(clock)))
    assert outcome.reason is TransportReason.DEADLINE
    assert "4 of 4 chunks (4194304 of 4194304 bytes)" in outcome.detail
    assert len(standin.calls(REGISTER)) == len(standin.calls(UNREGISTER)) == 4
    assert standin.lost() == 0


def test_limits_that_others_have_met_are_told_before_the_first_call(standin: Standin, driver: CudaDriver, tmp_path: Path) -> None:
    """A warning for each; what fits into the default chunks meets none."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(512 * MIB)
    with telemetry.record() as told:
        outcome = go(driver, path, chunk_bytes=512 * MIB)
    assert isinstance(outcome, Registered)
    outcome.close()
    (limit,) = told.of(E.LimitRecorded)
    assert "from 512 MB the driver may compact memory" in limit.problem
    names = [event.NAME for event in told.events]
    assert names.index("hwr.registration.limit.record") < names.index("hwr.registration.chunk.begin")
    with telemetry.record() as told:
        go(driver, path, chunk_bytes=256 * MIB)
    assert not told.of(E.LimitRecorded)


class Interrupting(CudaDriver):
    """A driver in whose second call somebody presses Ctrl-C: the call has registered, and the exception arrives behind it."""

    raising: BaseException = KeyboardInterrupt()
    seen = 0

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        self.seen += 1
        if self.seen == 2:
            raise self.raising


@pytest.mark.parametrize("raising", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_an_interrupt_rolls_back_the_call_that_it_came_with_too(standin: Standin, payload: Path, raising: BaseException) -> None:
    driver = Interrupting(standin.path)
    driver.raising = raising
    with telemetry.record() as told, pytest.raises(type(raising)):
        go(driver, payload)
    assert len(standin.calls(REGISTER)) == len(standin.calls(UNREGISTER)) == 2
    assert standin.calls()[-1].registered == 0
    assert not held_chunks()
    assert told.of(E.RollbackBegun)[0].cause is None
    assert told.of(E.MappingRegistered)[0].outcome is Outcome.CANCELLED


class InterruptedUndoing(CudaDriver):
    """A driver in whose first `unregister` somebody presses Ctrl-C, before it did anything."""

    interrupted = False

    def unregister(self, address: int, nbytes: int) -> None:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        super().unregister(address, nbytes)


def test_an_interrupt_of_a_rollback_does_not_leave_what_it_was_undoing(standin: Standin, payload: Path) -> None:
    """The exception goes on; on its way out the rollback is done again."""
    standin.configure("register 3 fail 2")
    with pytest.raises(KeyboardInterrupt):
        go(InterruptedUndoing(standin.path), payload)
    assert not held_chunks()
    assert len(standin.calls(UNREGISTER)) == 2
    assert standin.lost() == 0


def test_a_driver_that_raises_what_it_should_not_is_undone_and_staged(standin: Standin, payload: Path) -> None:
    driver = Interrupting(standin.path)
    driver.raising = RuntimeError("what a binding\nmay raise")
    outcome = staged(go(driver, payload))
    assert "RuntimeError: what a binding may raise" in outcome.detail
    assert len(standin.calls(UNREGISTER)) == 2


def test_metrics_follow_a_registration(driver: CudaDriver, payload: Path, tmp_path: Path) -> None:
    """Gauges are absent until known; the transport is a StateSet with every state from the start."""
    telemetry.configure(run_dir=tmp_path / "run", rank=5)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(telemetry.collector())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"engine": "default", "rank": "5", **labels})

    gauges = ("hwr_registered_bytes", "hwr_registration_planned_bytes", "hwr_registration_chunks", "hwr_registration_chunks_done")
    assert [value(name) for name in gauges] == [None] * 4
    assert value("hwr_transport", hwr_transport="none") == 1
    assert value("hwr_transport", hwr_transport="registered") == 0
    assert value("hwr_transport_reason_info", reason="registered") is None
    outcome = go(driver, payload, limit_bytes=1 << 30)
    assert isinstance(outcome, Registered)
    telemetry.emit(E.TransportChosen(transport=Transport.REGISTERED, reason=TransportReason.REGISTERED))
    assert [value(name) for name in gauges] == [4 * MIB, 4 * MIB, 4, 4]
    assert value("hwr_registration_chunk_seconds_count") == 4
    assert value("hwr_pin_budget_bytes", source="configured") == 1 << 30
    assert value("hwr_pin_budget_bytes", source="memlock") is None
    assert value("hwr_transport", hwr_transport="registered") == 1
    assert value("hwr_transport_reason_info", reason="registered") == 1
    assert value("hwr_registrations_total", outcome="registered") == 1
    outcome.close()
    assert value("hwr_registered_bytes") == 0
    assert value("hwr_registration_rollbacks_total", result="clean") == 0
