"""Models that transformers and diffusers wrote: the warm one is bit-identical to stock loading (T1), in the dtypes people use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_models import output, published, same_state, warm
from torch import nn

from hwr.checkpoint.digest_cache import source_digests
from hwr.checkpoint.source import open_source
from hwr.errors import CanonicalLoadFailed, RestorePreflightFailed
from hwr.loader.factory import PretrainedFactory
from hwr.loader.identity import compose_identity
from hwr.loader.plan import LayoutPlan
from hwr.loader.skeleton import meta_tensors
from hwr.store.domain import Domain

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.tensor([[1, 5, 9, 39]])


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SMALL))


def bert_masked() -> nn.Module:
    """Its decoder is tied to the embeddings, with the bias in two places."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def llama() -> nn.Module:
    """Rotary frequencies are non-persistent buffers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=32))


def llama_tied() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True))


def t5() -> nn.Module:
    """One embedding under three names; some layers stay in float32."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def inputs(module: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    match type(module).__name__:
        case "DiTTransformer2DModel":
            sample = torch.randn(1, 4, 8, 8, generator=generator).to(dtype)
            return {"hidden_states": sample, "timestep": torch.tensor([3]), "class_labels": torch.tensor([2])}
        case "UNet2DModel":
            return {"sample": torch.randn(1, 3, 8, 8, generator=generator).to(dtype), "timestep": 3}
        case "T5ForConditionalGeneration":
            return {"input_ids": IDS, "decoder_input_ids": IDS}
        case _:
            return {"input_ids": IDS}


MODELS: list[Callable[[], nn.Module]] = [bert, bert_masked, gpt2, llama, llama_tied, t5, dit, unet]


def saved(directory: Path, build: Callable[[], nn.Module], shard: str = "20KB") -> Path:
    torch.manual_seed(11)
    model: Any = build().eval()
    model.save_pretrained(directory, max_shard_size=shard, safe_serialization=True)
    return directory


def own_memory(module: nn.Module) -> None:
    """Move the weights to memory of torch's own alignment.

    Stock loading may leave them where the file has them, at any address; matrix kernels then sum in another order. This is the file's
    doing: the same stock model differs from itself after such a move.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_the_warm_model_is_the_stock_one(tmp_path: Path, domain: Domain, build: Callable[[], nn.Module], dtype: str) -> None:
    """T1: every parameter and buffer, persistent or not, and the forward pass."""
    directory = saved(tmp_path / "model", build)
    assert len(list(directory.glob("*.safetensors"))) > 1
    factory = PretrainedFactory(directory, dtype)
    cold = factory.canonical(directory, open_source(directory))
    published(domain, cold)
    skeleton = factory.skeleton()
    assert not any(name for name, tensor in meta_tensors(skeleton) if id(tensor) not in {id(p) for p in skeleton.parameters()})
    with warm(domain, skeleton) as model:
        same_state(cold, model)
        assert type(model) is type(cold)
        assert model.training is cold.training is False
        told = inputs(cold, getattr(torch, dtype))
        own_memory(cold)
        assert output(cold, **told) == output(model, **told)
        ties = {name for name, _ in cold.named_parameters(remove_duplicate=False)} - {name for name, _ in cold.named_parameters()}
        assert {name for name, _ in model.named_parameters(remove_duplicate=False)} - {name for name, _ in model.named_parameters()} == ties


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_generation_settings_come_along(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", llama)
    settings = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps({**settings, "max_new_tokens": 17}))
    skeleton: Any = PretrainedFactory(directory).skeleton()
    assert skeleton.generation_config.max_new_tokens == 17


def test_class_and_dtype_are_the_directory_s_own(tmp_path: Path) -> None:
    """`architectures` first, then the bare class of its model type; config's dtype unless one is asked for."""
    directory = saved(tmp_path / "model", bert_masked)
    assert PretrainedFactory(directory).name == "transformers.BertForMaskedLM"
    assert PretrainedFactory(directory).dtype == "float32"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "architectures": None}))
    assert PretrainedFactory(directory).name == "transformers.BertModel"
    assert PretrainedFactory(directory).dtype == "bfloat16"
    assert PretrainedFactory(directory, "float16").dtype == "float16"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "config"),
        ("{", "config"),
        ('{"architectures": ["NoSuchModel"], "auto_map": {"AutoModel": "evil.Model"}}', "class"),
        ('{"architectures": ["__version__"]}', "class"),
        ('{"model_type": "nothing"}', "class"),
        ('{"_class_name": "NoSuchModel"}', "class"),
        ('{"architectures": ["BertModel"], "dtype": "int8"}', "dtype"),
    ],
)
def test_what_cannot_be_a_model_is_a_typed_refusal(tmp_path: Path, config: str | None, reason: str) -> None:
    """Remote code is never run."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    for use in (lambda f: f.name, lambda f: f.skeleton(), lambda f: f.canonical(tmp_path, None)):
        with pytest.raises(CanonicalLoadFailed) as refused:
            use(PretrainedFactory(tmp_path))
        assert refused.value.reason == reason


def test_a_class_that_cannot_be_built_here_leaves_the_ordinary_way(tmp_path: Path) -> None:
    """A skeleton that fails is a preflight that fails: retryable."""
    directory = saved(tmp_path / "model", bert)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 17}))
    with pytest.raises(RestorePreflightFailed, match="no skeleton of transformers") as refused:
        PretrainedFactory(directory).skeleton()
    assert refused.value.retryable


def test_the_key_changes_with_what_changes_the_bytes_and_with_nothing_else(tmp_path: Path) -> None:
    """I1: another place, another spelling and another sharding give the same content; dtype, configuration and plan do not."""
    directory = saved(tmp_path / "model", bert)
    (tmp_path / "link").symlink_to(directory)

    def key(path: Path, dtype: str | None = None, plan: LayoutPlan | None = None) -> str:
        digests = source_digests(open_source(path), None)
        return compose_identity(PretrainedFactory(path, dtype), digests.content_ids, plan or LayoutPlan()).key

    first = key(directory)
    assert key(tmp_path / "link") == key(directory / ".." / "model") == key(directory, "float32") == first
    assert len({first, key(directory, "bfloat16"), key(directory, plan=LayoutPlan(cast="bfloat16"))}) == 3
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"hidden_dropout_prob": 0.1', '"hidden_dropout_prob": 0.2'))
    assert key(directory) != first
