"""Bit for bit what stock loading gives: tied weights, non-persistent buffers, shards, and modules that are nobody's library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_processes import Forge
from e2e_stores import Store

# Stock loading and ours in one process, tensor by tensor: held tensors, non-persistent buffers, ties, modes, and a forward pass.
COMPARE = """
import json, sys
import torch, transformers, hwr
from hwr.cli.synthetic import synthetic_input
from hwr.loader.factory import PretrainedFactory
model, root, name = sys.argv[1:4]

def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)

def everything(module):
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return {name: value for name, value in held.items()}

stock = getattr(transformers, name).from_pretrained(model).eval()
options = hwr.Options.of(host_weight_runtime_mode="preferred", host_weight_runtime_root=root)
with hwr.load(PretrainedFactory(model), model, options) as loaded:
    ours = loaded.module
    a, b = everything(stock), everything(ours)
    told = {
        "outcome": loaded.report.outcome,
        "names": sorted(a) == sorted(b),
        "different": [n for n in a if a[n].dtype != b[n].dtype or a[n].shape != b[n].shape or not torch.equal(bits(a[n]), bits(b[n]))],
        "buffers": sum(1 for _ in ours.named_buffers()),
        "persistent": sum(n in ours.state_dict() for n, _ in ours.named_buffers()),
        "ties": [[x for x in m if m[x] is m["model.embed_tokens.weight"]] if "model.embed_tokens.weight" in m else [] for m in (a, b)],
        "training": [stock.training, ours.training],
        "gradients": [n for n, p in ours.named_parameters() if p.requires_grad != dict(stock.named_parameters())[n].requires_grad],
        "class": [type(stock).__name__, type(ours).__name__],
        "generation": None,
    }
    with torch.no_grad():
        inputs = synthetic_input(stock)
        told["forward"] = torch.equal(bits(stock(**inputs)[0]), bits(ours(**inputs)[0]))
    if stock.can_generate():
        told["generation"] = ours.generation_config.to_dict() == stock.generation_config.to_dict()
    del a, b, ours
print(json.dumps(told))
"""


@pytest.mark.parametrize(("which", "name"), [("minilm", "BertModel"), ("tiny", "LlamaForCausalLM")])
def test_cold_and_warm_are_stock_loading_bit_for_bit(
    request: pytest.FixtureRequest, forge: Forge, tmp_path: Path, which: str, name: str
) -> None:
    model: Path = request.getfixturevalue(which)
    root = tmp_path / "store"
    for outcome in ("canonical_fallback", "local_hit"):
        done = forge.python(COMPARE, model, root, name)
        assert done.rc == 0, done.err
        told = json.loads(done.out)
        assert told["outcome"] == outcome
        assert told["names"]
        assert told["different"] == told["gradients"] == []
        assert told["forward"]
        assert told["training"] == [False, False]
        assert told["class"] == [name, name]
        assert told["ties"][0] == told["ties"][1]
        assert told["persistent"] < told["buffers"], "a model with non-persistent buffers"
        if name == "LlamaForCausalLM":
            assert told["ties"][1] == ["model.embed_tokens.weight", "lm_head.weight"]
            assert told["generation"]
    Store(root).remove()


def test_the_command_says_the_same_digest_for_every_way_of_loading(forge: Forge, tiny: Path, tiny_published: Store) -> None:
    digests = {}
    for mode in ("disabled", "preferred", "required"):
        done = forge.hwr("run", tiny, "--mode", mode, "--root", tiny_published.root, "--json", "--steps", 2)
        assert done.rc == 0, done.err
        digests[done.report["outcome"]] = done.report["output_sha256"]
    assert set(digests) == {"canonical_direct", "local_hit"}
    assert len(set(digests.values())) == 1


def test_disabled_touches_nothing(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    """F4: no root, no lock, no digest, whatever else is set."""
    done = forge.hwr("run", tiny, "--root", tmp_path / "store", "--validation", "full_checksum", "--json")
    assert done.rc == 0, done.err
    assert done.report["outcome"] == "canonical_direct"
    assert not (tmp_path / "store").exists()
    assert done.state.resolutions == {"canonical_direct|disabled": 1}
    assert [name for name in done.state.events if name.startswith(("hwr.store.", "hwr.validation.", "hwr.checkpoint."))] == []


# Modules of one's own: what the ordinary load can do, no failure of the store may prevent (F2).
OWN = """
import json, sys
import torch, hwr
from pathlib import Path
from safetensors.torch import save_file
kind, root = sys.argv[1:3]
directory = Path(root).parent / "own"
directory.mkdir(exist_ok=True)

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.scale

