"""A callable that builds the module: ordinary loading by name, and an identity that tells builders apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loader_models import built_by, everything, output, published, same_state, warm
from safetensors.torch import save_file, save_model
from torch import nn

from hwr import telemetry
from hwr.errors import CanonicalLoadFailed, SourceRejected
from hwr.loader.factory import CallableFactory, as_factory
from hwr.store.domain import Domain
from hwr.telemetry import events as E

IDS = torch.tensor([1, 2, 3, 10])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What `save_model` writes of a module with tied weights: one name of a pair is left out."""
    save_model(built_by(everything), str(tmp_path / "model.safetensors"))
    return tmp_path


def test_cold_and_warm_are_the_saved_module(checkpoint: Path, domain: Domain) -> None:
    """T1, tied weights included, which the checkpoint holds under one name."""
    original = built_by(everything)
    factory = CallableFactory(everything)
    cold = factory.canonical(checkpoint, None)
    same_state(original, cold)
    published(domain, cold)
    with warm(domain, factory.skeleton()) as module:
        same_state(original, module)
        assert output(original, IDS) == output(module, IDS)


def test_a_buffer_that_the_module_builds_itself_is_ignored_and_told(tmp_path: Path) -> None:
    original = built_by(everything)
    state = {name: value.clone() for name, value in original.state_dict().items()}
    save_file({**state, "table": torch.zeros(8)}, tmp_path / "model.safetensors")
    with telemetry.record() as told:
        module = CallableFactory(everything).canonical(tmp_path, None)
    assert [event.names for event in told.of(E.BuffersIgnored)] == [("table",)]
    same_state(original, module)


def less(state: dict[str, torch.Tensor]) -> None:
    del state["frozen"]


def more(state: dict[str, torch.Tensor]) -> None:
    state["unknown"] = torch.zeros(3)


def wider(state: dict[str, torch.Tensor]) -> None:
    state["frozen"] = torch.zeros(9)


@pytest.mark.parametrize(("change", "named"), [(less, "frozen"), (more, "unknown"), (wider, "frozen")])
def test_a_checkpoint_of_another_module_is_a_typed_refusal(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    state = {name: value.clone() for name, value in built_by(everything).state_dict().items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CanonicalLoadFailed, match=named):
        CallableFactory(everything).canonical(tmp_path, None)


def test_a_directory_without_weights_is_refused_for_its_own_reason(tmp_path: Path) -> None:
    with pytest.raises(SourceRejected, match="no safetensors weights"):
        CallableFactory(everything).canonical(tmp_path, None)


def test_builders_of_one_name_that_build_something_else_are_told_apart() -> None:
    """Two closures have one name; what one publishes in float32 is not what the other would load in bfloat16."""

    def builder(dtype: torch.dtype, width: int = 3) -> Callable[[], nn.Module]:
        return lambda: nn.Linear(width, 3, dtype=dtype)

    first, again, other, wider = (
        CallableFactory(builder(*arguments)) for arguments in ((torch.float32,), (torch.float32,), (torch.bfloat16,), (torch.float32, 4))
    )
    assert first.name == other.name
    assert first.metadata == again.metadata
    assert len({str(factory.metadata) for factory in (first, other, wider)}) == 3


def test_looking_at_a_builder_costs_one_building_of_the_skeleton() -> None:
    built: list[int] = []

    def build() -> nn.Module:
        built.append(1)
        return nn.Linear(3, 3)

    factory = CallableFactory(build)
    _ = factory.metadata, factory.metadata
    first, second = factory.skeleton(), factory.skeleton()
    assert first is not second
    assert len(built) == 2


def test_a_callable_is_wrapped_and_a_factory_is_taken_as_it_is() -> None:
    factory = CallableFactory(everything)
    assert as_factory(factory) is factory
    assert isinstance(as_factory(everything), CallableFactory)
    assert as_factory(nn.Identity).name == "torch.nn.modules.linear.Identity"
