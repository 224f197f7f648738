"""R10 and R11: what is hashed and merged once, and when a tree is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from e2e_processes import Forge
from e2e_stores import Store, evict, payload_was_read

ADAPTED = """
import json, sys
import torch, hwr
from hwr.cli.synthetic import run_steps
from hwr.loader.factory import PretrainedFactory
model, root, fingerprint, scale = sys.argv[1:5]
merged = 0

def merge(module):
    global merged
    merged += 1
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight.mul_(float(scale))

options = hwr.Options.of(host_weight_runtime_mode="preferred", host_weight_runtime_root=root)
adaptation = hwr.AdaptedWeights("lora", fingerprint, merge) if fingerprint else None
with hwr.load(PretrainedFactory(model), model, options, adaptation=adaptation) as loaded:
    report = loaded.report
    told = {"outcome": report.outcome, "key": report.key, "miss": report.miss, "stages": list(report.stage_seconds)}
    print(json.dumps({**told, "merged": merged, "digest": run_steps(loaded.module, 1)}))
"""


def test_an_adaptation_is_merged_once_and_has_a_key_of_its_own(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"

    def start(fingerprint: str, scale: float) -> dict[str, object]:
        done = forge.python(ADAPTED, tiny, root, fingerprint, scale)
        assert done.rc == 0, done.err
        told: dict[str, object] = json.loads(done.out)
        told["skipped"] = len(done.journal.of("hwr.runtime.adaptation.skip"))
        return told

    cold, warm = start("one", 2.0), start("one", 2.0)
    assert (cold["outcome"], cold["merged"], cold["skipped"]) == ("canonical_fallback", 1, 0)
    assert "adapt" in cold["stages"]  # type: ignore[operator]
    assert (warm["outcome"], warm["merged"], warm["skipped"]) == ("local_hit", 0, 1)
    assert warm["key"] == cold["key"]
    assert warm["digest"] == cold["digest"]
    other, base = start("two", 3.0), start("", 1.0)
    assert (other["outcome"], other["merged"]) == ("canonical_fallback", 1)
    assert (base["outcome"], base["merged"]) == ("canonical_fallback", 0)
    assert len({cold["key"], other["key"], base["key"]}) == 3
    assert len({cold["digest"], other["digest"], base["digest"]}) == 3
    # The miss is explained by the section that differs.
    assert "adaptation" in str(other["miss"])
    # One digest entry a source file, whatever was started how often.
    assert len(Store(root).digest_entries) == len(list(tiny.glob("*.safetensors")))
    Store(root).remove()


def test_sources_are_hashed_once_and_skipped_when_warm(
    forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    store = copied(tiny_published)
    files = sorted(tiny.glob("*.safetensors"))
    for path in files:
        evict(path)
    done = forge.hwr("run", tiny, "--mode", "required", "--root", store.root, "--json")
    assert done.rc == 0, done.err
    assert done.report["outcome"] == "local_hit"
    assert not any(payload_was_read(path) for path in files)
    (digest,) = done.journal.of("hwr.checkpoint.digest.end")
    assert (digest["files"], digest["hashed"], digest["bytes"]) == (len(files), 0, 0)
    assert len(store.digest_entries) == len(files)


def test_a_tree_is_measured_only_for_a_store_limit_and_that_figure_is_reported(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    free = forge.hwr("publish", tiny, "--root", tmp_path / "free", "--quiet")
    assert free.rc == 0, free.err
    assert free.journal.of("hwr.store.tree.begin") == []

    limit = ("--host-weight-runtime-max-store-gib", "0.0001")
    done = forge.hwr("publish", tiny, "--root", tmp_path / "limited", "--quiet", *limit)
    assert done.rc == 1
    first, second = done.lines()
    assert done.journal.failures() == ["store_limit_exceeded"]
    (measured,) = done.journal.of("hwr.store.tree.end")
    assert f"holds {measured['bytes']} of {int(0.0001 * 2**30)}" in first
    assert "--host-weight-runtime-max-store-gib" in second
    store = Store(tmp_path / "limited")
    assert store.names("artifacts") == store.temporary == []
    # A server loads all the same, and says why nothing was published.
    run = forge.hwr("run", tiny, "--mode", "preferred", "--root", store.root, "--json", *limit)
    assert run.rc == 0
    assert run.report["outcome"] == "canonical_fallback"
    assert run.report["publication"] == "failed"
    assert run.report["publication_failure"]["code"] == "store_limit_exceeded"
    assert len(run.journal.of("hwr.store.tree.begin")) == 1
    Store(tmp_path / "free").remove()
