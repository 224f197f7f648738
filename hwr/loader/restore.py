"""Restoring: bind the views of a lease to a model skeleton.

Owns the plan, which only looks, and its commit, which is the one mutation. Promises zero-copy on the CPU, but for small buffers (T1),
that a failing plan leaves the skeleton untouched (T2), and that no meta tensor is left anywhere (T3). Refuses artifacts that do not fit,
before anything is touched.
"""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from hwr.errors import RestoreCommitFailed, RestorePreflightFailed
from hwr.loader.dtypes import dtype_of
from hwr.loader.producer import held_tensors, other_state
from hwr.loader.skeleton import meta_tensors, parameter_like, replace_references
from hwr.store.lease import HostWeightLease
from hwr.store.manifest import TensorEntry

NAMES_SHOWN: Final = 3
COPIED_BUFFER_BYTES: Final = 1 << 20
_warning_lock = threading.Lock()
_warned = False


@dataclass(frozen=True, slots=True)
class Restored:
    """What a commit did; `bound` are the module's names that now refer to the lease's memory."""

    bound: tuple[str, ...]
    bytes: int
    copied_bytes: int


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
        old = {name: tensor for name, _, tensor in held_tensors(skeleton)}
        try:
            values: dict[str, torch.Tensor] = {entry.name: _value(self._lease, entry, old[entry.name]) for entry in manifest.tensors}
            # The same object under both names: load_state_dict keeps a tie only then.
            values.update({alias: values[name] for alias, name in manifest.aliases.items()})
            skeleton.load_state_dict(values, strict=True, assign=True)
            replace_references(skeleton, {id(tensor): values[name] for name, tensor in old.items()})
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise RestoreCommitFailed(reason=type(error).__name__, problem=f"{type(error).__name__}: {error}") from error
        left = [name for name, _ in meta_tensors(skeleton)]
        if left:
            raise RestoreCommitFailed(reason="meta", problem=f"still without bytes: {_some(left)}")
        copied = sum(entry.nbytes for entry in manifest.tensors if _is_copied(entry, old[entry.name]))
        return Restored(bound=tuple(values), bytes=manifest.tensor_bytes, copied_bytes=copied)


def plan_restore(skeleton: torch.nn.Module, lease: HostWeightLease) -> RestorePlan:
    """Check that the artifact fits the skeleton; nothing is changed.

    Raises:
        RestorePreflightFailed: names, shapes, dtypes or meta tensors that would stay.
    """
    manifest = lease.manifest
    entries = {entry.name: entry for entry in manifest.tensors}
    offered = {**entries, **{alias: entries[name] for alias, name in manifest.aliases.items()}}
    wanted = {name: (kind, tensor) for name, kind, tensor in held_tensors(skeleton)}
    _refuse("extra_state", "state that is no tensor", other_state(skeleton))
    _refuse("lazy", "not initialized", [n for n, (_, t) in wanted.items() if is_lazy(t)])
    _refuse("missing", "the artifact lacks", sorted(set(wanted) - set(offered)))
    _refuse("unexpected", "the model has no place for", sorted(set(offered) - set(wanted)))
    _refuse("shape", "another shape", [n for n, (_, t) in wanted.items() if tuple(t.shape) != offered[n].shape])
    _refuse("kind", "parameter in one, buffer in the other", [n for n, (kind, _) in wanted.items() if kind is not offered[n].kind])
    _refuse("dtype", "a dtype that this torch does not have", [n for n, e in offered.items() if dtype_of(e.dtype) is None])
    bound = {id(tensor) for _, tensor in wanted.values()}
    _refuse("meta", "would stay without bytes", [name for name, tensor in meta_tensors(skeleton) if id(tensor) not in bound])
    return RestorePlan(skeleton, lease)


def unbind(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Replace what refers to a lease's memory by meta tensors; using the module afterwards is an error, not a segmentation fault."""
    wanted = set(names)
    replaced: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []  # an id is worth something only while its object lives
    for prefix, part in module.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is not None and (f"{prefix}.{name}" if prefix else name) in wanted:
                    empty = torch.empty_like(value, device="meta")
                    made = parameter_like(value, empty.detach()) if isinstance(value, torch.nn.Parameter) else empty
                    table[name] = replaced[id(value)] = made
                    keep.append(value)
    replace_references(module, replaced)


def tensor_of(lease: HostWeightLease, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor over the lease's memory; it keeps the mapping from being closed as long as it lives."""
    dtype = dtype_of(entry.dtype)
    assert dtype is not None, "checked by plan_restore"
    count = math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)  # nothing to map
    _silence_once()
    return torch.frombuffer(lease.view(entry.name), dtype=dtype, count=count).view(entry.shape)


def _value(lease: HostWeightLease, entry: TensorEntry, old: torch.Tensor) -> torch.Tensor:
    tensor = tensor_of(lease, entry)
    if _is_copied(entry, old):
        return tensor.clone()
    return parameter_like(old, tensor) if isinstance(old, torch.nn.Parameter) else tensor


def _is_copied(entry: TensorEntry, old: torch.Tensor) -> bool:
    """Small buffers are the model's own: counters and running statistics are written in a forward pass, weights are not."""
    return not isinstance(old, torch.nn.Parameter) and entry.nbytes <= COPIED_BUFFER_BYTES


def _silence_once() -> None:
    """torch warns once a process that a buffer is read-only; here that is the point."""
    global _warned
    if not _warned:
        with _warning_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.frombuffer(memoryview(b"\0"), dtype=torch.uint8)
            _warned = True


def _refuse(reason: str, what: str, names: list[str]) -> None:
    if names:
        raise RestorePreflightFailed(reason=reason, problem=f"{what} ({len(names)}): {_some(names)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
