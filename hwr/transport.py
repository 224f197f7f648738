"""How the bytes of a loaded model reach the device, and why that way.

Owns the choice: what the policy allows, the driver of the device, the vote of the group, and what is told of it. Promises one event and
one line of the report for each choice; that the driver is never called where the policy forbids it; that `required` means registered or
no start; that ranks of one start end alike, also those that have nothing to register. Refuses to pin what is not mapped from a store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr import telemetry
from hwr.errors import HwrError, RegistrationRequired, errno_text
from hwr.loaded import Loaded
from hwr.notes import Notes
from hwr.options import Options
from hwr.outcomes import LoadStage, RegistrationMode, RuntimeMode, Transport, TransportReason
from hwr.registration.drivers import Driver
from hwr.registration.drivers.cuda import CudaDriver
from hwr.registration.drivers.mlock import MlockDriver
from hwr.registration.registered import Exports, Registered, exports_of
from hwr.registration.registrar import Staged, register
from hwr.registration.vote import Vote, file_vote
from hwr.store.layout import StoreLayout
from hwr.telemetry.events import TransportChosen
from hwr.telemetry.failures import record_failure

CPU: Final = "cpu"
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
    loaded: Loaded, options: Options, *, device: str = CPU, driver: Driver | None = None, vote: Vote | None = None
) -> Choice:
    """Register what a model is mapped from, as the options say; the model owns the registration from then on.

    `device` is `cpu` or `cuda:N`. Without `vote`, ranks of one start (WORLD_SIZE) agree by files in the run directory.

    Raises:
        RegistrationRequired: the policy is `required`, and nothing is registered.
        HostRegistrationCleanupError, GroupVoteOverdue: the start must end; `Loaded.close` leaves what may still be registered mapped.
    """
    policy = options.distributed_layerwise_offload
    with Notes(loaded.report).stage(LoadStage.REGISTER):
        choice = _chosen(loaded, options, device, driver, vote)
    loaded.report.transport, loaded.report.transport_reason = choice.transport, choice.reason
    loaded.report.transport_detail = choice.detail
    if choice.registered is not None:
        loaded.hold(choice.registered)
        loaded.report.registered_bytes = choice.registered.nbytes
    if choice.failure is not None:
        record_failure(choice.failure, fatal=False)
    telemetry.emit(TransportChosen(transport=choice.transport, reason=choice.reason, detail=choice.detail))
    if policy.host_registration_mode is RegistrationMode.REQUIRED and choice.registered is None:
        problem = choice.detail or choice.reason.value
        raise RegistrationRequired(reason=choice.reason, transport=choice.transport.value, word=choice.reason.value, problem=problem)
    return choice


def _chosen(loaded: Loaded, options: Options, device: str, driver: Driver | None, vote: Vote | None) -> Choice:
    policy, lease = options.distributed_layerwise_offload, loaded.lease
    unregistered = Transport.NONE if lease is None else Transport.STAGING
    if policy.host_registration_mode is RegistrationMode.DISABLED:
        return Choice(unregistered, TransportReason.MODE_DISABLED, "registration is switched off by its mode")
    if not policy.pin_cpu_memory:
        return Choice(unregistered, TransportReason.PIN_OFF, "pinning of host memory is switched off")
    if options.host_weight_runtime.mode is RuntimeMode.DISABLED:
        return Choice(unregistered, TransportReason.NO_LEASE, _OWN)
    seconds = policy.registration_deadline_seconds
    run_dir = options.telemetry.run_dir
    agreed = vote or group_vote(seconds, None if run_dir is None else str(run_dir))
    if isinstance(agreed, Choice):
        return agreed
    if lease is None and agreed is None:
        return Choice(unregistered, TransportReason.NO_LEASE, _OWN)
    exports = Exports((), ()) if lease is None else exports_of(lease)
    root = options.host_weight_runtime.root
    files: list[Path] = []
    if lease is not None and root is not None:
        directory = StoreLayout(root).artifact(lease.key)
        files = [directory / region.name for region in exports.regions]
    found = register(
        exports.regions,
        driver=driver or driver_of(device),
        limit_bytes=policy.registration_limit_bytes,
        deadline_seconds=seconds,
        files=files,
        exports=exports.held,
        vote=agreed,
        device=device,
    )
    if isinstance(found, Registered):
        return Choice(Transport.REGISTERED, TransportReason.REGISTERED, None, found)
    return _staged(found, unregistered)


def _staged(found: Staged, transport: Transport) -> Choice:
    if transport is Transport.NONE and found.reason is TransportReason.NO_REGIONS:
        return Choice(transport, TransportReason.NO_LEASE, _OWN)
    return Choice(transport, found.reason, found.detail, failure=found.failure)


def driver_of(device: str) -> Driver:
    """Return what pins memory for a device: the CUDA runtime's registration, or mlock for a worker on the CPU."""
    kind, _, ordinal = device.partition(":")
    return CudaDriver(device=int(ordinal) if ordinal else None) if kind == "cuda" else MlockDriver()


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
