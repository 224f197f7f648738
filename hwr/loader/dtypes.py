"""Between torch's dtypes and the words of the safetensors format.

Owns the two tables. Promises that what is named here has the same bytes on both sides. Refuses the rest with the name that is missing.
"""

from __future__ import annotations

import functools

import torch

_WORDS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


@functools.cache
def _tables() -> tuple[dict[torch.dtype, str], dict[str, torch.dtype]]:
    # A torch of 2.6 has not every name of a later one.
    words = {dtype: word for name, word in _WORDS.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
    return words, {word: dtype for dtype, word in words.items()}


def word_of(dtype: torch.dtype) -> str | None:
    """Return the format's word for a dtype, None if it has none."""
    return _tables()[0].get(dtype)


def dtype_of(word: str) -> torch.dtype | None:
    """Return torch's dtype for a word, None if this torch has none."""
    return _tables()[1].get(word)
