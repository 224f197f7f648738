"""Words of the safetensors format.

Owns its element types and the constants that a reader and a writer share. Promises the closed set of safetensors 0.8.0.
Refuses files: reading is strict in `checkpoint.header`, writing in `store.writer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

LENGTH_BYTES: Final = 8  # little-endian u64 before the header
HEADER_LIMIT_BYTES: Final = 100_000_000  # the format's own limit; stock accepts exactly this and no more
METADATA_KEY: Final = "__metadata__"


class Dtype(StrEnum):
    """An element type of the format, as spelt in headers; the closed set of safetensors 0.8.0."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"
    C64 = "C64"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"

    @property
    def bits(self) -> int:
        """Bits of one element; below 8 the elements are packed."""
        return DTYPE_BITS[self]


# Every name says its own width, but for BOOL: one byte.
DTYPE_BITS: Final[Mapping[str, int]] = {
    dtype.value: 8 if dtype is Dtype.BOOL else int(re.sub(r"^[A-Z]+(\d+).*$", r"\1", dtype.value)) for dtype in Dtype
}

# What can be sliced at any element: sub-byte types are packed, and have no name in torch.
BYTE_DTYPE_BITS: Final[Mapping[str, int]] = {word: bits for word, bits in DTYPE_BITS.items() if bits % 8 == 0}
