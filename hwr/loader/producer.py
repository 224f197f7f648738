"""The `finalized_model` producer: publish what a model holds after its own loading.

Owns turning a module's parameters and persistent buffers into streams of final bytes: renamed, cast, contiguous.
Promises that memory does not grow with the model (a view where the bytes are final already, blocks of 8 MiB where they are made) and that
tied tensors are written once. Refuses tensors without bytes (meta) and dtypes that the format does not have.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from hwr.errors import ProducerUnsupported
from hwr.loader.dtypes import dtype_of, word_of
from hwr.loader.plan import CASTS, LayoutPlan
from hwr.outcomes import TensorKind
from hwr.units import MIB

PRODUCER: Final = "finalized_model"
# A view needs no memory; made bytes live in at most four blocks at once: being made, written, waiting and hashed.
VIEW_BLOCK_BYTES: Final = 64 * MIB
MADE_BLOCK_BYTES: Final = 8 * MIB


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One final tensor that a model holds (hwr.store.writer.TensorSource)."""

    name: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    tensor: torch.Tensor

    def blocks(self) -> Iterator[memoryview]:
        """Yield the bytes in C order; views of the tensor's own memory where they can be."""
        tensor = self.tensor.detach()
        target = dtype_of(self.dtype)
        assert target is not None
        if not tensor.numel():
            return
        if tensor.dtype == target and tensor.is_contiguous() and tensor.device.type == "cpu":
            yield from _slices(_bytes_of(tensor), VIEW_BLOCK_BYTES)
            return
        per_block = max(1, MADE_BLOCK_BYTES // target.itemsize)
        for part in _parts(tensor, per_block):
            made = part.to(device="cpu", dtype=target).contiguous()
            yield _bytes_of(made)


@dataclass(frozen=True, slots=True)
class Produced:
    """What a producer offers: streams of final tensors, and the names that share another's storage."""

    tensors: tuple[ModelTensor, ...]
    aliases: dict[str, str]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in their final form."""
        return sum(math.prod(t.shape) * _itemsize(t.dtype) for t in self.tensors)


def finalized_model(module: torch.nn.Module, plan: LayoutPlan) -> Produced:
    """Describe the final tensors of a loaded model; no byte is touched yet.

    Raises:
        ProducerUnsupported: a tensor is on meta, or has a dtype without a word in the format.
    """
    found: list[ModelTensor] = []
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, kind, tensor in held_tensors(module):
        final = plan.target(name)
        if tensor.is_meta:
            raise ProducerUnsupported(
                reason="meta",
                what=f"tensor {name!r}",
                problem="it has no bytes (meta device)",
                remedy="Load the model completely before it is published.",
            )
        same = _storage_key(tensor)
        first = seen.get(same) if same is not None else None
        if first is not None:
            aliases[final] = first
            continue
        if same is not None:
            seen[same] = final
        found.append(ModelTensor(name=final, kind=kind, dtype=_final_dtype(tensor, plan, name), shape=tuple(tensor.shape), tensor=tensor))
    return Produced(tensors=tuple(found), aliases=aliases)


def held_tensors(module: torch.nn.Module) -> Iterator[tuple[str, TensorKind, torch.Tensor]]:
    """Yield every parameter and persistent buffer under each of its names, as `state_dict` spells them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, TensorKind.PARAMETER if name in parameters else TensorKind.BUFFER, value


def _final_dtype(tensor: torch.Tensor, plan: LayoutPlan, name: str) -> str:
    if plan.cast is not None and tensor.dtype.is_floating_point:
        return CASTS[plan.cast]
    word = word_of(tensor.dtype)
    if word is None:
        raise ProducerUnsupported(
            reason="dtype",
            what=f"tensor {name!r}",
            problem=f"the format has no word for {tensor.dtype}",
            remedy="Cast it in the layout plan.",
        )
    return word


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Tell tensors apart that are the same memory seen the same way: those are tied, overlapping ones are not."""
    if not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _parts(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Yield pieces in C order of at most `elements` elements, without a copy of the whole."""
    if tensor.numel() <= elements:
        yield tensor
        return
    rows = max(1, elements // max(1, tensor[0].numel()))
    if tensor[0].numel() <= elements:
        for at in range(0, tensor.shape[0], rows):
            yield tensor[at : at + rows]
        return
    for row in tensor:  # one row alone is too much
        yield from _parts(row, elements)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; numpy is not needed for it. The view keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B").toreadonly()


def _slices(view: memoryview, size: int) -> Iterator[memoryview]:
    for at in range(0, len(view), size):
        yield view[at : at + size]


def _itemsize(word: str) -> int:
    dtype = dtype_of(word)
    return 0 if dtype is None else dtype.itemsize
