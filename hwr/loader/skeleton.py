"""Model skeletons: parameters on meta, everything else built for real.

Owns the building. Promises that parameters take no memory while buffers and plain tensors get their true values: a model built wholly on
meta runs without an error and is wrong. Refuses to touch other threads' models: the hook is torch's own and looks at its thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy


def build_skeleton(factory: Callable[[], Any]) -> Any:
    """Build a module whose parameters are on meta. Tied parameters stay tied."""
    mine = threading.get_ident()

    def to_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if threading.get_ident() != mine or parameter.is_meta or is_lazy(parameter):
            return None
        with torch.no_grad():
            empty = torch.empty_like(parameter.data, device="meta")
        return parameter_like(parameter, empty)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's stub forgets the result
    try:
        return factory()
    finally:
        handle.remove()


def parameter_like(old: torch.nn.Parameter, value: torch.Tensor) -> torch.nn.Parameter:
    """Make a parameter of other data: of the same class, with the marks that libraries leave on parameters."""
    differentiable = value.dtype.is_floating_point or value.dtype.is_complex
    made: torch.nn.Parameter = torch.Tensor._make_subclass(type(old), value, old.requires_grad and differentiable)
    made.__dict__.update(old.__dict__)
    return made


def meta_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every meta tensor that a module holds: parameters, buffers, plain attributes, and what lists and dictionaries hold."""
    for prefix, part in module.named_modules():
        held = {**part._parameters, **part._buffers, **_attributes(part)}
        for name, value in held.items():
            for tensor in _tensors_in(value):
                if tensor.is_meta:
                    yield f"{prefix}.{name}" if prefix else name, tensor


def replace_references(module: torch.nn.Module, replaced: Mapping[int, torch.Tensor]) -> None:
    """Let plain attributes (an RNN's list of its weights, for one) refer to new tensors; `replaced` is by the id of the old ones."""
    for part in module.modules():
        for name, value in _attributes(part).items():
            new = _replace(value, replaced)
            if new is not value:
                part.__dict__[name] = new


# Where torch keeps what a module holds by name; everything else in its __dict__ is a plain attribute.
_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH: Final = 4


def _attributes(part: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in part.__dict__.items() if name not in _TABLES}


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH and isinstance(value, dict | list | tuple):
        for item in list(value.values()) if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth + 1)


def _replace(value: Any, replaced: Mapping[int, torch.Tensor], depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if depth < _DEPTH and isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new = _replace(item, replaced, depth + 1)
            if new is not item:
                value[key] = new
    elif depth < _DEPTH and type(value) is tuple:
        items = tuple(_replace(item, replaced, depth + 1) for item in value)
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return items
    return value
