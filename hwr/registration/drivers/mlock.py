"""Keeping the pages of a CPU worker in memory: mlock(2) on its mappings.

Owns the two calls and what their errno means. Promises that a failed call leaves nothing locked, and the kernel's own name and
text of the failure. Refuses mlockall: it would lock what is not ours.

The kernel counts against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK. VmLck jumps when a call begins; `nr_mlock` of
/proc/vmstat shows how far it is. Locks of a range do not nest, end with the process, and are not inherited over fork.
"""

from __future__ import annotations

import ctypes
import errno as errno_names
import os
from collections.abc import Callable
from typing import Any, Final, Literal

from hwr.registration.drivers import NOT_CALLED, Drain, DrainResult, DriverFailed, Unsupported

# mlock(2), ERRORS; the same number has several causes, and only the most likely one can be named.
_REMEDY: Final = {
    errno_names.ENOMEM: "RLIMIT_MEMLOCK is too low (ulimit -l, LimitMEMLOCK=), or a part of the range is not mapped.",
    errno_names.EPERM: "RLIMIT_MEMLOCK is 0 and the process has no CAP_IPC_LOCK.",
    errno_names.EAGAIN: "The kernel could not bring all pages into memory; free some and start again.",
}
_OTHERWISE: Final = "The weights can be served unpinned instead."


class MlockDriver:
    """A `Driver` over libc."""

    name: Literal["mlock"] = "mlock"
    memlock_applies: bool = True

    def __init__(self) -> None:
        """Load nothing yet."""
        self._functions: dict[str, Callable[..., int]] = {}

    def supported(self) -> Unsupported | None:
        """Every Linux has it."""
        return None

    def register(self, address: int, nbytes: int) -> None:
        """Fault the range in and lock it."""
        try:
            self._call("mlock", address, nbytes)
        except DriverFailed as failure:
            if failure.number != NOT_CALLED:
                # The range stays marked as locked if it failed half-way; munlock fails only where nothing is mapped.
                self._function("munlock")(address, nbytes)
            raise

    def unregister(self, address: int, nbytes: int) -> None:
        """Unlock the range; its pages stay in the page cache."""
        self._call("munlock", address, nbytes)

    def drain(self) -> Drain:
        """An errno is not pending for anybody."""
        return Drain(DrainResult.NOTHING_PENDING)

    def _call(self, name: str, address: int, nbytes: int) -> None:
        try:
            result = self._function(name)(address, nbytes)
        except (ctypes.ArgumentError, OSError, OverflowError) as error:
            raise DriverFailed(call=name, number=NOT_CALLED, name=type(error).__name__, text=str(error)) from error
        if result != 0:
            number = ctypes.get_errno()
            kind = errno_names.errorcode.get(number, f"errno {number}")
            raise DriverFailed(call=name, number=number, name=kind, text=os.strerror(number), remedy=_REMEDY.get(number, _OTHERWISE))

    def _function(self, name: str) -> Callable[..., int]:
        if name not in self._functions:
            function: Any = ctypes.CDLL(None, use_errno=True)[name]  # releases the GIL: locking 2 GiB takes tens of milliseconds or more
            function.restype = ctypes.c_int
            function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
            self._functions[name] = function
        return self._functions[name]
