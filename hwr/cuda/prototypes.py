"""The functions of libcudart that this suite calls, and nothing else of it.

Owns their names, types and constants, in one table. Promises that no function is called without both declared: ctypes would cut
a 64-bit address to an int. Refuses everything that torch does well enough: allocation, kernels, graphs.

Types are those of cuda_runtime_api.h, unchanged from CUDA 11.1 to 13: cudaError_t and the other enums are int; streams and events
are pointers, and a null stream is the legacy default one.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

Address = ctypes.c_void_p
Enum = ctypes.c_int
Flags = ctypes.c_uint
Handle = ctypes.c_void_p
Pointer = ctypes.POINTER

SUCCESS: Final = 0
# cudaHostRegister: pin without asking for write access; without it a PROT_READ mapping is refused.
HOST_REGISTER_READ_ONLY: Final = 0x08
# cudaDeviceAttr: whether the flag above is possible on a device (0 on some driver and GPU pairs, else 1).
ATTRIBUTE_HOST_REGISTER_READ_ONLY_SUPPORTED: Final = 113
# cudaMemcpyKind.
MEMCPY_HOST_TO_DEVICE: Final = 1
# cudaStreamCreateWithFlags: no implicit order with the legacy default stream.
STREAM_NON_BLOCKING: Final = 0x01
# cudaEventCreateWithFlags: no timestamps, which makes an event cheap to wait for.
EVENT_DISABLE_TIMING: Final = 0x02

# name -> (type of the result, types of the arguments)
PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    # errors
    "cudaGetLastError": (Enum, ()),
    "cudaPeekAtLastError": (Enum, ()),
    "cudaGetErrorName": (ctypes.c_char_p, (Enum,)),
    "cudaGetErrorString": (ctypes.c_char_p, (Enum,)),
    # versions and devices
    "cudaRuntimeGetVersion": (Enum, (Pointer(ctypes.c_int),)),
    "cudaDriverGetVersion": (Enum, (Pointer(ctypes.c_int),)),
    "cudaGetDeviceCount": (Enum, (Pointer(ctypes.c_int),)),
    "cudaGetDevice": (Enum, (Pointer(ctypes.c_int),)),
    "cudaSetDevice": (Enum, (ctypes.c_int,)),
    "cudaDeviceGetAttribute": (Enum, (Pointer(ctypes.c_int), Enum, ctypes.c_int)),
    "cudaDeviceSynchronize": (Enum, ()),
    # host memory
    "cudaHostRegister": (Enum, (Address, ctypes.c_size_t, Flags)),
    "cudaHostUnregister": (Enum, (Address,)),
    "cudaHostGetFlags": (Enum, (Pointer(ctypes.c_uint), Address)),
    # transfers
    "cudaMemcpyAsync": (Enum, (Address, Address, ctypes.c_size_t, Enum, Handle)),
    "cudaStreamCreateWithFlags": (Enum, (Pointer(Handle), Flags)),
    "cudaStreamDestroy": (Enum, (Handle,)),
    "cudaStreamQuery": (Enum, (Handle,)),
    "cudaStreamSynchronize": (Enum, (Handle,)),
    "cudaStreamWaitEvent": (Enum, (Handle, Handle, Flags)),
    "cudaEventCreateWithFlags": (Enum, (Pointer(Handle), Flags)),
    "cudaEventDestroy": (Enum, (Handle,)),
    "cudaEventRecord": (Enum, (Handle, Handle)),
    "cudaEventQuery": (Enum, (Handle,)),
    "cudaEventSynchronize": (Enum, (Handle,)),
    "cudaEventElapsedTime": (Enum, (Pointer(ctypes.c_float), Handle, Handle)),
}
