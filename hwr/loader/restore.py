"""Restoring: bind the views of a lease to a model skeleton.

Owns the plan, which only looks, and its commit, which is the one mutation. Promises zero-copy on the CPU (T1), that a failing plan leaves
the skeleton untouched (T2), and that no meta tensor is left anywhere (T3). Refuses artifacts that do not fit, before anything is touched.
"""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass
from typing import Final

import torch

from hwr.errors import RestoreCommitFailed, RestorePreflightFailed
from hwr.loader.dtypes import dtype_of
from hwr.loader.producer import held_tensors
from hwr.loader.skeleton import meta_tensors
from hwr.outcomes import TensorKind
from hwr.store.lease import HostWeightLease
from hwr.store.manifest import TensorEntry

NAMES_SHOWN: Final = 3
_warning_lock = threading.Lock()
_warned = False


@dataclass(frozen=True, slots=True)
class Restored:
    """What a commit did; `bound` are the module's names that now refer to the lease's memory."""

    bound: tuple[str, ...]
    bytes: int


class RestorePlan:
    """A checked plan; `commit` may be called once."""

    def __init__(self, skeleton: torch.nn.Module, lease: HostWeightLease) -> None:
        self._skeleton: torch.nn.Module | None = skeleton
        self._lease = lease

    def commit(self) -> Restored:
        """Bind every view.

        Raises:
            RestoreCommitFailed: it broke off; the skeleton must be discarded.
        """
        skeleton, self._skeleton = self._skeleton, None
        if skeleton is None:
            raise RestoreCommitFailed(reason="committed", problem="this plan was committed already")
        manifest = self._lease.manifest
        try:
            values: dict[str, torch.Tensor] = {entry.name: _value(self._lease, entry) for entry in manifest.tensors}
            # The same object under both names: load_state_dict keeps a tie only then.
            values.update({alias: values[name] for alias, name in manifest.aliases.items()})
            skeleton.load_state_dict(values, strict=True, assign=True)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise RestoreCommitFailed(reason=type(error).__name__, problem=f"{type(error).__name__}: {error}") from error
        left = list(meta_tensors(skeleton))
        if left:
            raise RestoreCommitFailed(reason="meta", problem=f"still without bytes: {_some(left)}")
        return Restored(bound=tuple(values), bytes=manifest.tensor_bytes)


def plan_restore(skeleton: torch.nn.Module, lease: HostWeightLease) -> RestorePlan:
    """Check that the artifact fits the skeleton; nothing is changed.

    Raises:
        RestorePreflightFailed: names, shapes, dtypes or meta tensors that would stay.
    """
    manifest = lease.manifest
    entries = {entry.name: entry for entry in manifest.tensors}
    offered = {**entries, **{alias: entries[name] for alias, name in manifest.aliases.items()}}
    wanted = {name: (kind, tensor) for name, kind, tensor in held_tensors(skeleton)}
    _refuse("missing", "the artifact lacks", sorted(set(wanted) - set(offered)))
    _refuse("unexpected", "the model has no place for", sorted(set(offered) - set(wanted)))
    _refuse("shape", "another shape", [n for n, (_, t) in wanted.items() if tuple(t.shape) != offered[n].shape])
    _refuse("kind", "parameter in one, buffer in the other", [n for n, (kind, _) in wanted.items() if kind is not offered[n].kind])
    _refuse("dtype", "a dtype that this torch does not have", [n for n, e in offered.items() if dtype_of(e.dtype) is None])
    bound = {id(tensor) for _, tensor in wanted.values()}
    stay = [name for name in meta_tensors(skeleton) if name not in wanted and id(_find(skeleton, name)) not in bound]
    _refuse("meta", "would stay without bytes", stay)
    return RestorePlan(skeleton, lease)


def unbind(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Replace what refers to a lease's memory by meta tensors; using the module afterwards is an error, not a segmentation fault."""
    wanted = set(names)
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is not None and (f"{prefix}.{name}" if prefix else name) in wanted:
                    empty = torch.empty_like(value, device="meta")
                    table[name] = (
                        torch.nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, torch.nn.Parameter) else empty
                    )


def tensor_of(lease: HostWeightLease, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor over the lease's memory; it keeps the mapping from being closed as long as it lives."""
    dtype = dtype_of(entry.dtype)
    assert dtype is not None, "checked by plan_restore"
    count = math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)  # nothing to map
    _silence_once()
    return torch.frombuffer(lease.view(entry.name), dtype=dtype, count=count).view(entry.shape)


def _value(lease: HostWeightLease, entry: TensorEntry) -> torch.Tensor:
    tensor = tensor_of(lease, entry)
    if entry.kind is not TensorKind.PARAMETER:
        return tensor
    # requires_grad is the skeleton's; load_state_dict sets it on what it assigns. Integers cannot have a gradient.
    return torch.nn.Parameter(tensor, requires_grad=tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _silence_once() -> None:
    """torch warns once a process that a buffer is read-only; here that is the point."""
    global _warned
    if not _warned:
        with _warning_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.frombuffer(memoryview(b"\0"), dtype=torch.uint8)
            _warned = True


def _find(module: torch.nn.Module, name: str) -> object:
    *path, last = name.split(".")
    part: object = module
    for step in path:
        part = getattr(part, step)
    return getattr(part, last, None)


def _refuse(reason: str, what: str, names: list[str]) -> None:
    if names:
        raise RestorePreflightFailed(reason=reason, problem=f"{what} ({len(names)}): {_some(names)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
