"""R8 and R9: one flipped payload byte, at both levels and in both modes, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_processes import Done, Forge
from e2e_stores import Store, evict, payload_was_read

TENSOR = "encoder.layer.0.attention.self.query.bias"

# What `hwr run` does, with a look at what is left of it when it failed.
LOAD = """
import json, os, sys
import hwr
from hwr.cli.synthetic import run_steps
from hwr.errors import HwrError
from hwr.loader.factory import PretrainedFactory
model, root, mode, level = sys.argv[1:5]
options = hwr.Options.of(host_weight_runtime_mode=mode, host_weight_runtime_root=root, host_weight_runtime_validation=level)
told = {}
try:
    with hwr.load(PretrainedFactory(model), model, options) as loaded:
        told["report"] = loaded.report.to_json()
        told["digest"] = run_steps(loaded.module, 1)
except RuntimeError as error:
    told["error"] = {"class": type(error).__name__, "hwr": isinstance(error, HwrError), "text": str(error), "code": error.code}
    failed = error
with open("/proc/self/maps") as maps:
    told["mapped"] = sum(root in line for line in maps)
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
told["open"] = sum(os.readlink(link).startswith(root) for link in links if os.path.lexists(link))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def stock(forge: Forge, minilm: Path) -> str:
    """The digest of what the canonical checkpoint computes."""
    done = forge.hwr("run", minilm, "--json")
    assert done.rc == 0, done.err
    digest: str = done.report["output_sha256"]
    return digest


@pytest.fixture
def flipped(copied: Callable[[Store], Store], minilm_published: Store, minilm: Path) -> Store:
    """MiniLM's store with one wrong value, and its canonical weights out of the page cache."""
    store = copied(minilm_published)
    store.flip(TENSOR)
    evict(minilm / "model.safetensors")
    return store


def load(forge: Forge, model: Path, store: Store, mode: str, level: str) -> Done:
    done = forge.python(LOAD, model, store.root, mode, level)
    assert done.rc == 0, done.err
    return done


def test_full_checksum_and_required_refuse(forge: Forge, minilm: Path, flipped: Store) -> None:
    done = load(forge, minilm, flipped, "required", "full_checksum")
    told, journal = json.loads(done.out), done.journal
    # A RuntimeError of ours with the prefix that scripts look for, and the file and tensor.
    assert told["error"]["class"] == "ResolutionFailed"
    assert told["error"]["hwr"]
    assert told["error"]["text"].startswith("Host Weight Runtime resolution failed: ")
    assert told["error"]["code"] == "checksum_mismatch"
    assert TENSOR in told["error"]["text"].splitlines()[0]
    assert flipped.payload.name in told["error"]["text"].splitlines()[0]
    # Zero canonical payload bytes read.
    assert not payload_was_read(minilm / "model.safetensors")
    # No plan, lease or carrier left.
    assert journal.of("hwr.loader.restore.begin") == []
    assert journal.of("hwr.store.lease.open") == []
    assert journal.of("hwr.runtime.lifecycle.advance") == []
    assert (told["mapped"], told["open"]) == (0, 0)
    assert journal.state.leases == {}
    # Denied and left where it is.
    assert flipped.denied == [f"{flipped.key}.json"]
    assert flipped.quarantined == flipped.temporary == []
    # One failure, with the same code everywhere, and one report.
    assert journal.failures() == ["checksum_mismatch"]
    assert journal.state.resolutions == {"failed|required": 1}
    assert journal.state.validation_failures == {"checksum_mismatch": 1}
    assert len(journal.of("hwr.store.deny.write")) == 1


def test_full_checksum_and_required_on_the_command_line(forge: Forge, minilm: Path, flipped: Store) -> None:
    done = forge.hwr("run", minilm, "--mode", "required", "--root", flipped.root, "--validation", "full_checksum", "--quiet")
    assert done.rc == 1
    assert done.out == ""
    first, second = done.lines()
    assert first.startswith("hwr: Host Weight Runtime resolution failed: ")
    assert second


def test_full_checksum_and_preferred_reload_and_republish(forge: Forge, minilm: Path, flipped: Store, stock: str) -> None:
    key, bad = flipped.key, flipped.payload.stat().st_ino
    done = load(forge, minilm, flipped, "preferred", "full_checksum")
    told = json.loads(done.out)
    assert told["report"]["outcome"] == "canonical_fallback"
    assert told["report"]["publication"] == "published"
    assert told["digest"] == stock
    assert done.journal.failures() == ["checksum_mismatch"]
    assert [attrs["fatal"] for attrs in done.journal.of("hwr.runtime.failure.record")] == [False]
    # The old tree in quarantine, the replacement in its place, nothing denied any more.
    (old,) = flipped.quarantined
    assert old.startswith(f"{key}.validation_failure.")
    assert [path.stat().st_ino for path in (flipped.root / "quarantine" / old).glob("*.safetensors")] == [bad]
    assert flipped.key == key
    assert flipped.payload.stat().st_ino != bad
    assert flipped.denied == flipped.temporary == []
    # The next start is warm and right, at the strongest level and without the canonical weights.
    evict(minilm / "model.safetensors")
    again = json.loads(load(forge, minilm, flipped, "required", "full_checksum").out)
    assert again["report"]["outcome"] == "local_hit"
    assert again["digest"] == stock
    assert not payload_was_read(minilm / "model.safetensors")


