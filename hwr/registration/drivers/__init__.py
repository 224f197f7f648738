"""What pins a range of memory: the promise that every driver makes to the registrar.

Owns the protocol, the failure of one call and the answer of a drain. `cuda` pins for DMA, `mlock` keeps pages of a CPU worker
in memory; the registrar knows neither. Promises that whatever a call can do wrong, a wrong argument or a missing library
included, is `DriverFailed` with the driver's own number, name and text, and that the GIL is free inside a call.
Refuses a policy: order, budget, rollback and what a failure leads to are the registrar's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from hwr.errors import HwrError, Unavailable
from hwr.outcomes import DrainResult, FailureCode, ResolutionStage

__all__ = ["NOT_CALLED", "Drain", "DrainResult", "Driver", "DriverFailed", "Unsupported"]

# `DriverFailed.number` of a call that raised instead of returning: neither a cudaError nor an errno is negative.
NOT_CALLED: Final = -1


@dataclass(frozen=True, slots=True)
class Unsupported(Unavailable):
    """Why a driver must not be called at all; `word` is the transport reason that it leads to.

    `platform`: there is no library, device or driver to ask. `capability`: there is one, and it says no.
    False in a condition, as every `Unavailable`: compare with None.
    """

    word: Literal["capability", "platform"] = "capability"


@dataclass(frozen=True, slots=True)
class Drain:
    """The answer of a drain; `code` is the number that was consumed, `detail` says more for people."""

    result: DrainResult
    code: int | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        """Refuse an error without its number, and a number without an error."""
        if (self.code is None) != (self.result in (DrainResult.NOTHING_PENDING, DrainResult.UNAVAILABLE)):
            raise ValueError(f"a drain that is {self.result} cannot have code {self.code}")

    @property
    def clean(self) -> bool:
        """Whether the next call of anybody in this thread meets no error of ours."""
        return self.result in (DrainResult.DRAINED, DrainResult.NOTHING_PENDING)


class DriverFailed(HwrError, RuntimeError):
    """{call} failed: {name} ({number}): {text}
    {remedy}"""

    code = FailureCode.REGISTRATION_FAILED
    stage = ResolutionStage.LIFECYCLE
    retryable = True

    def __init__(self, *, call: str, number: int, name: str, text: str, remedy: str = "The weights can be served staged instead.") -> None:
        """Say which call failed; `number`, `name` and `text` are the driver's own, `number` is NOT_CALLED if there is none."""
        super().__init__(call=call, number=number, name=name, text=text, remedy=remedy)
        self.details.pop("reason")  # so that a copy in another process is built from the arguments above
        self.number = number
        self.name = name
        self.text = text


class Driver(Protocol):
    """Pins and unpins ranges of this process. Used by one thread: CUDA's pending error belongs to a thread."""

    @property
    def name(self) -> Literal["cuda", "mlock"]:
        """The driver, as events and reports say it."""

    @property
    def memlock_applies(self) -> bool:
        """Whether RLIMIT_MEMLOCK bounds what it pins."""

    def supported(self) -> Unsupported | None:
        """Ask, before any other call, whether read-only shared mappings can be pinned; None is yes."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin a range; blocks for as long as it takes, without the GIL.

        Raises:
            DriverFailed: nothing of this range is pinned by this call.
        """

    def unregister(self, address: int, nbytes: int) -> None:
        """Unpin a range that `register` pinned, with the same arguments.

        Raises:
            DriverFailed: it may still be pinned; its mapping must stay.
        """

    def drain(self) -> Drain:
        """Consume the error that the last failed call left pending for this thread; raises nothing."""