class Reads(Plain):
    "Its constructor looks at a value of a parameter, which a skeleton does not have."

    def __init__(self):
        super().__init__()
        self.start = float(self.linear.weight.detach().sum())

torch.manual_seed(3)
weights = {"linear.weight": torch.randn(4, 4), "linear.bias": torch.randn(4)}
if not (directory / "model.safetensors").exists():
    save_file(weights, str(directory / "model.safetensors"))

def spoil(module):
    if kind == "sparse":
        module.linear.weight = torch.nn.Parameter(module.linear.weight.detach().to_sparse())

build = Reads if kind == "reads" else Plain
adaptation = hwr.AdaptedWeights(kind, kind, spoil) if kind == "sparse" else None
options = hwr.Options.of(host_weight_runtime_mode="preferred", host_weight_runtime_root=root)
with hwr.load(build, directory, options, adaptation=adaptation) as loaded:
    report = loaded.report
    with torch.no_grad():
        dense = loaded.module.linear.weight.detach().to_dense()
        right = torch.equal(dense, weights["linear.weight"]) and torch.equal(loaded.module.linear.bias, weights["linear.bias"])
    told = {"outcome": report.outcome, "publication": report.publication, "right": right}
    told["attempts"] = [attempt.failure.code for attempt in report.attempts if attempt.failure]
    told["why"] = report.publication_failure and report.publication_failure.code
    del dense
print(json.dumps(told))
"""


def own(forge: Forge, kind: str, root: Path) -> dict[str, object]:
    done = forge.python(OWN, kind, root)
    assert done.rc == 0, done.err
    told: dict[str, object] = json.loads(done.out)
    assert told.pop("right")
    return told


def test_any_module_is_loaded_by_a_callable(forge: Forge, tmp_path: Path) -> None:
    cold, warm = own(forge, "plain", tmp_path / "store"), own(forge, "plain", tmp_path / "store")
    assert cold == {"outcome": "canonical_fallback", "publication": "published", "attempts": [], "why": None}
    assert warm == {"outcome": "local_hit", "publication": None, "attempts": [], "why": None}


def test_a_constructor_that_needs_values_is_loaded_the_ordinary_way(forge: Forge, tmp_path: Path) -> None:
    """It has no skeleton, so that nothing of it can be restored: it is not stored either."""
    told = own(forge, "reads", tmp_path / "store")
    assert told == {"outcome": "canonical_fallback", "publication": None, "attempts": ["restore_preflight_failed"], "why": None}


def test_a_tensor_that_has_no_bytes_of_its_own_costs_the_publication_only(forge: Forge, tmp_path: Path) -> None:
    told = own(forge, "sparse", tmp_path / "store")
    assert told == {"outcome": "canonical_fallback", "publication": "failed", "attempts": [], "why": "producer_unsupported"}
    assert Store(tmp_path / "store").temporary == []


UNREADABLE = """
import json, sys
import hwr
from hwr.loader.factory import PretrainedFactory

class Factory(PretrainedFactory):
    def skeleton(self):
        raise OSError(5, "Input/output error", "/models/vocabulary")

options = hwr.Options.of(host_weight_runtime_mode=sys.argv[3], host_weight_runtime_root=sys.argv[2])
try:
    with hwr.load(Factory(sys.argv[1]), sys.argv[1], options) as loaded:
        print(json.dumps(loaded.report.to_json()))
except RuntimeError as error:
    print(json.dumps(str(error)))
"""


def test_an_error_of_the_system_that_nobody_named_does_not_stop_an_ordinary_load(forge: Forge, tiny: Path, tiny_published: Store) -> None:
    preferred = forge.python(UNREADABLE, tiny, tiny_published.root, "preferred")
    assert preferred.rc == 0, preferred.err
    assert preferred.report["outcome"] == "canonical_fallback"
    assert preferred.journal.failures() == ["store_io"]
    required = forge.python(UNREADABLE, tiny, tiny_published.root, "required")
    assert required.rc == 0, required.err
    assert json.loads(required.out).startswith("Host Weight Runtime resolution failed: /models/vocabulary: ")
    # The lease that was open by then is closed in both.
    for done in (preferred, required):
        assert (done.state.lease_acquisitions, done.state.leases) == (1, {})
