"""Input for a forward pass of a model that was not written by us.

Owns the derivation of synthetic input from a configuration and a forward signature, and the pass itself. Promises the same input for the
same model every time. Refuses to guess: what it cannot derive is one clear error.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hwr.errors import ForwardFailed, NotImplementedYet
from hwr.units import one_line

if TYPE_CHECKING:
    import torch

TOKENS = 16
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")


def synthetic_input(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return keyword arguments for `forward`: token ids for anything with a vocabulary.

    Raises:
        NotImplementedYet: the model takes something else.
    """
    import torch

    config = getattr(module, "config", None)
    names = set(inspect.signature(module.forward).parameters)
    vocabulary = getattr(config, "vocab_size", None)
    if "input_ids" not in names or not isinstance(vocabulary, int) or getattr(config, "is_encoder_decoder", False):
        raise NotImplementedYet(
            reason="synthetic_input",
            what=f"synthetic input for {type(module).__name__}",
            remedy="Give --steps 0: the weights are loaded and checked, and no forward pass is run.",
        )
    generator = torch.Generator().manual_seed(0)
    longest = min((value for name in _LENGTHS if isinstance(value := getattr(config, name, None), int) and value > 0), default=TOKENS)
    ids = torch.randint(vocabulary, (1, min(TOKENS, longest)), generator=generator)
    told: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in names:
        told["attention_mask"] = torch.ones_like(ids)
    return told


def run_steps(module: torch.nn.Module, steps: int) -> str | None:
    """Run forward passes without gradients; return the digest of the last output's first tensor, None if there is none."""
    import torch

    told = synthetic_input(module)
    output: Any = None
    with torch.no_grad():
        for _ in range(steps):
            try:
                output = module(**told)
            except Exception as error:
                raise ForwardFailed(
                    reason=type(error).__name__,
                    model=type(module).__name__,
                    problem=f"{type(error).__name__}: {one_line(str(error))}",
                ) from error
    first = output[0] if output is not None else None
    if not isinstance(first, torch.Tensor):
        return None
    return digest_of(first)


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's exact bits."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()
