"""What a CUDA call can fail with: one class a code.

Owns the classes and the way from a number to one of them. Promises the number, the runtime's own name and text of it, and a
way out for the codes that registration and transfers are known to meet. Refuses to judge: whether a failure ends a start is the
caller's to say, which is why none of these is retryable by itself.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from hwr.errors import HwrError


class CudaUnavailable(HwrError, RuntimeError):
    """the CUDA runtime {library} has no function {function}
    It is no libcudart, or one of another age than this suite was written for; say which library to use."""


class CudaError(HwrError, RuntimeError):
    """{call} failed: {name} ({number}): {text}
    Look the number up in the CUDA Runtime API reference under "Error Handling"."""

    NUMBER: ClassVar[int | None] = None

    def __init__(self, *, call: str, number: int, name: str, text: str, **more: Any) -> None:
        """Say which call failed; `number`, `name` and `text` are the runtime's own."""
        super().__init__(call=call, number=number, name=name, text=text, **more)
        self.number = number
        self.name = name
        self.text = text


class InvalidValue(CudaError):
    """{call} failed: {name} ({number}): {text}
    The range is empty, not mapped, or of a kind that this driver cannot pin; Linux 6.11 to 6.13 refuse more than 2047 MiB a call."""

    NUMBER = 1


class MemoryAllocation(CudaError):
    """{call} failed: {name} ({number}): {text}
    The driver found no memory for its page tables, or the call was larger than it can do (512 GiB since r580); pin smaller chunks."""

    NUMBER = 2


class InitializationError(CudaError):
    """{call} failed: {name} ({number}): {text}
    CUDA cannot be used in this process; a child forked from a process that uses CUDA must be spawned instead."""

    NUMBER = 3


class InsufficientDriver(CudaError):
    """{call} failed: {name} ({number}): {text}
    The NVIDIA driver is missing or older than this runtime; update it, or install a build of torch for this driver."""

    NUMBER = 35


class DevicesUnavailable(CudaError):
    """{call} failed: {name} ({number}): {text}
    Another process has the device for itself, or it is being reset; look at nvidia-smi -q for its compute mode."""

    NUMBER = 46


class NoDevice(CudaError):
    """{call} failed: {name} ({number}): {text}
    No GPU is visible; check CUDA_VISIBLE_DEVICES and what the container was given."""

    NUMBER = 100


class InvalidDevice(CudaError):
    """{call} failed: {name} ({number}): {text}
    There is no device of this ordinal among the visible ones; check the rank's device."""

    NUMBER = 101


class DeviceUninitialized(CudaError):
    """{call} failed: {name} ({number}): {text}
    The device has no usable context in this thread; use the device once before pinning for it."""

    NUMBER = 201


class OperatingSystem(CudaError):
    """{call} failed: {name} ({number}): {text}
    The kernel refused the driver; dmesg has its reason, in lines that begin with NVRM."""

    NUMBER = 304


class IllegalAddress(CudaError):
    """{call} failed: {name} ({number}): {text}
    An earlier kernel destroyed the context; only a new process can use the device again."""

    NUMBER = 700


class HostMemoryAlreadyRegistered(CudaError):
    """{call} failed: {name} ({number}): {text}
    Something else in this process pinned a part of the range already; it must unpin it, or pinning be left to it."""

    NUMBER = 712


class HostMemoryNotRegistered(CudaError):
    """{call} failed: {name} ({number}): {text}
    This runtime does not know the range; it was unpinned by somebody else, or pinned through another copy of the library."""

    NUMBER = 713


class LaunchFailure(CudaError):
    """{call} failed: {name} ({number}): {text}
    An earlier kernel destroyed the context; only a new process can use the device again."""

    NUMBER = 719


class NotPermitted(CudaError):
    """{call} failed: {name} ({number}): {text}
    The driver forbids this to the process; check the container's devices and capabilities."""

    NUMBER = 800


class NotSupported(CudaError):
    """{call} failed: {name} ({number}): {text}
    This driver cannot do that on this device; for read-only mappings attribute 113 says so beforehand."""

    NUMBER = 801


class SystemDriverMismatch(CudaError):
    """{call} failed: {name} ({number}): {text}
    The kernel module and the user-space driver are of different versions; restart the node or the container after an update."""

    NUMBER = 803


class Unknown(CudaError):
    """{call} failed: {name} ({number}): {text}
    The driver does not say what happened; dmesg may, in lines that begin with NVRM."""

    NUMBER = 999


_CLASSES: Final[dict[int, type[CudaError]]] = {
    kind.NUMBER: kind
    for kind in (
        InvalidValue,
        MemoryAllocation,
        InitializationError,
        InsufficientDriver,
        DevicesUnavailable,
        NoDevice,
        InvalidDevice,
        DeviceUninitialized,
        OperatingSystem,
        IllegalAddress,
        HostMemoryAlreadyRegistered,
        HostMemoryNotRegistered,
        LaunchFailure,
        NotPermitted,
        NotSupported,
        SystemDriverMismatch,
        Unknown,
    )
    if kind.NUMBER is not None
}


def error_class(number: int) -> type[CudaError]:
    """Return the class of a cudaError_t; a number without one is a plain CudaError."""
    return _CLASSES.get(number, CudaError)
