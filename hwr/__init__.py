"""Observability-first Host Weight Runtime: final weights on the node, memory-mapped, saying what happens to them.

Owns the public names. Promises to load neither torch nor a library of CUDA until `load` is used. Refuses work at import.

    with hwr.load(build_model, "/models/bert", hwr.Options.of(host_weight_runtime_mode="preferred", ...)) as loaded:
        loaded.module(...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hwr.options import Options, compose

if TYPE_CHECKING:
    from hwr import telemetry
    from hwr.runtime import AdaptedWeights, Loaded, load

__all__ = ["AdaptedWeights", "Loaded", "Options", "compose", "load", "telemetry"]

_RUNTIME = frozenset({"AdaptedWeights", "Loaded", "load"})


def __getattr__(name: str) -> Any:
    """Import what needs torch, or opens nothing but is large, when it is first asked for (PEP 562)."""
    import importlib

    if name in _RUNTIME:
        return getattr(importlib.import_module("hwr.runtime"), name)
    if name == "telemetry":
        return importlib.import_module("hwr.telemetry")
    raise AttributeError(f"module 'hwr' has no attribute {name!r}")
