"""Directories: the choice of weights, links, shards that belong together (field cases 3 and 4 and their kinds)."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_files import NOBODY, encode, model, no_descriptor_left, run_as_nobody, tensors_file

from hwr.checkpoint.source import CONFIG_LIMIT_BYTES, DEFAULT_NAMES, CheckpointSource, open_regular, open_source, read_config
from hwr.errors import (
    AmbiguousWeights,
    HeaderInvalid,
    IndexInvalid,
    IndexMismatch,
    LfsPointer,
    MissingShard,
    NotSafetensors,
    NoWeights,
    PathEscape,
    SourceChanged,
    SourceRejected,
    SourceUnreadable,
    TrailingBytes,
    Truncated,
)

SHARDS = {f"model-{n:05}-of-00003.safetensors": (f"a{n}", f"b{n}") for n in (1, 2, 3)}
FIRST, SECOND, THIRD = SHARDS
INDEX = "model.safetensors.index.json"


def reject(directory: object, kind: type[SourceRejected]) -> SourceRejected:
    with no_descriptor_left(), pytest.raises(SourceRejected) as caught:
        open_source(directory)  # type: ignore[arg-type]
    assert type(caught.value) is kind, caught.value
    assert str(caught.value).count("\n") == 1
    return caught.value


def accept(directory: object) -> CheckpointSource:
    with no_descriptor_left():
        return open_source(directory)  # type: ignore[arg-type]


def names(source: CheckpointSource) -> list[str]:
    return [shard.name for shard in source.shards]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return model(tmp_path / "toy", SHARDS)


# The choice of weights


def test_a_sharded_model_is_one_value(toy: Path) -> None:
    source = accept(toy)
    assert source.directory == Path(os.path.realpath(toy))
    assert source.index_path == source.directory / INDEX
    assert names(source) == list(SHARDS)
    assert {name: source.shards[position].name for name, (position, _) in source.tensors.items()} == {
        name: shard for shard, held in SHARDS.items() for name in held
    }
    for shard in source.shards:
        facts = os.stat(shard.path)
        assert (shard.facts.size, shard.facts.inode, shard.facts.device) == (facts.st_size, facts.st_ino, facts.st_dev)
        assert (shard.facts.mtime_ns, shard.facts.ctime_ns) == (facts.st_mtime_ns, facts.st_ctime_ns)
        assert shard.symlink_target is None
    assert source.file_bytes == sum(os.stat(toy / name).st_size for name in SHARDS)
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors", "anything else.safetensors"])
def test_a_single_file_is_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(tensors_file("a", "b"))
    source = accept(tmp_path)
    assert (names(source), source.index_path, list(source.tensors), source.unlisted) == ([name], None, ["a", "b"], ())


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (
            ["diffusion_pytorch_model.safetensors.index.json", "model.fp16.safetensors.index.json"],
            "diffusion_pytorch_model.safetensors.index.json",
        ),
        (["model.fp16.safetensors.index.json"], "model.fp16.safetensors.index.json"),
        (["weights.safetensors.index.json"], "weights.safetensors.index.json"),
        (["model.safetensors.index.json", ".model.safetensors.index.json", "a.safetensors.index.json"], "model.safetensors.index.json"),
    ],
)
def test_the_default_index_comes_before_variants(tmp_path: Path, there: list[str], chosen: str) -> None:
    for number, index in enumerate(there):
        model(tmp_path, {f"of-{number}.safetensors": ("a",)}, index_name=index)
    source = accept(tmp_path)
    assert source.index_path is not None
    assert source.index_path.name == chosen
    assert names(source) == [f"of-{there.index(chosen)}.safetensors"]


def test_a_default_single_file_comes_before_a_variant_index(tmp_path: Path) -> None:
    model(tmp_path, {"model.fp16-00001-of-00001.safetensors": ("a",)}, index_name="model.fp16.safetensors.index.json")
    (tmp_path / "model.safetensors").write_bytes(tensors_file("a"))
    assert names(accept(tmp_path)) == ["model.safetensors"]


def test_several_indexes_without_a_default_need_a_person(tmp_path: Path) -> None:
    for variant in ("bf16", "fp16"):
        model(tmp_path, {f"{variant}.safetensors": ("a",)}, index_name=f"model.{variant}.safetensors.index.json")
    error = reject(tmp_path, AmbiguousWeights)
    assert "2 indexes" in error.cause
    assert "model.bf16.safetensors.index.json, model.fp16.safetensors.index.json" in error.cause


@pytest.mark.parametrize("both", list(itertools.combinations(DEFAULT_NAMES, 2)))
def test_two_default_names_need_a_person(tmp_path: Path, both: tuple[str, str]) -> None:
    """Each alone is a model; of both, libraries load different ones."""
    for name in both:
        if name.endswith(".json"):
            model(tmp_path, SHARDS, index_name=name)
        else:
            (tmp_path / name).write_bytes(tensors_file("a"))
    error = reject(tmp_path, AmbiguousWeights)
    assert ", ".join(both) in error.cause
    assert tmp_path.name in error.cause
    assert str(tmp_path) not in error.cause
    assert (error.code, error.retryable) == ("ambiguous_weights", True)
    assert "Leave one set" in error.way_out
    for name, other in (both, both[::-1]):
        os.rename(tmp_path / other, tmp_path / ".aside")
        source = accept(tmp_path)
        assert name in (*names(source), source.index_path.name if source.index_path else "")
        os.rename(tmp_path / ".aside", tmp_path / other)


def test_a_default_name_counts_even_if_it_cannot_be_read(toy: Path) -> None:
    (toy / "model.safetensors").symlink_to("gone")
    reject(toy, AmbiguousWeights)


def test_several_files_without_an_index_need_a_person(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.safetensors").write_bytes(tensors_file(str(number)))
    error = reject(tmp_path, AmbiguousWeights)
    assert "8 files and no index: 0.safetensors, 1.safetensors" in error.cause
    assert "give their index" in error.way_out
    assert "and 3 more" in error.cause
    assert str(tmp_path) not in error.cause


@pytest.mark.parametrize(
    ("total", "words"), [(2, "the other shard and the index are missing"), (3, "the other 2 shards and the index are missing")]
)
def test_one_shard_of_many_is_a_partial_set_and_no_choice(tmp_path: Path, total: int, words: str) -> None:
    lone = tmp_path / f"model-00001-of-{total:05}.safetensors"
    lone.write_bytes(tensors_file("a"))
    error = reject(tmp_path, MissingShard)
    assert error.cause == f"{lone.name}: {words}"
    assert (error.details["count"], error.retryable) == (total - 1, False)
    os.rename(lone, tmp_path / "model-00001-of-00001.safetensors")
    accept(tmp_path)


def test_leftovers_that_begin_with_a_dot_are_not_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(tensors_file("a"))
    (tmp_path / "._model.safetensors").write_bytes(b"resource fork")
    (tmp_path / "model.safetensors.incomplete").write_bytes(b"")
    assert accept(tmp_path).unlisted == ()


@pytest.mark.parametrize(
    ("there", "words"),
    [([], "empty"), (["pytorch_model.bin", "config.json"], "pytorch_model.bin"), (["snapshots", "blobs", "refs"], "snapshots/<revision>")],
)
def test_a_directory_without_weights_says_what_is_there(tmp_path: Path, there: list[str], words: str) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    assert words in reject(tmp_path, NoWeights).cause


# Index and shards (case 3)


def test_a_missing_shard_is_named(toy: Path) -> None:
    (toy / SECOND).unlink()
    error = reject(toy, MissingShard)
    assert error.details["count"] == 1
    assert error.cause == f"{INDEX}: 1 shard named by the index is missing: {SECOND}"
    assert str(toy) not in str(error)
    assert not error.retryable


def test_renamed_shards_are_missing_shards(toy: Path) -> None:
    for name in SHARDS:
        os.rename(toy / name, toy / name.replace("model", "renamed"))
    error = reject(toy, MissingShard)
    assert error.details["count"] == 3
    assert error.cause == f"{INDEX}: 3 shards named by the index are missing: {', '.join(SHARDS)}"


def test_many_missing_shards_are_counted_and_cut(tmp_path: Path) -> None:
    model(tmp_path, {}, {"weight_map": {str(n): f"{n:03}.safetensors" for n in range(100)}})
    error = reject(tmp_path, MissingShard)
    assert error.details["count"] == 100
    assert "and 95 more" in error.cause


def test_a_tensor_that_its_shard_lacks_is_a_mismatch(tmp_path: Path) -> None:
    weight_map = {name: shard for shard, held in SHARDS.items() for name in held}
    toy = model(tmp_path, SHARDS, {"weight_map": {**weight_map, "lm_head.weight": THIRD}})
    error = reject(toy, IndexMismatch)
    assert f"lm_head.weight ({THIRD})" in error.cause


def test_a_tensor_in_another_shard_than_promised_is_a_mismatch(tmp_path: Path) -> None:
    weight_map = {name: shard for shard, held in SHARDS.items() for name in held}
    assert f"a1 ({SECOND})" in reject(model(tmp_path, SHARDS, {"weight_map": {**weight_map, "a1": SECOND}}), IndexMismatch).cause


def test_a_tensor_that_the_index_does_not_name_is_a_mismatch(toy: Path) -> None:
    (toy / THIRD).write_bytes(tensors_file("a3", "b3", "stray"))
    assert f"stray ({THIRD})" in reject(toy, IndexMismatch).cause


def test_a_tensor_in_two_shards_is_a_mismatch(toy: Path) -> None:
    (toy / THIRD).write_bytes(tensors_file("a3", "b3", "a1"))
    assert f"a1 ({FIRST} and {THIRD})" in reject(toy, IndexMismatch).cause


def test_one_file_under_two_names_is_a_mismatch(toy: Path) -> None:
    (toy / SECOND).unlink()
    os.link(toy / FIRST, toy / SECOND)
    reject(toy, IndexMismatch)


def test_unlisted_files_are_ignored_and_reported(toy: Path) -> None:
    (toy / "adapter.safetensors").write_bytes(tensors_file("a1"))
    (toy / "model.fp16.safetensors").write_bytes(b"not even one")
    source = accept(toy)
    assert source.unlisted == ("adapter.safetensors", "model.fp16.safetensors")
    assert names(source) == list(SHARDS)


def test_shards_may_lie_in_a_subdirectory(tmp_path: Path) -> None:
    toy = model(tmp_path, {"part/one.safetensors": ("a",), "two.safetensors": ("b",)})
    assert names(accept(toy)) == ["part/one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (tensors_file("a2", "b2")[:-1], Truncated),
        (tensors_file("a2", "b2") + b"\0", TrailingBytes),
        (b"version https://git-lfs.github.com/spec/v1\nsize 5\n", LfsPointer),
        (b"", NotSafetensors),
        (encode(b"[]"), HeaderInvalid),
    ],
)
def test_a_bad_shard_is_named_by_itself(toy: Path, content: bytes, kind: type[SourceRejected]) -> None:
    (toy / SECOND).write_bytes(content)
    error = reject(toy, kind)
    assert error.cause.startswith(SECOND)
    assert str(toy) not in str(error)


@pytest.mark.parametrize("index", [b"", b"[]", b'{"weight_map": {}}', b"{" * 100_000])
def test_a_bad_index_is_named_by_itself(tmp_path: Path, index: bytes) -> None:
    assert reject(model(tmp_path, SHARDS, index), IndexInvalid).cause.startswith(INDEX)


def test_a_huge_index_is_not_read(toy: Path) -> None:
    os.truncate(toy / INDEX, 1 << 40)
    assert "more than" in reject(toy, IndexInvalid).cause


# Paths (case 4)


@pytest.mark.parametrize("target", ["/etc/passwd", "../other/model.safetensors", "sub/../../other/model.safetensors", ".."])
def test_an_index_cannot_name_what_lies_outside(tmp_path: Path, target: str) -> None:
    model(tmp_path / "other", {"model.safetensors": ("stolen",)})
    toy = model(tmp_path / "toy", {"a.safetensors": ("a",)}, {"weight_map": {"a": "a.safetensors", "stolen": target}})
    error = reject(toy, PathEscape)
    assert error.details["target"] == target
    assert not error.retryable


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    other = model(tmp_path / "other", {"model.safetensors": ("stolen",)})
    toy = tmp_path / "toy"
    toy.mkdir()
    for target in (other / "model.safetensors", Path("../other/model.safetensors"), Path("/etc/passwd"), Path("/dev/zero")):
        (toy / "model.safetensors").symlink_to(target)
        assert reject(toy, PathEscape).cause.startswith("model.safetensors")
        (toy / "model.safetensors").unlink()
    # A folder whose name begins alike is another folder.
    shutil.copytree(other, tmp_path / "toy2")
    (toy / "model.safetensors").symlink_to("../toy2/model.safetensors")
    reject(toy, PathEscape)


def test_a_linked_subdirectory_is_no_way_out(tmp_path: Path) -> None:
    model(tmp_path / "other", {"model.safetensors": ("stolen",)})
    toy = model(tmp_path / "toy", {"a.safetensors": ("a",)}, {"weight_map": {"a": "a.safetensors", "stolen": "sub/model.safetensors"}})
    (toy / "sub").symlink_to("../other")
    reject(toy, PathEscape)


def test_a_link_inside_the_folder_is_followed(toy: Path) -> None:
    (toy / "store").mkdir()
    os.rename(toy / FIRST, toy / "store" / "0123abcd")
    (toy / FIRST).symlink_to("store/0123abcd")
    shard = accept(toy).shards[0]
    assert (shard.name, shard.symlink_target, shard.resolved_path.name) == (FIRST, "store/0123abcd", "0123abcd")


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A repository folder of a Hugging Face cache; the files of a snapshot are links to blobs, two levels deep for a component."""
    repository = tmp_path / "hub" / "models--org--toy"
    for folder in (repository / "snapshots" / "0f3c", repository / "snapshots" / "0f3c" / "transformer"):
        model(folder, SHARDS)
        for path in sorted(folder.iterdir()):
            if path.is_file():
                blob = repository / "blobs" / f"{abs(hash(path)):064x}"
                blob.parent.mkdir(exist_ok=True)
                os.rename(path, blob)
                path.symlink_to(os.path.relpath(blob, folder))
    return repository / "snapshots" / "0f3c"


