"""Pinning for DMA: cudaHostRegister on read-only shared mappings.

Owns the flag, the capability that is asked first, the device that it happens on, and the way in which a pending error is consumed.
Promises one handle for all calls of one driver, that a question leaves no error pending, and that a call which could not even be
made is `DriverFailed` too. Refuses to make a mapping writable, and to initialise another device than that of its worker.

The flag is 0x08, read-only, alone: without it a PROT_READ mapping is refused (error 1), and with unified addressing a range is
portable and mapped without the flags of these names. NVIDIA's driver pins without VmLck or VmPin, so that RLIMIT_MEMLOCK does not bind.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from hwr.cuda.errors import CudaError, CudaUnavailable
from hwr.cuda.libcudart import Libcudart, load
from hwr.cuda.prototypes import ATTRIBUTE_HOST_REGISTER_READ_ONLY_SUPPORTED, HOST_REGISTER_READ_ONLY, SUCCESS
from hwr.errors import Unavailable
from hwr.registration.drivers import NOT_CALLED, Drain, DrainResult, DriverFailed, Unsupported

_NEEDED: Final = ("cudaGetDevice", "cudaSetDevice", "cudaDeviceGetAttribute", "cudaHostRegister", "cudaHostUnregister")


class CudaDriver:
    """A `Driver` over one copy of libcudart, which is looked for when the driver is first asked something."""

    name: Literal["cuda"] = "cuda"
    memlock_applies: bool = False

    def __init__(self, libcudart: Path | None = None, device: int | None = None) -> None:
        """Choose the library and the device ordinal; None is torch's copy, and the calling thread's current device."""
        self._path = libcudart
        self._device = device
        self._found: Libcudart | Unavailable | None = None
        self._expected = SUCCESS  # what our last failed call left pending

    @property
    def runtime(self) -> Libcudart | Unavailable:
        """The copy that is called; loaded here, once."""
        if self._found is None:
            self._found = load(self._path)
        return self._found

    def supported(self) -> Unsupported | None:
        """Ask attribute 113 of the device; an error of the question is consumed here."""
        runtime = self.runtime
        if isinstance(runtime, Unavailable):
            return Unsupported(f"libcudart_unavailable: {runtime.reason}", word="platform")
        for name in _NEEDED:
            function = runtime.function(name)
            if isinstance(function, Unavailable):
                return Unsupported(f"libcudart_unavailable: {function.reason}", word="platform")
        try:
            device = runtime.value("cudaGetDevice") if self._device is None else self._device
            possible = runtime.value("cudaDeviceGetAttribute", ATTRIBUTE_HOST_REGISTER_READ_ONLY_SUPPORTED, device)
        except CudaError as error:
            runtime.last_error()
            return Unsupported(f"device_unavailable: {error.cause}", word="platform")
        return None if possible else Unsupported(f"readonly_unsupported: device {device} has HostRegisterReadOnlySupported 0")

    def register(self, address: int, nbytes: int) -> None:
        """Pin a range for the device."""
        with self._failing("cudaHostRegister") as runtime:
            self._use_device(runtime)
            runtime.call("cudaHostRegister", address, nbytes, HOST_REGISTER_READ_ONLY)

    def unregister(self, address: int, nbytes: int) -> None:
        """Unpin a range; the runtime knows its length by its address."""
        with self._failing("cudaHostUnregister") as runtime:
            self._use_device(runtime)
            runtime.call("cudaHostUnregister", address)

    def drain(self) -> Drain:
        """Consume what our last failed call left, through the handle that failed; 0 and our own code are clean.

        Without a failed call of ours, whatever is pending belongs to somebody else and stays.
        """
        expected, self._expected = self._expected, SUCCESS
        runtime = self._found
        if not isinstance(runtime, Libcudart) or expected == SUCCESS:
            return Drain(DrainResult.NOTHING_PENDING)
        first = runtime.last_error()
        if isinstance(first, Unavailable):
            return Drain(DrainResult.UNAVAILABLE, detail=first.reason)
        if first == SUCCESS:
            return Drain(DrainResult.NOTHING_PENDING)
        words = f"{runtime.error_name(first)}: {runtime.error_text(first)}"
        if runtime.last_error() == first:  # back although consumed: a lost context, or CUDA never began
            return Drain(DrainResult.OTHER, first, f"{words}; it stays, this process can use CUDA no more")
        return Drain(DrainResult.DRAINED if first == expected else DrainResult.OTHER, first, words)

    @contextlib.contextmanager
    def _failing(self, call: str) -> Iterator[Libcudart]:
        runtime = self.runtime
        if isinstance(runtime, Unavailable):
            raise DriverFailed(call=call, number=NOT_CALLED, name="libcudart_unavailable", text=runtime.reason)
        try:
            yield runtime
        except CudaError as error:
            self._expected = error.number
            raise DriverFailed(
                call=error.details["call"], number=error.number, name=error.name, text=error.text, remedy=error.way_out
            ) from error
        except CudaUnavailable as error:
            raise DriverFailed(call=call, number=NOT_CALLED, name="function_missing", text=error.cause, remedy=error.way_out) from error
        except (ctypes.ArgumentError, OSError, OverflowError) as error:
            raise DriverFailed(call=call, number=NOT_CALLED, name=type(error).__name__, text=str(error)) from error

    def _use_device(self, runtime: Libcudart) -> None:
        """Make our device this thread's current one, and leave it so: a call on device 0 would give every rank a context there."""
        if self._device is not None and runtime.value("cudaGetDevice") != self._device:
            runtime.call("cudaSetDevice", self._device)
