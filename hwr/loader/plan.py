"""Layout plans: how each final tensor comes from tensors of the canonical checkpoint.

Owns the declaration and its fingerprint, which is part of the identity. Promises that equal plans have equal fingerprints and that a plan
says no more than it does. Refuses torch: a plan is looked at where nothing is loaded.

This version has rename and cast; slices, fusions and float8 have their own issue and are refused until then.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Final

from hwr.units import canonical_json

PLAN_SCHEMA: Final = 1
# What the code below and the producers do to bytes; changes whenever equal inputs would give other bytes.
IMPLEMENTATION: Final = "rename+cast/1"

# The words of the safetensors format for what torch can cast between, and the names that users know.
CASTS: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor gets another name."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The plan of one component. `cast` is the dtype that every floating-point tensor is stored in, None for as loaded."""

    name: str = "as_loaded"
    cast: str | None = None
    renames: tuple[Rename, ...] = ()

    def __post_init__(self) -> None:
        if self.cast is not None and self.cast not in CASTS:
            raise ValueError(f"cast to {self.cast!r}: one of {', '.join(sorted(CASTS))} is possible")
        targets = [rename.target for rename in self.renames]
        if len(set(targets)) != len(targets):
            raise ValueError("two tensors would get one name")

    def target(self, name: str) -> str:
        """Return the final name of a tensor."""
        for rename in self.renames:
            if rename.source == name:
                return rename.target
        return name

    @property
    def fingerprint(self) -> str:
        """Return the digest of the plan and of what executes it."""
        return hashlib.sha256(canonical_json({"plan": asdict(self), "schema": PLAN_SCHEMA, "implementation": IMPLEMENTATION})).hexdigest()
