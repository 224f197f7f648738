"""Bad input: one line with the cause, one with the way out, an exit code by class, an event with the same code, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_processes import Done, Forge
from e2e_stores import Store, copy_model, remove

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"5" * 64 + b"\nsize 90868376\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>401 Unauthorized</title></head><body>Sign in first.</body></html>\n"


def first_shard(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


def index(model: Path) -> Path:
    return model / "model.safetensors.index.json"


def no_weights(model: Path) -> None:
    for path in (*model.glob("*.safetensors"), index(model)):
        path.unlink()


def no_directory(model: Path) -> None:
    remove(model)


def a_file(model: Path) -> None:
    remove(model)
    model.write_bytes(b"{}")


def lfs_pointer(model: Path) -> None:
    first_shard(model).write_bytes(LFS_POINTER)


def html_page(model: Path) -> None:
    first_shard(model).write_bytes(HTML)


def empty_shard(model: Path) -> None:
    first_shard(model).write_bytes(b"")


def truncated(model: Path) -> None:
    os.truncate(first_shard(model), first_shard(model).stat().st_size - 100)


def header_cut(model: Path) -> None:
    os.truncate(first_shard(model), 60)


def over_long(model: Path) -> None:
    with first_shard(model).open("ab") as file:
        file.write(bytes(100))


def header_over_limit(model: Path) -> None:
    first_shard(model).write_bytes((100_000_001).to_bytes(8, "little") + b"{}" + bytes(200))


def header_no_json(model: Path) -> None:
    first_shard(model).write_bytes((16).to_bytes(8, "little") + b"{'single': quote" + bytes(64))


def missing_shard(model: Path) -> None:
    first_shard(model).unlink()


def missing_tensor(model: Path) -> None:
    told = json.loads(index(model).read_bytes())
    told["weight_map"]["model.layers.9.input_layernorm.weight"] = first_shard(model).name
    index(model).write_text(json.dumps(told))


def index_no_json(model: Path) -> None:
    index(model).write_text("{")


def path_escape(model: Path) -> None:
    told = json.loads(index(model).read_bytes())
    told["weight_map"] = dict.fromkeys(told["weight_map"], "../other/model.safetensors")
    index(model).write_text(json.dumps(told))


def absolute_path(model: Path) -> None:
    told = json.loads(index(model).read_bytes())
    told["weight_map"] = dict.fromkeys(told["weight_map"], "/etc/passwd")
    index(model).write_text(json.dumps(told))


def dangling_link(model: Path) -> None:
    shard = first_shard(model)
    shard.unlink()
    shard.symlink_to(model / "blobs" / "gone")


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def config_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def unknown_class(model: Path) -> None:
    told = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps(told | {"architectures": ["NobodyKnowsThisModel"]}))


SOURCES: dict[Callable[[Path], None], str] = {
    no_weights: "no_weights",
    no_directory: "unreadable",
    a_file: "unreadable",
    lfs_pointer: "lfs_pointer",
    html_page: "not_safetensors_html",
    empty_shard: "not_safetensors",
    truncated: "truncated",
    header_cut: "truncated",
    over_long: "trailing_bytes",
    header_over_limit: "header_over_limit",
    header_no_json: "header_invalid",
    missing_shard: "missing_shard",
    missing_tensor: "index_mismatch",
    index_no_json: "index_invalid",
    path_escape: "path_escape",
    absolute_path: "path_escape",
    dangling_link: "missing_shard",
    no_config: "canonical_source_failed",
    config_no_json: "canonical_source_failed",
    unknown_class: "canonical_source_failed",
}


def assert_two_lines(done: Done, rc: int, code: str, *, fatal: bool = True) -> None:
    """Cause, way out, exit code, and a failure event with the same code that ended the start."""
    assert done.rc == rc, done.err
    assert done.out == ""
    assert len(done.lines()) == 2, done.err
    cause, way_out = done.lines()
    assert cause.startswith("hwr: ")
    assert way_out
    journal = done.journal
    assert (journal.failures(), journal.state.failures) == ([code], {code: 1})
    (event,) = journal.of("hwr.runtime.failure.record")
    assert event["problem"] in cause
    assert event["fatal"] is fatal
    assert journal.state.exited
    assert journal.state.ops == {}


def assert_nothing_left(store: Store) -> None:
    assert store.names("artifacts") == []
    assert store.temporary == []
    assert store.quarantined == []


# Stock loading overlooks it, and disabled is stock loading; with a store, a partial set is never loaded nor published.
OVERLOOKED = {missing_tensor}


@pytest.mark.parametrize(
    ("spoil", "mode"),
    [(spoil, mode) for spoil in SOURCES for mode in ("disabled", "preferred", "required") if mode != "disabled" or spoil not in OVERLOOKED],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_bad_checkpoint_is_refused(forge: Forge, tiny: Path, tmp_path: Path, spoil: Callable[[Path], None], mode: str) -> None:
    model = copy_model(tiny, tmp_path / "model")
    spoil(model)
    store = Store(tmp_path / "store")
    done = forge.hwr("run", model, "--mode", mode, "--root", store.root, "--quiet")
    assert_two_lines(done, 1, SOURCES[spoil])
    assert_nothing_left(store)
    assert done.state.phase() == "failed"
    assert done.state.resolutions == {f"failed|{mode}": 1}
    if SOURCES[spoil] != "canonical_source_failed":
        assert done.state.source_rejected == {SOURCES[spoil]: 1}
        (rejected,) = done.journal.of("hwr.checkpoint.source.reject")
        assert rejected["problem"] in done.lines()[0]


@pytest.mark.parametrize("spoil", [lfs_pointer, missing_shard, path_escape, no_config], ids=lambda spoil: spoil.__name__)
def test_a_bad_checkpoint_is_not_published(forge: Forge, tiny: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    model = copy_model(tiny, tmp_path / "model")
    spoil(model)
    store = Store(tmp_path / "store")
    assert_two_lines(forge.hwr("publish", model, "--root", store.root, "--quiet"), 1, SOURCES[spoil])
    assert_nothing_left(store)
    assert_two_lines(forge.hwr("store", "explain", model, "--root", store.root), 1, SOURCES[spoil])


def test_an_lfs_pointer_says_how_large_the_real_file_is(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    model = copy_model(tiny, tmp_path / "model")
    lfs_pointer(model)
    done = forge.hwr("run", model, "--quiet")
    assert "90868376 bytes" in done.lines()[0]
    assert "git lfs pull" in done.lines()[1]


def test_weights_of_another_format_load_the_ordinary_way(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    """What we cannot publish and stock loading can load is loaded in preferred, and the reason is told."""
    model = tmp_path / "model"
    script = "import sys, torch, transformers\n" + (
        "model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])\n"
        "torch.save({n: t.clone() for n, t in model.state_dict().items()}, sys.argv[2])"
    )
    copy_model(tiny, model)
    no_weights(model)
    assert forge.python(script, tiny, model / "pytorch_model.bin").rc == 0
    store = Store(tmp_path / "store")
    done = forge.hwr("run", model, "--mode", "preferred", "--root", store.root, "--json")
    assert done.rc == 0, done.err
    assert done.report["outcome"] == "canonical_fallback"
    assert done.report["publication"] is None
    assert done.report["attempts"][0]["failure"]["code"] == "no_weights"
    assert done.report["attempts"][0]["action"] == "canonical_fallback"
    assert [event["fatal"] for event in done.journal.of("hwr.runtime.failure.record")] == [False]
    assert_nothing_left(store)


# options ---------------------------------------------------------------------------------------------------------

ROOT = ("--mode", "preferred", "--root", "ROOT")
WRONG: dict[str, tuple[str, ...]] = {
    "level": (*ROOT, "--validation", "fs_verity"),
    "mode": ("--mode", "sometimes", "--root", "ROOT"),
    "no root": ("--mode", "required"),
    "blank root": ("--mode", "required", "--root", "  "),
    "timeout": (*ROOT, "--hwr-coordination-timeout-seconds", "-1"),
    "timeout is nan": (*ROOT, "--hwr-coordination-timeout-seconds", "nan"),
    "limit": (*ROOT, "--host-weight-runtime-max-store-gib", "many"),
    "port": (*ROOT, "--metrics-port", "70000"),
    "registration": (*ROOT, "--dlo-host-registration-mode", "perhaps"),
    "steps": (*ROOT, "--steps", "-1"),
    "ranks": (*ROOT, "--ranks", "0"),
    "dtype": (*ROOT, "--dtype", "float7"),
    "config": (*ROOT, "--config", "/nowhere/hwr.toml"),
    "stage without a file": (*ROOT, "--stage", "one"),
    "engine": (*ROOT, "--engine", "a b"),
}
UNBUILT: dict[str, tuple[str, ...]] = {
    "offload": (*ROOT, "--dlo"),
    "offload, long": (*ROOT, "--enable-distributed-layerwise-offload"),
    "resident layers": (*ROOT, "--dlo-resident-layers", "80"),
    "no allgather": (*ROOT, "--dlo-no-use-allgather"),
    "ulysses": (*ROOT, "--ulysses-degree", "2"),
    "serialized": (*ROOT, "--host-weight-runtime-build-admission", "serialized", "--host-weight-runtime-max-store-gib", "1"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_option_is_a_usage_error(forge: Forge, tiny: Path, tmp_path: Path, which: str) -> None:
    root = tmp_path / "store"
    arguments = [str(root) if word == "ROOT" else word for word in WRONG[which]]
    done = forge.hwr("run", tiny, *arguments)
    assert_two_lines(done, 2, "invalid_config")
    assert not root.exists()
    assert done.journal.records[0]["res"]["hwr.role"] == "tool"


@pytest.mark.parametrize("which", UNBUILT)
def test_what_is_not_built_yet_is_refused_and_not_ignored(forge: Forge, tiny: Path, tmp_path: Path, which: str) -> None:
    root = tmp_path / "store"
    arguments = [str(root) if word == "ROOT" else word for word in UNBUILT[which]]
    done = forge.hwr("run", tiny, *arguments)
    assert_two_lines(done, 2, "unsupported")
    assert "not implemented" in done.lines()[0]
    assert not root.exists()
    # Shown all the same (R2).
    assert forge.hwr("run", tiny, *arguments, "--print-config").rc == 0
    assert not root.exists()


def test_without_telemetry_a_failure_leaves_no_file(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "hwr.toml"
    config.write_text("telemetry = false\n")
    for more, env in ((("--no-telemetry",), {}), ((), {"HWR_TELEMETRY": "off"}), (("--config", config), {})):
        for model, rc in ((tmp_path / "nowhere", 1), (tiny, 0)):
            done = forge.hwr("run", model, "--quiet", *more, env=env)
            assert done.rc == rc, done.err
            assert list(done.run_dir.iterdir()) == []
            assert len(done.lines()) == (2 if rc else 0)
    wrong = forge.hwr("run", tiny, "--no-telemetry", "--mode", "sometimes")
    assert (wrong.rc, len(wrong.lines()), list(wrong.run_dir.iterdir())) == (2, 2, [])


# roots -----------------------------------------------------------------------------------------------------------


def root_is_a_file(root: Path) -> None:
    root.write_bytes(b"")


def parent_is_a_file(root: Path) -> None:
    shutil.rmtree(root.parent)
    root.parent.write_bytes(b"")


def not_a_store_of_ours(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "domain.json").write_text("[]")


def world_writable(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)


def somebody_elses(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)


# code, whether preferred loads all the same, and the class's exit code in required
ROOTS: dict[Callable[[Path], None], tuple[str, bool]] = {
    root_is_a_file: ("domain_unavailable", True),
    parent_is_a_file: ("domain_unavailable", True),
    not_a_store_of_ours: ("domain_policy_mismatch", False),
    world_writable: ("untrusted_permissions", False),
    somebody_elses: ("untrusted_permissions", False),
}


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("spoil", ROOTS, ids=lambda spoil: spoil.__name__)
def test_a_bad_root(forge: Forge, tiny: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    (tmp_path / "parent").mkdir()
    store = Store(tmp_path / "parent" / "store")
    spoil(store.root)
    code, falls_back = ROOTS[spoil]
    required = forge.hwr("run", tiny, "--mode", "required", "--root", store.root, "--quiet")
    assert_two_lines(required, 1, code)
    assert required.lines()[0].startswith("hwr: Host Weight Runtime resolution failed: ")
    preferred = forge.hwr("run", tiny, "--mode", "preferred", "--root", store.root, "--quiet", "--json")
    if falls_back:
        assert_loaded_without_the_store(preferred, code)
    else:
        assert_two_lines(preferred, 1, code)
    assert_two_lines(forge.hwr("publish", tiny, "--root", store.root, "--quiet"), 1, code)


@pytest.mark.parametrize("root", ["/proc/hwr-store", "/sys/hwr-store"])
def test_a_filesystem_that_is_not_known_to_be_local(forge: Forge, tiny: Path, root: str) -> None:
    """It stays visible even in preferred: every start would miss."""
    for mode in ("required", "preferred"):
        done = forge.hwr("run", tiny, "--mode", mode, "--root", root, "--quiet")
        assert_two_lines(done, 1, "storage_class_mismatch")
        assert root.split("/")[1] in done.lines()[0]


def test_other_limits_than_the_store_was_made_with(
    forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    store = copied(tiny_published)
    for mode in ("required", "preferred"):
        done = forge.hwr("run", tiny, "--mode", mode, "--root", store.root, "--host-weight-runtime-max-store-gib", "3", "--quiet")
        assert_two_lines(done, 1, "domain_policy_mismatch")
        assert "max_store_bytes" in done.lines()[0]


def test_an_artifact_over_its_limit(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    limit = ("--host-weight-runtime-max-artifact-gib", "0.0001")
    assert_two_lines(forge.hwr("publish", tiny, "--root", store.root, "--quiet", *limit), 1, "artifact_too_large")
    done = forge.hwr("run", tiny, "--mode", "preferred", "--root", store.root, "--json", "--quiet", *limit)
    assert done.rc == 0, done.err
    assert done.report["publication_failure"]["code"] == "artifact_too_large"
    assert_nothing_left(store)


def test_a_required_miss_is_explained(forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]) -> None:
    store = copied(tiny_published)
    done = forge.hwr("run", tiny, "--mode", "required", "--root", store.root, "--dtype", "float16", "--quiet")
    assert_two_lines(done, 1, "local_miss")
    assert "representation" in done.lines()[0]
    assert done.state.lookup_misses == {"representation": 1}
    assert "hwr publish" in done.lines()[1]


def assert_loaded_without_the_store(done: Done, code: str) -> None:
    """Preferred loaded what stock loading could, and says what was wrong with the store."""
    assert done.rc == 0, done.err
    assert done.report["outcome"] == "canonical_fallback"
    assert done.report["output_sha256"] is not None
    assert code in [attempt["failure"]["code"] for attempt in done.report["attempts"] if attempt["failure"]]
    assert done.journal.failures() == [code]
    assert [event["fatal"] for event in done.journal.of("hwr.runtime.failure.record")] == [False]
    assert done.state.resolutions == {"canonical_fallback|preferred": 1}
