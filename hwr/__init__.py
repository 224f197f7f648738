"""Observability-first Host Weight Runtime: final weights on the node, memory-mapped, saying what happens to them.

Owns the public names. Promises to load neither torch nor a library of CUDA until `load` is used, and of itself only what a name needs.
Refuses work at import.

    with hwr.load(build_model, "/models/bert", hwr.Options.of(host_weight_runtime_mode="preferred", ...)) as loaded:
        loaded.module(...)
"""

from __future__ import annotations

TYPE_CHECKING = False  # what typing calls so: importing it would cost more than this whole module
if TYPE_CHECKING:
    from typing import Any

    from hwr import telemetry
    from hwr.loaded import AdaptedWeights, Loaded
    from hwr.loader.factory import ModelFactory, PretrainedFactory
    from hwr.options import Options, compose
    from hwr.runtime import load
    from hwr.transport import register_loaded

__all__ = ["AdaptedWeights", "Loaded", "ModelFactory", "Options", "PretrainedFactory", "compose", "load", "register_loaded", "telemetry"]

_LATER = {
    "AdaptedWeights": "hwr.loaded",
    "Loaded": "hwr.loaded",
    "ModelFactory": "hwr.loader.factory",
    "Options": "hwr.options",
    "PretrainedFactory": "hwr.loader.factory",
    "compose": "hwr.options",
    "load": "hwr.runtime",
    "register_loaded": "hwr.transport",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch, or opens nothing but is large, when it is first asked for (PEP 562)."""
    import importlib

    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name == "telemetry":
        return importlib.import_module("hwr.telemetry")
    raise AttributeError(f"module 'hwr' has no attribute {name!r}")