def test_a_hugging_face_snapshot_is_accepted(cached: Path) -> None:
    for folder in (cached, cached / "transformer"):
        source = accept(folder)
        assert names(source) == list(SHARDS)
        for shard in source.shards:
            assert shard.symlink_target is not None
            assert shard.symlink_target.startswith("../")
            assert shard.resolved_path.parent.name == "blobs"
            assert shard.resolved_path.suffix == ""
            assert shard.facts.size == os.stat(shard.path).st_size != os.lstat(shard.path).st_size


def test_a_deleted_blob_is_a_missing_shard(cached: Path) -> None:
    (cached / SECOND).resolve().unlink()
    assert SECOND in os.listdir(cached)
    error = reject(cached, MissingShard)
    assert (error.details["count"], error.details["missing_shards"]) == (1, (SECOND,))
    (cached / INDEX).resolve().unlink()
    assert reject(cached, MissingShard).cause == f"{INDEX}: it is absent, or a link that dangles"


def test_another_repository_of_the_same_cache_is_outside(cached: Path) -> None:
    other = cached.parents[2] / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(cached / FIRST, other / "aaaa")
    (cached / FIRST).unlink()
    (cached / FIRST).symlink_to("../../../models--org--other/blobs/aaaa")
    reject(cached, PathEscape)


