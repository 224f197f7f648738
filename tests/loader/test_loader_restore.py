"""Restoring: T1 (zero-copy, bit-equal), T2 (a failing plan touches nothing), T3 (no meta tensor is left anywhere)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from loader_models import Everything, Marked, bits, built_by, everything, leased, output, published, same_state, warm
from store_artifacts import payload, run
from torch import nn

from hwr.errors import ActiveLease, ProducerUnsupported, RestoreCommitFailed, RestorePreflightFailed
from hwr.format import BYTE_DTYPE_BITS as DTYPE_BITS
from hwr.loader.dtypes import dtype_of
from hwr.loader.plan import LayoutPlan, Rename
from hwr.loader.producer import ModelTensor, finalized_model
from hwr.loader.restore import plan_restore, tensor_of, unbind
from hwr.loader.skeleton import build_skeleton, meta_tensors
from hwr.outcomes import TensorKind
from hwr.procfs.smaps import read_smaps
from hwr.store.domain import Domain

IDS = torch.tensor([1, 2, 3, 10])


def test_a_restored_module_is_the_published_one_bit_for_bit(domain: Domain) -> None:
    """T1: buffers of all kinds, tied weights, marks, an RNN's own list of its weights."""
    cold = built_by(everything)
    published(domain, cold)
    skeleton = build_skeleton(everything)
    with warm(domain, skeleton) as module:
        same_state(cold, module)
        assert output(cold, IDS) == output(module, IDS)
        assert isinstance(module, Everything)
        assert module.head.weight is module.embedding.weight
        assert type(module.marked) is Marked
        assert module.marked.loader == "mine"  # type: ignore[attr-defined]
        assert module.listed[0] is module.marked
        assert not list(meta_tensors(module))
        assert is_leased(domain, module.embedding.weight)
        assert not is_leased(domain, module.norm.running_mean)
        module.norm.running_mean.add_(1)  # a small buffer is the model's own: a forward pass in training writes it


def is_leased(domain: Domain, value: torch.Tensor) -> bool:
    """Whether it lies in a mapping of the payload, which is shared and read-only."""
    vmas = read_smaps("self")
    assert isinstance(vmas, tuple)
    (vma,) = (vma for vma in vmas if vma.start <= value.data_ptr() < vma.end)
    assert vma.pathname != str(payload(domain)) or vma.perms == "r--s"
    return vma.pathname == str(payload(domain))


def test_every_dtype_is_restored_bit_for_bit(domain: Domain) -> None:
    """T1."""
    module = nn.Module()
    for word in DTYPE_BITS:
        dtype = dtype_of(word)
        assert dtype is not None
        raw = torch.randint(0, 2 if word == "BOOL" else 256, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        module.register_buffer(f"b_{word}", raw.view(2, 3))
        if dtype.is_floating_point or dtype.is_complex:
            module.register_parameter(f"p_{word}", nn.Parameter(raw.clone()))
    published(domain, module)
    with warm(domain, meta_like(module)) as restored:
        same_state(module, restored)


def meta_like(module: nn.Module) -> nn.Module:
    """A skeleton of a module without submodules."""
    skeleton = nn.Module()
    for name, buffer in module.named_buffers():
        skeleton.register_buffer(name, torch.zeros_like(buffer))
    for name, parameter in module.named_parameters():
        skeleton.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad))
    return skeleton


def odd_memory() -> dict[str, torch.Tensor]:
    base = torch.randn(64, 48, dtype=torch.complex64)
    return {
        "transposed": torch.randn(30, 50).t(),
        "strided": torch.randn(100)[::3],
        "expanded": torch.randn(1, 7).expand(5, 7),
        "inner": torch.randn(9, 9)[2:5, 3:8],
        "conjugate": base.conj(),
        "negative": base.conj().imag,
        "base": base,
        "real": base.real,
        "large": torch.randn(3, 1200, 1000).permute(2, 0, 1),
        "long row": torch.randn(2, 3_000_000)[:, ::2],
        "scalar": torch.randn(3)[1],
        "float8": torch.randn(40, 6).to(torch.float8_e4m3fn).t(),
    }


@pytest.mark.parametrize("cast", [None, "bfloat16", "float64"])
def test_memory_of_any_kind_is_published_as_its_values(domain: Domain, cast: str | None) -> None:
    """Views, transposed, conjugated and negated ones; nothing of them is taken for tied."""
    module = nn.Module()
    for name, value in odd_memory().items():
        module.register_buffer(name.replace(" ", "_"), value)
    produced = finalized_model(module, LayoutPlan(cast=cast))
    assert not produced.aliases
    published(domain, module, LayoutPlan(cast=cast))
    lease = leased(domain)
    for entry in lease.tensors():
        value = dict(module.named_buffers())[entry.name]
        expected = value.to(getattr(torch, cast)) if cast and value.dtype.is_floating_point else value
        restored = tensor_of(lease, entry)
        assert restored.dtype == expected.dtype
        assert bits(restored) == bits(expected.resolve_conj().resolve_neg()), entry.name
        del restored
    lease.close()


