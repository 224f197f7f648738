"""The `finalized_model` producer: publish what a model holds after its own loading.

Owns turning a module's parameters and persistent buffers into streams of final bytes: renamed, cast, contiguous.
Promises that memory does not grow with the model (a view where the bytes are final already, blocks of 4 MiB where they are made) and that
tied tensors are written once. Refuses tensors without bytes (meta) and dtypes that the format does not have.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hwr.errors import ProducerUnsupported
from hwr.loader.dtypes import dtype_of, word_of
from hwr.loader.plan import CASTS, LayoutPlan
from hwr.outcomes import TensorKind
from hwr.units import MIB

PRODUCER: Final = "finalized_model"
# A view needs no memory; bytes that are made live in three blocks at once: one is made and written, one waits, one is hashed.
VIEW_BLOCK_BYTES: Final = 64 * MIB
MADE_BLOCK_BYTES: Final = 4 * MIB
RING_BLOCKS: Final = 3


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
        final = not tensor.is_conj() and not tensor.is_neg()  # a lazy view: its memory does not hold its values
        if final and tensor.dtype == target and tensor.is_contiguous() and tensor.device.type == "cpu":
            yield from _slices(_bytes_of(tensor), VIEW_BLOCK_BYTES)
            return
        per_block = min(tensor.numel(), MADE_BLOCK_BYTES // target.itemsize)
        # Three, used in turn, as the writer allows: an allocator that is asked for each block anew keeps several times as much.
        ring: list[torch.Tensor] = []
        for number, part in enumerate(_parts(tensor, per_block)):
            if number < RING_BLOCKS:
                ring.append(torch.empty(per_block, dtype=target))
            made = ring[number % RING_BLOCKS][: part.numel()]
            made.view(part.shape).copy_(part)
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
    other = other_state(module)
    if other:
        raise ProducerUnsupported(
            reason="extra_state",
            what=f"state {other[0]!r}",
            problem="it is no tensor",
            remedy="Publish modules without get_extra_state.",
        )
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
        _refuse_unplain(name, tensor)
        same = _storage_key(kind, tensor)
        first = seen.get(same) if same is not None else None
        if first is not None:
            aliases[final] = first
            continue
        if same is not None:
            seen[same] = final
        found.append(ModelTensor(name=final, kind=kind, dtype=_final_dtype(tensor, plan, name), shape=tuple(tensor.shape), tensor=tensor))
    return Produced(tensors=tuple(found), aliases=aliases)


def _refuse_unplain(name: str, tensor: torch.Tensor) -> None:
    problem = None
    if is_lazy(tensor):
        problem = "a lazy module has not seen its first input"
    elif tensor.layout is not torch.strided:
        problem = f"its layout is {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"its dtype is {tensor.dtype}"
    elif _is_wrapper(tensor):
        problem = f"a {type(tensor).__name__} is made of other tensors"
    if problem:
        raise ProducerUnsupported(
            reason="layout", what=f"tensor {name!r}", problem=problem, remedy="Only plain tensors are published in this version."
        )


def _is_wrapper(tensor: Any) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def held_tensors(module: torch.nn.Module) -> Iterator[tuple[str, TensorKind, torch.Tensor]]:
    """Yield every parameter and persistent buffer under each of its names, as `state_dict` spells them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, TensorKind.PARAMETER if name in parameters else TensorKind.BUFFER, value


def other_state(module: torch.nn.Module) -> list[str]:
    """Name what a module's state holds besides tensors (`get_extra_state`): an artifact has no place for it."""
    return [name for name, value in module.state_dict(keep_vars=True).items() if not isinstance(value, torch.Tensor)]


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


def _storage_key(kind: TensorKind, tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Tell tensors apart that are the same memory seen the same way: those are tied, overlapping ones are not."""
    if not tensor.numel():
        return None
    lazy = tensor.is_conj(), tensor.is_neg()
    return kind, tensor.device, tensor.data_ptr(), tensor.dtype, lazy, tuple(tensor.shape), tuple(tensor.stride())


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
