"""The MiniLM checkpoint, a small sharded one, stores published once, and processes to use them in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_standin import foundry, standin  # noqa: F401  (fixtures)
from e2e_processes import Forge, Programs
from e2e_stores import Store, copy_model, remove

from hwr.cli.demo import model_directory

# A language model with tied weights, rotary frequencies that are non-persistent buffers, and a checkpoint of several shards.
_TINY = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(7)
config = LlamaConfig(
    vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
model.save_pretrained(sys.argv[1], max_shard_size="100KB")
"""


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Forks of one interpreter that has imported everything."""
    one = Forge(tmp_path_factory.mktemp("forge"))
    yield one
    one.close()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Fresh interpreters."""
    one = Programs(tmp_path)
    yield one
    one.close()


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the MiniLM checkpoint that nobody else reads or maps."""
    target = copy_model(model_directory(), tmp_path_factory.mktemp("minilm") / "model")
    yield target
    remove(target)


@pytest.fixture(scope="session")
def minilm_published(tmp_path_factory: pytest.TempPathFactory, forge: Forge, minilm: Path) -> Iterator[Store]:
    """MiniLM's store; copy it before anything is changed."""
    store = Store(tmp_path_factory.mktemp("published") / "minilm")
    done = forge.hwr("publish", minilm, "--root", store.root, "--quiet")
    assert done.rc == 0, done.err
    yield store
    store.remove()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """A sharded checkpoint of a few hundred kilobytes."""
    target = tmp_path_factory.mktemp("tiny") / "model"
    done = forge.python(_TINY, target)
    assert done.rc == 0, done.err
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


@pytest.fixture(scope="session")
def tiny_published(tmp_path_factory: pytest.TempPathFactory, forge: Forge, tiny: Path) -> Store:
    """The store of the small checkpoint; copy it before anything is changed."""
    store = Store(tmp_path_factory.mktemp("published") / "tiny")
    done = forge.hwr("publish", tiny, "--root", store.root, "--quiet")
    assert done.rc == 0, done.err
    return store


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Callable[[Store], Store]]:
    """Copy a published store for this test alone."""
    made: list[Store] = []

    def copy(store: Store) -> Store:
        made.append(store.copy(tmp_path / f"store-{len(made)}"))
        return made[-1]

    yield copy
    for store in made:
        store.remove()


@pytest.fixture
def as_root() -> None:
    """Skip where namespaces and other users are out of reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture
def open_place(tiny: Path) -> Iterator[Path]:
    """A directory that every user can reach, with the small model in it."""
    place = Path(tempfile.mkdtemp(prefix="hwr-e2e-"))
    place.chmod(0o755)
    copy_model(tiny, place / "model")
    (place / "model").chmod(0o755)
    for path in (place / "model").iterdir():
        path.chmod(0o644)
    (place / "run").mkdir()
    os.chown(place / "run", 65534, 65534)
    yield place
    remove(place)