def test_what_is_tied_is_written_once_and_what_only_overlaps_is_not_tied(domain: Domain) -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.randn(4, 4))
    module.b = module.a
    module.register_buffer("seen_as_buffer", module.a.detach())
    module.register_buffer("part", module.a.detach()[:2])
    module.register_buffer("turned", module.a.detach().t())
    produced = finalized_model(module, LayoutPlan())
    assert produced.aliases == {"b": "a"}
    assert {tensor.name for tensor in produced.tensors} == {"a", "seen_as_buffer", "part", "turned"}
    published(domain, module)
    with warm(domain, build_skeleton(lambda: again(module))) as restored:
        assert restored.a is restored.b
        same_state(module, restored)


def again(module: nn.Module) -> nn.Module:
    made = nn.Module()
    made.a = nn.Parameter(torch.zeros(4, 4))
    made.b = made.a
    for name, buffer in module.named_buffers():
        made.register_buffer(name, torch.zeros(buffer.shape))
    return made


def test_renames_and_casts_are_done_on_the_way(domain: Domain) -> None:
    """The artifact has the final names and dtypes; integers are not cast."""
    module = nn.Module()
    module.old = nn.Parameter(torch.randn(5, 3))
    module.register_buffer("count", torch.tensor(3))
    plan = LayoutPlan(name="renamed", cast="bfloat16", renames=(Rename("old", "new"),))
    published(domain, module, plan)
    skeleton = nn.Module()
    skeleton.new = nn.Parameter(torch.empty(5, 3, device="meta"))
    skeleton.register_buffer("count", torch.tensor(0))
    with warm(domain, skeleton) as restored:
        assert restored.new.dtype is torch.bfloat16
        assert bits(restored.new) == bits(module.old.to(torch.bfloat16))
        assert restored.count.dtype is torch.int64
        assert restored.count.item() == 3


def test_plans_say_no_more_than_they_do() -> None:
    assert LayoutPlan().fingerprint == LayoutPlan().fingerprint
    assert len({LayoutPlan().fingerprint, LayoutPlan(cast="float16").fingerprint, LayoutPlan(name="x").fingerprint}) == 3
    with pytest.raises(ValueError, match="cast to 'int8'"):
        LayoutPlan(cast="int8")
    with pytest.raises(ValueError, match="one name"):
        LayoutPlan(renames=(Rename("a", "c"), Rename("b", "c")))


# T2 ---------------------------------------------------------------------------------------------------------------


def another_shape(module: nn.Module) -> None:
    module.scale = torch.zeros(9)


def one_more(module: nn.Module) -> None:
    module.more = nn.Parameter(torch.empty(3, device="meta"))


def one_less(module: nn.Module) -> None:
    del module.frozen


def another_kind(module: nn.Module) -> None:
    del module.frozen
    module.register_buffer("frozen", torch.zeros(8))


def meta_buffer(module: nn.Module) -> None:
    module.register_buffer("table", torch.empty(8, device="meta"), persistent=False)


def meta_attribute(module: nn.Module) -> None:
    module.plain = torch.empty(8, device="meta")


def meta_in_a_list(module: nn.Module) -> None:
    module.rnn.cache = {"deep": [(torch.empty(8, device="meta"),)]}


def meta_derived(module: nn.Module) -> None:
    module.plain = module.frozen * 2


def lazy(module: nn.Module) -> None:
    module.more = nn.LazyLinear(3)


class WithState(nn.Module):
    def get_extra_state(self) -> object:
        return {"not": "a tensor"}

    def set_extra_state(self, state: object) -> None:
        pass


def extra_state(module: nn.Module) -> None:
    module.more = WithState()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("spoil", "reason", "named"),
    [
        (another_shape, "shape", "scale"),
        (one_more, "missing", "more"),
        (one_less, "unexpected", "frozen"),
        (another_kind, "kind", "frozen"),
        (meta_buffer, "meta", "table"),
        (meta_attribute, "meta", "plain"),
        (meta_in_a_list, "meta", "rnn.cache"),
        (meta_derived, "meta", "plain"),
        (lazy, "lazy", "more"),
        (extra_state, "extra_state", "more._extra_state"),
    ],
)
def test_a_plan_that_does_not_fit_leaves_the_skeleton_untouched(
    domain: Domain, spoil: Callable[[nn.Module], None], reason: str, named: str
) -> None:
    """T2, T3: refused before anything is bound, with the name; and the lease can be closed at once."""
    published(domain, built_by(everything))
    skeleton = build_skeleton(everything)
    spoil(skeleton)
    tables = [(part._parameters, part._buffers) for part in skeleton.modules()]
    before = [(dict(parameters), dict(buffers)) for parameters, buffers in tables]
    lease = leased(domain)
    with pytest.raises(RestorePreflightFailed, match=named) as refused:
        plan_restore(skeleton, lease)
    assert refused.value.reason == reason
    assert refused.value.retryable
    for (parameters, buffers), (old_parameters, old_buffers) in zip(tables, before, strict=True):
        assert all(parameters[name] is old_parameters[name] for name in old_parameters)
        assert all(buffers[name] is old_buffers[name] for name in old_buffers)
    lease.close()