@pytest.mark.parametrize("mode", ["preferred", "required"])
def test_the_metadata_level_serves_the_wrong_value(forge: Forge, minilm: Path, flipped: Store, stock: str, mode: str) -> None:
    """That is what the level means; the event says what it did not look at."""
    done = load(forge, minilm, flipped, mode, "manifest_and_metadata")
    told = json.loads(done.out)
    assert told["report"]["outcome"] == "local_hit"
    assert told["digest"] != stock
    assert not payload_was_read(minilm / "model.safetensors")
    assert flipped.denied == flipped.quarantined == []
    (lookup,) = done.journal.of("hwr.store.lookup.end")
    assert "payload" in lookup["unchecked"]
    assert done.journal.failures() == []


# R9: weaker and stronger readers of one root ---------------------------------------------------------------------

READERS = """
import json, os, sys
import hwr
from hwr.cli.synthetic import run_steps
from hwr.errors import HwrError
from hwr.loader.factory import PretrainedFactory
model, root = sys.argv[1:3]

def options(mode, level):
    return hwr.Options.of(host_weight_runtime_mode=mode, host_weight_runtime_root=root, host_weight_runtime_validation=level)

def apart(mode, level):
    "Load in a process of its own; return what it told."
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            with hwr.load(PretrainedFactory(model), model, options(mode, level)) as loaded:
                told = {"outcome": loaded.report.outcome, "key": loaded.report.key, "digest": run_steps(loaded.module, 1)}
        except HwrError as error:
            told = {"code": error.code}
        os.write(write, json.dumps(told).encode())
        hwr.telemetry.close()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = json.load(pipe)
    os.wait()
    return told

loaded = hwr.load(PretrainedFactory(model), model, options("required", "manifest_and_metadata"))
steps = {"weak": {"outcome": loaded.report.outcome, "key": loaded.report.key, "digest": run_steps(loaded.module, 1)}}
steps["strong_required"] = apart("required", "full_checksum")
steps["weak_after"] = apart("required", "manifest_and_metadata")
steps["holder_after_denial"] = run_steps(loaded.module, 1)
steps["strong_preferred"] = apart("preferred", "full_checksum")
steps["holder_after_republication"] = run_steps(loaded.module, 1)
steps["weak_again"] = apart("required", "manifest_and_metadata")
loaded.close()
print(json.dumps(steps))
"""


def test_a_stronger_reader_ends_later_hits_of_a_weaker_one(
    forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    store = copied(tiny_published)
    key = store.key
    store.flip("model.layers.1.self_attn.q_proj.weight")
    done = forge.python(READERS, tiny, store.root)
    assert done.rc == 0, done.err
    steps = json.loads(done.out)
    right = forge.hwr("run", tiny, "--json").report["output_sha256"]
    # One identity at both levels; the weak one is served what the other refuses.
    assert steps["weak"]["outcome"] == "local_hit"
    assert steps["weak"]["key"] == key
    assert steps["weak"]["digest"] != right
    assert steps["strong_required"] == {"code": "checksum_mismatch"}
    # The denial ends later hits of the weaker, in other processes too.
    assert steps["weak_after"] == {"code": "artifact_denied"}
    # A holder keeps its memory, whatever becomes of the directory.
    assert steps["holder_after_denial"] == steps["holder_after_republication"] == steps["weak"]["digest"]
    # Republished under the same key, everybody is served again, and right.
    assert steps["strong_preferred"] == {"outcome": "canonical_fallback", "key": key, "digest": right}
    assert steps["weak_again"] == {"outcome": "local_hit", "key": key, "digest": right}
    assert len(store.quarantined) == 1


def test_verify_names_the_tensor_and_changes_nothing(forge: Forge, tiny_published: Store, copied: Callable[[Store], Store]) -> None:
    store = copied(tiny_published)
    good = forge.hwr("store", "verify", "--root", store.root)
    assert good.rc == 0
    assert all(line.startswith("hwr: verifying") for line in good.err.splitlines()), "at most the progress of a slow machine"
    assert store.key[:12] in good.out
    store.flip("model.layers.0.mlp.up_proj.weight")
    bad = forge.hwr("store", "verify", "--root", store.root, "--json")
    assert bad.rc == 1
    (row,) = bad.report["artifacts"]
    assert (row["ok"], row["code"]) == (False, "checksum_mismatch")
    assert "model.layers.0.mlp.up_proj.weight" in row["message"]
    assert store.denied == store.quarantined == []
    assert bad.journal.failures() == ["checksum_mismatch"]
