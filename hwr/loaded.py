"""What a load gives back, and what may be given to it.

Owns the loaded model with its lease and its registration, and the description of an adaptation. Promises that closing takes the weights
from the module, then unregisters, then closes the lease, and refuses while somebody else holds a tensor. Refuses to unmap under one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hwr.errors import ActiveLease, HostRegistrationCleanupError
from hwr.loader.restore import unbind
from hwr.outcomes import MemoryMoment
from hwr.registration.registered import Registered
from hwr.report import Report
from hwr.store.lease import HostWeightLease, HostWeightLeaseCarrier
from hwr.telemetry import memory


@dataclass(frozen=True, slots=True)
class AdaptedWeights:
    """An adaptation that is merged after a canonical load, never on a warm restore; its fingerprint is part of the identity."""

    kind: str
    fingerprint: str
    merge: Callable[[torch.nn.Module], None]


class Loaded:
    """A model that is ready, and what it stands on. Close it, or use it as a context manager.

    `carrier` holds the lease of a warm start until somebody takes it, None after a canonical load. `dlo` is None until there is an
    offload backend.
    """

    def __init__(self, module: torch.nn.Module, report: Report, lease: HostWeightLease | None, bound: tuple[str, ...]) -> None:
        self.module: torch.nn.Module | None = module
        self.report = report
        self.carrier = HostWeightLeaseCarrier(lease) if lease is not None else None
        self.dlo: None = None
        self.registration: Registered | None = None
        self._bound = bound

    @property
    def lease(self) -> HostWeightLease | None:
        """The lease of a warm start while nobody has taken it."""
        return None if self.carrier is None else self.carrier.lease

    def hold(self, registration: Registered) -> None:
        """Own a registration of what is mapped: it is undone before the lease is closed."""
        self.registration = registration

    def close(self) -> None:
        """Let go of the weights: the module loses its tensors, then what is registered is unregistered, then the lease is closed.

        Raises:
            HostRegistrationCleanupError: the platform does not let go; the memory stays mapped until the process ends.
            ActiveLease: somebody else still holds a tensor of it; drop it and close again.
        """
        module, self.module = self.module, None
        if module is not None and self._bound:
            unbind(module, self._bound)
        del module
        self._unregister()
        if self.carrier is not None:
            self.carrier.close()
        memory.sample(MemoryMoment.CLOSED)

    def _unregister(self) -> None:
        registration = self.registration
        if registration is None:
            return
        chunks = len(registration.plan.chunks)
        if problems := registration.close():
            error = HostRegistrationCleanupError(
                reason="survivors",
                count=len(registration.chunks),
                chunks=chunks,
                nbytes=registration.nbytes,
                problem=problems[0],
                first="the model was closed",
            )
            error.active_registration = registration
            raise error
        self.registration = None

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except (ActiveLease, HostRegistrationCleanupError):
            # While an exception travels, its traceback holds tensors: the lease goes with the last of them.
            if kind is None:
                raise