def test_a_single_link_that_dangles_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    error = reject(tmp_path, MissingShard)
    assert error.cause == "model.safetensors: it is absent, or a link that dangles"
    assert error.details["missing_shards"] == ("model.safetensors",)


def test_links_in_a_loop_are_unreadable(toy: Path) -> None:
    (toy / FIRST).unlink()
    (toy / FIRST).symlink_to("loop")
    (toy / "loop").symlink_to(FIRST)
    assert "ELOOP" in reject(toy, SourceUnreadable).cause


def test_one_model_through_many_spellings_is_one_value(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alias").symlink_to("toy")
    (tmp_path / "absolute").symlink_to(toy)
    first = accept(toy)
    monkeypatch.chdir(tmp_path)
    for spelling in ("toy", "./toy/", "toy/../alias", f"{tmp_path}//toy", tmp_path / "absolute", os.fsencode(toy), b"alias"):
        assert accept(spelling) == first


def test_a_changed_file_is_another_value(toy: Path) -> None:
    first = accept(toy)
    path = toy / FIRST
    until_times_move_on(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\1")
    second = accept(toy)
    assert first != second
    assert first.tensors == second.tensors


# What cannot be read


@pytest.mark.parametrize(
    "given", ["missing", "", "a\0b", "\ud800", "x" * 5000, "toy/model-00001-of-00003.safetensors", "toy/" + INDEX + "/x"]
)
def test_what_is_no_directory_is_unreadable(toy: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(toy.parent)
    error = reject(given, SourceUnreadable)
    assert all(line.isprintable() for line in str(error).split("\n"))


def test_a_file_instead_of_a_directory_says_so(toy: Path) -> None:
    assert "ENOTDIR" in reject(toy / FIRST, SourceUnreadable).cause


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as short:
        listener.bind(f"{short}/s")
        os.rename(f"{short}/s", path)


@pytest.mark.parametrize(
    ("make", "kind"), [(make_fifo, "FIFO"), (make_device, "device"), (make_socket, "socket"), (Path.mkdir, "directory")]
)
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
@pytest.mark.timeout(20)
def test_nothing_but_a_regular_file_is_opened(tmp_path: Path, make: object, kind: str, name: str) -> None:
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("only root makes devices")
    make(tmp_path / name)  # type: ignore[operator]
    assert kind in reject(tmp_path, SourceUnreadable).cause
    os.rename(tmp_path / name, tmp_path / "behind")
    (tmp_path / name).symlink_to("behind")
    assert kind in reject(tmp_path, SourceUnreadable).cause


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


OPEN = """
import sys
from hwr.checkpoint.source import open_source
from hwr.errors import SourceRejected
try:
    print(open_source(sys.argv[1]).config_problem)
except SourceRejected as error:
    print(type(error).__name__, error.cause)
"""


@pytest.mark.parametrize(
    ("closed", "mode", "answer"),
    [
        (".", 0o000, "EACCES"),
        (".", 0o311, "EACCES"),
        (".", 0o444, "EACCES"),
        (FIRST, 0o000, f"{FIRST}: cannot be read: EACCES"),
        (INDEX, 0o200, f"{INDEX}: cannot be read: EACCES"),
    ],
)
def test_without_permission_a_source_is_unreadable(open_to_all: Path, closed: str, mode: int, answer: str) -> None:
    toy = model(open_to_all / "toy", SHARDS)
    os.chmod(toy / closed, mode)
    try:
        said = run_as_nobody(OPEN, toy)
    finally:
        os.chmod(toy / closed, 0o755)
    assert said.startswith("SourceUnreadable ")
    assert answer in said
    assert str(NOBODY) not in said


def test_a_config_without_permission_is_only_a_missing_config(open_to_all: Path) -> None:
    toy = model(open_to_all / "toy", SHARDS)
    (toy / "config.json").write_text("{}")
    os.chmod(toy / "config.json", 0)
    assert "EACCES" in run_as_nobody(OPEN, toy)


def test_no_descriptor_left_is_unreadable(toy: Path) -> None:
    code = OPEN.replace("import sys", "import os, resource, sys\nimport encodings.utf_8_sig").replace(
        "try:", "resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\nspare = os.open('/dev/null', 0)\ntry:"
    )
    os.chmod(toy, 0o755)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        shutil.copytree(toy, f"{directory}/toy")
        assert "EMFILE" in run_as_nobody(code, f"{directory}/toy")


# What changes meanwhile


def until_times_move_on(path: Path) -> None:
    """Wait until a change of `path` gets other times than it has: kernels before 6.13 count them in ticks of some milliseconds."""
    deadline = time.monotonic() + 10
    probe = path.with_name(".probe")
    while True:
        probe.write_bytes(b"")
        os.chmod(probe, 0o600)
        if os.stat(probe).st_ctime_ns > os.stat(path).st_ctime_ns:
            return
        assert time.monotonic() < deadline


def change_while_open(path: Path, change: str) -> None:
    with open_regular(path, file=path.name):
        if change == "mode":  # only the change time tells
            os.chmod(path, 0o600)
        else:
            content = path.read_bytes()
            path.write_bytes({"grow": content + b"x", "shrink": content[:-1], "rewrite": content}[change])


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite", "mode"])
def test_a_file_that_changes_while_it_is_open_is_not_believed(toy: Path, change: str) -> None:
    until_times_move_on(toy / FIRST)
    with no_descriptor_left(), pytest.raises(SourceChanged):
        change_while_open(toy / FIRST, change)


def test_open_regular_follows_no_link_and_waits_for_nothing(toy: Path) -> None:
    (toy / "link").symlink_to(FIRST)
    with no_descriptor_left(), pytest.raises(SourceUnreadable, match="a link"), open_regular(toy / "link", file="link"):
        pass


SWAP = """
import os, sys
name, outside = sys.argv[1:]
content = open(name, "rb").read()
os.mkfifo(name + ".fifo")
print(flush=True)
while True:
    for kind in ("fifo", "regular", "link", "regular"):
        if kind == "fifo":
            os.link(name + ".fifo", name + ".next")
        elif kind == "link":
            os.symlink(outside, name + ".next")
        else:
            with open(name + ".next", "wb") as stream:
                stream.write(content)
        os.replace(name + ".next", name)
"""


@pytest.mark.timeout(60)
def test_a_file_swapped_under_the_reader_is_a_value_or_a_typed_refusal(tmp_path: Path) -> None:
    toy, outside = tmp_path / "toy", tmp_path / "outside"
    toy.mkdir()
    (toy / "model.safetensors").write_bytes(tensors_file("ours"))
    outside.write_bytes(tensors_file("stolen"))
    swapper = subprocess.Popen([sys.executable, "-c", SWAP, str(toy / "model.safetensors"), str(outside)], stdout=subprocess.PIPE)
    met: set[str] = set()
    try:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        with no_descriptor_left():
            for _ in range(3000):
                try:
                    assert list(open_source(toy).tensors) == ["ours"]
                except SourceRejected as error:
                    met.add(type(error).__name__)
        assert swapper.poll() is None
    finally:
        swapper.kill()
        swapper.communicate()
    assert {"PathEscape", "SourceUnreadable"} <= met


# The configuration


def test_the_configuration_comes_along(toy: Path) -> None:
    text = '{"architectures": ["Toy"], "limit": [0.0, Infinity]}'
    (toy / "config.json").write_text(text)
    source = accept(toy)
    assert source.config == {"architectures": ["Toy"], "limit": [0.0, float("inf")]}
    assert (source.config_text, source.config_problem) == (text, None)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "absent"),
        (b"", "Expecting value"),
        (b"[]", "not an object but list"),
        (b"{", "Expecting property"),
        (b"\xff", "not UTF-8"),
        (b'{"a":' + b"[" * 200_000, "nested"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b" " * (CONFIG_LIMIT_BYTES + 1), "more than"),
    ],
)
def test_a_model_without_a_usable_configuration_is_still_a_model(toy: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (toy / "config.json").write_bytes(content)
    source = accept(toy)
    assert source.config is None
    assert source.config_problem is not None
    assert problem in source.config_problem


def test_a_configuration_that_lies_outside_is_not_read(toy: Path) -> None:
    (toy.parent / "secret.json").write_text(json.dumps({"secret": 1}))
    (toy / "config.json").symlink_to("../secret.json")
    source = accept(toy)
    assert source.config is None
    assert source.config_problem is not None
    assert "outside" in source.config_problem


def test_a_configuration_is_read_without_weights_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text('{"a": 1}')
    (tmp_path / "alias").symlink_to("toy")
    for root in (tmp_path / "toy", str(tmp_path / "toy"), tmp_path / "alias"):
        assert read_config(root) == ({"a": 1}, '{"a": 1}', None)


@pytest.mark.parametrize("root", ["missing", "missing/deeper", "", "a\0b", "\ud800", "x" * 5000, "file", "file/x"])
def test_where_no_directory_is_the_configuration_has_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    Path("config.json").write_text("{}")  # the working directory is never meant by an empty path
    config, text, problem = read_config(root)
    assert (config, text) == (None, None)
    assert problem
    assert problem.isprintable()
