"""Calls that may never come back: reads that wait for a filesystem or for another process's mmap lock.

Owns one daemon thread for each such call. Promises that whoever asks waits no longer than it is willing to, that a key has one call at a
time (a thing that hangs hangs once, however often it is asked), and that a late answer is there for the next who asks. Refuses to end a
call: what waits on FUSE, NFS or an mmap lock is killable, so that the end of the process ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from hwr.errors import Unavailable
from hwr.telemetry.clock import boot_ns
from hwr.units import NS_PER_S

# As many things as may hang at once; a thread that waits costs some 50 KiB.
MAX_CALLS: Final = 128

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Waiting:
    """The call goes on; `seconds` since it began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[Value]):
    """What the call returned. `late`: it was begun for somebody who did not wait for it."""

    value: Value
    late: bool = False


@dataclass(slots=True)
class _Call:
    begun_ns: int
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None
    late: bool = False


class Asides:
    """The calls of one collector. Its methods are for one thread."""

    def __init__(self, name: str, *, clock: Callable[[], int] = boot_ns) -> None:
        self._name, self._clock = name, clock
        self._calls: dict[Hashable, _Call] = {}

    def begin(self, key: Hashable, call: Callable[[], Any]) -> Unavailable | None:
        """Begin a call unless one of this key goes on, or waits to be fetched."""
        if key in self._calls:
            return None
        if len(self._calls) >= MAX_CALLS:
            self.forget(())
        if len(self._calls) >= MAX_CALLS:
            return Unavailable(f"{MAX_CALLS} reads wait already")
        begun = self._calls[key] = _Call(self._clock())
        try:
            threading.Thread(target=_carry_out, args=(begun, call), name=f"hwr-{self._name}-aside", daemon=True).start()
        except RuntimeError as error:  # a limit of threads
            del self._calls[key]
            return Unavailable(str(error))
        return None

    def fetch(self, key: Hashable, patience_seconds: float) -> Answer[Any] | Waiting | None:
        """Return the answer of a call that was begun, once; None if none was.

        Raises:
            Exception: what the call raised.
        """
        call = self._calls.get(key)
        if call is None:
            return None
        if not call.done.wait(max(0.0, patience_seconds)):
            call.late = True
            return Waiting((self._clock() - call.begun_ns) / NS_PER_S)
        del self._calls[key]
        if call.error is not None:
            raise call.error
        return Answer(call.value, call.late)

    def ask(self, key: Hashable, call: Callable[[], Value], patience_seconds: float) -> Answer[Value] | Waiting | Unavailable:
        """Begin a call, or meet the one that goes on, and wait for it.

        Raises:
            Exception: what the call raised.
        """
        refused = self.begin(key, call)
        answer = self.fetch(key, patience_seconds)
        if answer is None:
            return refused or Unavailable("it was not begun")
        return answer

    def forget(self, keep: tuple[Hashable, ...] | set[Hashable]) -> None:
        """Drop the answers that nobody fetches any more; calls that go on stay."""
        for key in [key for key, call in self._calls.items() if call.done.is_set() and key not in keep]:
            del self._calls[key]

    def waiting(self) -> dict[Hashable, float]:
        """Return the keys whose calls go on, and for how long they have."""
        now = self._clock()
        return {key: (now - call.begun_ns) / NS_PER_S for key, call in self._calls.items() if not call.done.is_set()}


def _carry_out(call: _Call, what: Callable[[], Any]) -> None:
    try:
        call.value = what()
    except BaseException as error:  # noqa: BLE001  (handed to whoever fetches)
        call.error = error
    finally:
        call.done.set()
