"""Model skeletons: parameters on meta, everything else built for real.

Owns the building. Promises that parameters take no memory while buffers and plain tensors get their true values: a model built wholly on
meta runs without an error and is wrong. Refuses to touch other threads' models: the hook is torch's own and looks at its thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook


def build_skeleton(factory: Callable[[], Any]) -> Any:
    """Build a module whose parameters are on meta. Tied parameters stay tied."""
    mine = threading.get_ident()

    def to_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if threading.get_ident() != mine or parameter.is_meta:
            return None
        with torch.no_grad():
            empty = torch.empty_like(parameter, device="meta")
        made = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)  # marks that libraries leave on parameters
        return made

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's stub forgets the result
    try:
        return factory()
    finally:
        handle.remove()


def meta_tensors(module: torch.nn.Module) -> Iterator[str]:
    """Name every meta tensor that a module holds: parameters, buffers, and plain attributes."""
    for prefix, part in module.named_modules():
        held = {**part._parameters, **part._buffers, **part.__dict__}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{prefix}.{name}" if prefix else name
