"""From a model to a store and back, as the runtime does it; and the modules that make it hard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from store_artifacts import find, identity
from torch import nn

from hwr.loader.plan import LayoutPlan
from hwr.loader.producer import finalized_model
from hwr.loader.restore import plan_restore, unbind
from hwr.outcomes import PublicationOutcome
from hwr.store.domain import Domain
from hwr.store.lease import HostWeightLease
from hwr.store.publish import publish

AS_LOADED = LayoutPlan()


def published(domain: Domain, module: nn.Module, plan: LayoutPlan = AS_LOADED, name: str = "a") -> None:
    produced = finalized_model(module, plan)
    done = publish(domain, identity(name), produced.tensors, aliases=produced.aliases)
    assert done.outcome is PublicationOutcome.PUBLISHED, done.failure


def leased(domain: Domain, name: str = "a") -> HostWeightLease:
    lease = find(domain, name).lease
    assert lease is not None
    return lease


@contextmanager
def warm(domain: Domain, skeleton: nn.Module, name: str = "a") -> Iterator[nn.Module]:
    """The skeleton with the store's weights; afterwards everything is let go of."""
    lease = leased(domain, name)
    restored = plan_restore(skeleton, lease).commit()
    try:
        yield skeleton
    finally:
        unbind(skeleton, restored.bound)
        lease.close()


def bits(value: torch.Tensor) -> bytes:
    return bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist())


def same_state(one: nn.Module, other: nn.Module) -> None:
    """Every tensor of both, persistent or not, is bit-equal under the same name."""
    for table in ("named_parameters", "named_buffers"):
        mine, theirs = (dict(getattr(module, table)(remove_duplicate=False)) for module in (one, other))
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype, name
            assert value.shape == theirs[name].shape, name
            assert value.requires_grad == theirs[name].requires_grad, name
            assert bits(value) == bits(theirs[name]), name


def output(module: nn.Module, *inputs: Any, **named: Any) -> list[bytes]:
    with torch.no_grad():
        told = module(*inputs, **named)
    if isinstance(told, torch.Tensor):
        return [bits(told)]
    values = told.to_tuple() if hasattr(told, "to_tuple") else tuple(told)
    return [bits(value) for value in values if isinstance(value, torch.Tensor)]


class Marked(nn.Parameter):
    """A parameter of a library's own class, with marks."""


class Everything(nn.Module):
    """Whatever a module may hold: every kind of buffer, plain tensors, tied, frozen, marked and scalar parameters, lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.LSTM(8, 4)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.marked = Marked(torch.randn(8))
        self.marked.loader = "mine"  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(2, 0))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("gone", None)
        self.plain = torch.arange(8.0)
        self.listed = [self.marked, self.frozen]
        self.named = {"marked": self.marked, "pair": (self.scalar, torch.ones(8))}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.marked, Marked)
        hidden = self.norm(self.embedding(ids)) * self.scale + self.table + self.plain + self.marked * self.frozen * self.scalar
        hidden = hidden + sum(self.listed) * self.named["pair"][0] * self.named["pair"][1]  # type: ignore[index, operator]
        hidden = hidden + torch.cat([self.rnn(hidden)[0]] * 2, dim=-1) * self.steps
        return self.head(hidden)  # type: ignore[no-any-return]


def everything() -> nn.Module:
    """Built with other random weights every time."""
    module = Everything().eval()
    with torch.no_grad():
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 1.5)
    return module


def built_by(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()
