"""How the bytes of a loaded model reach the device, and why that way.

Owns the choice: what the policy allows, the driver of the device, the vote of the group, and what is told of it. Promises one event and
one line of the report for each choice; that the driver is never called where the policy forbids it; that `required` means registered or
no start; that ranks of one start end alike, also those that have nothing to register. Refuses to pin what is not mapped from a store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hwr import telemetry
from hwr.errors import GroupVoteOverdue, HwrError, LeaseClosed, OptionError, RegistrationRequired, errno_text
from hwr.loaded import Loaded
from hwr.notes import Notes
from hwr.options import Options
from hwr.outcomes import LoadStage, MemoryMoment, Phase, RegistrationMode, RegistrationOutcome, Transport, TransportReason
from hwr.registration.drivers import Driver
from hwr.registration.drivers.cuda import CudaDriver
from hwr.registration.drivers.mlock import MlockDriver
from hwr.registration.registered import Registered, exports_of
from hwr.registration.registrar import register
from hwr.registration.vote import Vote, file_vote
from hwr.store.layout import StoreLayout
from hwr.telemetry import memory
from hwr.telemetry.events import PhaseChanged, TransportChosen
from hwr.telemetry.failures import record_failure
from hwr.telemetry.process import run_id_is_shared
from hwr.units import short_key

CPU: Final = "cpu"
_DEVICE: Final = re.compile(r"cpu|cuda(?::(\d{1,4}))?", re.ASCII)
# Ranks register in the same order, once a start: the name needs no key, which a rank that could not look anything up has not.
_VOTE: Final = "weights"
_OWN: Final = "the weights are this process's own, not mapped from a store"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen; `registered` exactly with the transport of that name."""

    transport: Transport
    reason: TransportReason
    detail: str | None = None
    registered: Registered | None = None
    failure: HwrError | None = None

    def __post_init__(self) -> None:
        if (self.registered is not None) != (self.transport is Transport.REGISTERED) or (self.registered is not None) != (
            self.reason is TransportReason.REGISTERED
        ):
            raise ValueError(f"{self.transport} because of {self.reason} {'with' if self.registered else 'without'} a registration")


def register_loaded(
    loaded: Loaded,
    options: Options,
    *,
    device: str = CPU,
    mode: RegistrationMode | str | None = None,
    driver: Driver | None = None,
    vote: Vote | None = None,
) -> Choice:
    """Register what a model is mapped from, as the options say; the model owns the registration, so keep the `Loaded`.

    `device` is `cpu` or `cuda:N`; `mode` overrides that of the options. Without `vote`, ranks of one start (WORLD_SIZE) agree by files
    in the run directory. A second call returns what the first one registered.

    Raises:
        OptionError: no such device or mode.
        RegistrationRequired: the mode is `required`, and nothing is registered.
        HostRegistrationCleanupError, GroupVoteOverdue: the start must end; `Loaded.close` leaves what may still be registered mapped.
        LeaseClosed: somebody took the lease of this model.
    """
    if loaded.registration is not None and not loaded.registration.closed:
        return Choice(Transport.REGISTERED, TransportReason.REGISTERED, None, loaded.registration)
    if loaded.carrier is not None and loaded.carrier.taken:
        raise LeaseClosed(reason="taken", key=short_key(loaded.report.key or ""))
    policy = options.distributed_layerwise_offload
    chosen_mode = policy.host_registration_mode if mode is None else _mode(mode)
    driver = driver or driver_of(device)
    report = loaded.report
    try:
        with Notes(report).stage(LoadStage.REGISTER):
            choice = _chosen(loaded, options, chosen_mode, device, driver, vote)
    except HwrError as failure:
        reason = TransportReason.GROUP if isinstance(failure, GroupVoteOverdue) else TransportReason.DRIVER_ERROR
        report.transport, report.transport_reason, report.transport_detail = Transport.NONE, reason, failure.cause
        telemetry.emit(PhaseChanged(phase=Phase.FAILED))
        raise
    report.transport, report.transport_reason, report.transport_detail = choice.transport, choice.reason, choice.detail
    if choice.registered is not None:
        loaded.hold(choice.registered)
        report.registered_bytes = choice.registered.nbytes
        memory.sample(MemoryMoment.AFTER_REGISTRATION, [] if loaded.lease is None else [loaded.lease.mapped()])
    if choice.failure is not None:
        record_failure(choice.failure, fatal=False)
    telemetry.emit(TransportChosen(transport=choice.transport, reason=choice.reason, detail=choice.detail))
    if chosen_mode is RegistrationMode.REQUIRED and choice.registered is None:
        problem = choice.detail or choice.reason.value
        telemetry.emit(PhaseChanged(phase=Phase.FAILED))
        raise RegistrationRequired(reason=choice.reason, transport=choice.transport.value, word=choice.reason.value, problem=problem)
    return choice


