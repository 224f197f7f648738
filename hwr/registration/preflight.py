"""Limits that others have met, told before the call that would meet them.

Owns the numbers and where they come from. Promises one line for each that a plan touches, and none for the default chunk
size. Refuses to judge: these are warnings, another driver or a patched kernel may be free of them.
"""

from __future__ import annotations

import re
from typing import Final

from hwr.registration.ranges import Plan
from hwr.units import GIB, bytes_text

# A driver compacts memory under a lock that all GPU processes of the node need: NVIDIA/open-gpu-kernel-modules#1383.
COMPACTION_BYTES: Final = 512_000_000
# Larger long-term pins fail with EINVAL on Linux 6.11 to 6.13, and may leak what they held: NVIDIA/NV-Kernels#108.
KERNEL_PIN_BYTES: Final = 2 * GIB
KERNELS: Final = ((6, 11), (6, 13))
# What others cut their registrations to, and all that has been tried at length: vllm-project/vllm#51081.
PROVEN_BYTES: Final = 64 * GIB
# 16 bytes a page of 4 KiB in one table of at most INT_MAX: vllm-project/vllm#51080, NVIDIA/open-gpu-kernel-modules#1234.
CALL_BYTES: Final = 512 * GIB
CALL_DRIVER: Final = 580
# The wall that many small registrations met: QMCPACK/qmcpack#5557.
SEGMENTS: Final = 65_536

_RELEASE: Final = re.compile(r"(\d{1,4})\.(\d{1,4})", re.ASCII)
_MAJOR: Final = re.compile(r"(\d{1,6})", re.ASCII)


def known_limits(plan: Plan, kernel_release: str, driver_version: str | None) -> tuple[str, ...]:
    """Warn about what this plan touches when CUDA registers it; `driver_version` None is not known.

    What depends on a version that is not known, or cannot be read, is told with that condition.
    """
    call = max((chunk.nbytes for chunk in plan.chunks), default=0)
    size = f"one call would register {bytes_text(call)}"
    told: list[str] = []
    if call >= CALL_BYTES:
        driver = _MAJOR.match(driver_version or "")
        if driver is None:
            told.append(f"{size}: NVIDIA drivers since {CALL_DRIVER} refuse {bytes_text(CALL_BYTES)} and more; this driver is not known")
        elif int(driver[1]) >= CALL_DRIVER:
            told.append(f"{size}: driver {driver_version} refuses {bytes_text(CALL_BYTES)} and more (cudaErrorMemoryAllocation)")
    if call > KERNEL_PIN_BYTES:
        release = _RELEASE.match(kernel_release)
        kernels = f"Linux {_dotted(KERNELS[0])} to {_dotted(KERNELS[1])} fail to pin more than {bytes_text(KERNEL_PIN_BYTES)} at once"
        if release is None:
            told.append(f"{size}: {kernels}, and may leak it; this kernel is not known")
        elif KERNELS[0] <= (int(release[1]), int(release[2])) <= KERNELS[1]:
            told.append(f"{size}: {kernels}, and may leak it; this is {kernel_release}")
    if call > PROVEN_BYTES:
        told.append(f"{size}: no more than {bytes_text(PROVEN_BYTES)} a call is proven, and nothing can interrupt it")
    if call >= COMPACTION_BYTES:
        told.append(f"{size}: from 512 MB the driver may compact memory while every GPU process of this node waits")
    told = [f"{line}; use smaller chunks" for line in told]
    if len(plan.chunks) > SEGMENTS:
        told.append(f"{len(plan.chunks)} calls: a process has room for about {SEGMENTS} registered segments; use larger chunks")
    return tuple(told)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