def test_a_plan_is_committed_once(domain: Domain) -> None:
    published(domain, built_by(everything))
    skeleton = build_skeleton(everything)
    lease = leased(domain)
    plan = plan_restore(skeleton, lease)
    restored = plan.commit()
    with pytest.raises(RestoreCommitFailed, match="already"):
        plan.commit()
    with pytest.raises(ActiveLease):
        lease.close()
    unbind(skeleton, restored.bound)
    lease.close()
    with pytest.raises((NotImplementedError, RuntimeError)):  # an error, and no segmentation fault
        output(skeleton, IDS)


def test_what_has_no_bytes_or_no_word_is_not_published() -> None:
    module = nn.Module()
    cases = {
        "meta": nn.Parameter(torch.empty(3, device="meta")),
        "dtype": nn.Parameter(torch.zeros(3, dtype=torch.complex128)),
        "layout": nn.Parameter(torch.eye(3).to_sparse()),
    }
    for reason, parameter in cases.items():
        module.only = parameter
        with pytest.raises(ProducerUnsupported, match="only") as refused:
            finalized_model(module, LayoutPlan())
        assert refused.value.reason == reason
    module = nn.Module()
    module.part = WithState()
    with pytest.raises(ProducerUnsupported, match="_extra_state"):
        finalized_model(module, LayoutPlan())


# The skeleton ------------------------------------------------------------------------------------------------------


def test_a_skeleton_has_real_buffers_and_parameters_without_memory() -> None:
    skeleton = build_skeleton(everything)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert not any(buffer.is_meta for buffer in skeleton.buffers())
    assert isinstance(skeleton, Everything)
    assert bits(skeleton.table) == bits(torch.linspace(0, 1, 8))
    assert bits(skeleton.plain) == bits(torch.arange(8.0))
    assert skeleton.head.weight is skeleton.embedding.weight
    assert type(skeleton.marked) is Marked
    assert not skeleton.frozen.requires_grad


_BUILDS = """
import os
from torch import nn
from hwr.loader.skeleton import build_skeleton
from hwr.procfs.status import read_status
before = read_status(os.getpid()).rss_anon
skeleton = build_skeleton(lambda: nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(32)]))
print(read_status(os.getpid()).rss_anon - before, sum(p.numel() for p in skeleton.parameters()) * 4)
"""


def test_a_skeleton_takes_no_parameter_memory() -> None:
    grown, held = map(int, run(_BUILDS).split())
    assert held >= 512 << 20
    assert grown < 8 << 20


def test_the_hook_leaves_a_model_of_another_thread_alone() -> None:
    other: list[nn.Module] = []

    def build() -> nn.Module:
        thread = threading.Thread(target=lambda: other.append(nn.Linear(3, 3)))
        thread.start()
        thread.join()
        return nn.Linear(3, 3)

    assert build_skeleton(build).weight.is_meta
    assert not other[0].weight.is_meta
    assert not nn.Linear(3, 3).weight.is_meta


def test_a_builder_that_fails_takes_the_hook_with_it() -> None:
    with pytest.raises(ZeroDivisionError):
        build_skeleton(lambda: 1 // 0)
    assert not nn.Linear(3, 3).weight.is_meta


def test_a_block_of_a_view_is_the_tensor_s_own_memory() -> None:
    """No byte is copied that is final already; and the view keeps the tensor alive."""
    value = torch.arange(100.0)
    (block,) = ModelTensor("x", TensorKind.PARAMETER, "F32", (100,), value).blocks()
    value[3] = 7
    expected = bits(value)
    del value
    assert bytes(block) == expected
    assert not list(ModelTensor("x", TensorKind.PARAMETER, "F32", (0,), torch.empty(0)).blocks())


def test_three_made_blocks_live_at_once() -> None:
    """W3: one is written, one waits, one is hashed; none of them is overwritten by a later one meanwhile."""
    value = torch.arange(9_000_000)  # in blocks of 4 MiB of float32
    blocks = ModelTensor("x", TensorKind.PARAMETER, "F32", (len(value),), value).blocks()
    first, second, third = (next(blocks) for _ in range(3))
    for number, block in enumerate((first, second, third)):
        begin = number * len(first) // 4
        assert bytes(block) == value[begin : begin + len(block) // 4].float().numpy().tobytes()


def test_the_forward_pass_of_odd_widths_is_bit_identical(domain: Domain) -> None:
    """T1, W1: a matrix kernel sums in another order over memory that is aligned less than torch's own; one row shows it."""
    for seed in range(8):
        torch.manual_seed(seed)
        widths = (4 * torch.randint(1, 12, (6,)) + 1).tolist()

        def build(widths: list[int] = widths) -> nn.Module:
            return nn.Sequential(*[nn.Linear(*pair) for pair in itertools.pairwise(widths)]).eval()

        cold = build()
        published(domain, cold, name=f"odd {seed}")
        with warm(domain, build_skeleton(build), f"odd {seed}") as module:
            row = torch.randn(1, widths[0])
            assert output(cold, row) == output(module, row)