def _chosen(loaded: Loaded, options: Options, mode: RegistrationMode, device: str, driver: Driver, vote: Vote | None) -> Choice:
    policy, lease, root = options.distributed_layerwise_offload, loaded.lease, options.host_weight_runtime.root
    unregistered = Transport.NONE if lease is None else Transport.STAGING
    run_dir = options.telemetry.run_dir
    seconds = policy.registration_deadline_seconds
    agreed = vote or group_vote(seconds, None if run_dir is None else str(run_dir))
    refused = _refused(mode, pin=policy.pin_cpu_memory, mapped=lease is not None and root is not None)
    if lease is None or root is None or refused is not None:
        reason, why = refused or (TransportReason.NO_LEASE, _OWN)
        if agreed is not None and not isinstance(agreed, Choice):  # nothing is to be registered here, so nowhere in the group
            agreed.join()
            agreed.decide(RegistrationOutcome.STAGED, reason)
        return Choice(unregistered, reason, why)
    if isinstance(agreed, Choice):
        return agreed
    directory = StoreLayout(root).artifact(lease.key)
    files = [directory / file.name for file in lease.manifest.files if file.size]
    exports = exports_of(lease)
    found = register(
        exports.regions,
        driver=driver,
        limit_bytes=policy.registration_limit_bytes,
        deadline_seconds=seconds,
        files=files,
        exports=exports.held,
        vote=agreed,
        device=device,
    )
    if isinstance(found, Registered):
        return Choice(Transport.REGISTERED, TransportReason.REGISTERED, None, found)
    return Choice(unregistered, found.reason, found.detail, failure=found.failure)


def _refused(mode: RegistrationMode, *, pin: bool, mapped: bool) -> tuple[TransportReason, str] | None:
    """Say why the driver must not be called, whatever it could do."""
    if mode is RegistrationMode.DISABLED:
        return TransportReason.MODE_DISABLED, "registration is switched off by its mode"
    if not pin:
        return TransportReason.PIN_OFF, "pinning of host memory is switched off"
    return None if mapped else (TransportReason.NO_LEASE, _OWN)


def _mode(mode: RegistrationMode | str) -> RegistrationMode:
    try:
        return RegistrationMode(mode)
    except ValueError:
        raise OptionError(option="mode", problem=f"{mode!r} is none", remedy=f"Allowed: {', '.join(RegistrationMode)}.") from None


def driver_of(device: str) -> Driver:
    """Return what pins memory for a device: the CUDA runtime's registration, or mlock for a worker on the CPU.

    Raises:
        OptionError: no such device.
    """
    found = _DEVICE.fullmatch(str(device))  # torch.device too: its text is the same
    if found is None:
        raise OptionError(option="device", problem=f"{device!r} is none", remedy="Allowed: cpu, cuda, cuda:N.")
    if found[0] == CPU:
        return MlockDriver()
    return CudaDriver(device=None if found[1] is None else int(found[1]))


def group_vote(deadline_seconds: float, run_dir: str | None = None, environ: Mapping[str, str] | None = None) -> Vote | Choice | None:
    """Return how the ranks of this start agree: None for a rank alone, a choice where files cannot bring them together."""
    environ = os.environ if environ is None else environ
    size, here, rank = (_number(environ, names) for names in (("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",), ("HWR_RANK", "RANK")))
    if size is None or size < 2:
        return None
    if here is not None and here != size:
        return _apart(size, f"{here} of them are on this machine, and files reach no other; give a vote")
    if rank is None or rank >= size:
        return _apart(size, "this one has no number below theirs (HWR_RANK, RANK)")
    if not run_id_is_shared():
        return _apart(size, "they do not write into one run; give them the same HWR_RUN_ID")
    try:
        return file_vote(_VOTE, rank=rank, world_size=size, deadline_seconds=deadline_seconds, run_dir=run_dir)
    except OSError as error:
        return _apart(size, f"no directory for their votes: {errno_text(error)}")


def _apart(size: int, why: str) -> Choice:
    return Choice(Transport.STAGING, TransportReason.GROUP, f"{size} ranks cannot agree on registration: {why}")


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdecimal():
            return int(text)
    return None
