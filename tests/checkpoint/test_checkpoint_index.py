"""What an index may say, and whether the shards agree (field cases 3 and 4, the part without files)."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from checkpoint_files import tensors_file

from hwr.checkpoint.header import FileHeader, parse_header
from hwr.checkpoint.index import INDEX_LIMIT_BYTES, SHARDS_LIMIT, ShardIndex, agree, parse_index
from hwr.errors import IndexInvalid, IndexMismatch, LfsPointer, NotSafetensorsHtml, PathEscape, SourceRejected

FILE = "model.safetensors.index.json"


def parse(content: object) -> ShardIndex:
    return parse_index(content if isinstance(content, bytes) else json.dumps(content).encode(), file=f"/somewhere/{FILE}")


def header(*names: str) -> FileHeader:
    whole = tensors_file(*names)
    length = int.from_bytes(whole[:8], "little")
    return parse_header(whole[8 : 8 + length], file="x", file_bytes=len(whole))


def test_an_index_gives_each_tensor_its_shard() -> None:
    index = parse(
        {"metadata": {"total_size": 12, "nested": {"a": [1, 2.5, None]}}, "weight_map": {"b": "2", "a": "1", "": "2"}, "other": 1}
    )
    assert index.weight_map == {"b": "2", "a": "1", "": "2"}
    assert index.shards == ("1", "2")
    assert index.file == FILE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it ends"),
        (b"[]", "'{'"),
        (b"{}", "no weight_map"),
        ({"weight_map": {}}, "empty"),
        ({"weight_map": None}, "'{'"),
        ({"weight_map": ["a"]}, "'{'"),
        ({"weight_map": {"a": 1}}, "a string"),
        ({"weight_map": {"a": None}}, "a string"),
        ({"weight_map": {"a": ["b"]}}, "a string"),
        ({"weight_map": {"a": ""}}, "plain relative path"),
        ({"weight_map": {"a": "."}}, "plain relative path"),
        ({"weight_map": {"a": "./b"}}, "plain relative path"),
        ({"weight_map": {"a": "b//c"}}, "plain relative path"),
        ({"weight_map": {"a": "b/"}}, "plain relative path"),
        ({"weight_map": {"a": "b\0c"}}, "NUL"),
        (b'{"weight_map": {"a": "\\ud800"}}', "surrogate"),
        (b'{"weight_map": {"a": "1", "a": "1"}}', "twice"),
        (b'{"weight_map": {"a": "1"}, "weight_map": {"b": "2"}}', "twice"),
        (b'{"weight_map": {"a": "1"}} x', "the end"),
        (b'{"weight_map": {"a": "1"},}', "a string"),
        (b'{"metadata": {"x": NaN}, "weight_map": {"a": "1"}}', "NaN"),
        (b'{"metadata": {"x": 1, "x": 2}, "weight_map": {"a": "1"}}', "twice"),
        (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b', "weight_map": {"a": "1"}}', "nested"),
        (b'{"metadata": "' + b"x" * 2_000_000 + b'", "weight_map": {"a": "1"}}', "Unterminated"),
        (b"\xff\xfe", "UTF-8"),
        (b"\xef\xbb\xbf{}", "'{'"),
        (json.dumps({str(n): n for n in range(100)}).encode(), "keys besides"),
        ({"weight_map": {str(n): str(n) for n in range(SHARDS_LIMIT + 1)}}, "shards"),
        (b" " * (INDEX_LIMIT_BYTES + 1), "more than"),
    ],
)
def test_indexes_that_cannot_be_used(content: object, words: str) -> None:
    with pytest.raises(IndexInvalid) as caught:
        parse(content)
    assert words in caught.value.cause
    assert caught.value.cause.startswith(FILE)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "target",
    [
        "/etc/passwd",
        "//etc/passwd",
        "/",
        "..",
        "../other/model.safetensors",
        "a/../../b",
        "a/..",
        "a/../b",
        "..\\other",
        "/x\0y",
        "../\x1b[31m",
    ],
)
def test_names_that_leave_the_folder(target: str) -> None:
    with pytest.raises(PathEscape) as caught:
        parse({"weight_map": {"fine": "model.safetensors", "a": target}})
    assert caught.value.details["target"] == target
    assert str(caught.value).isascii()
    assert not caught.value.retryable


@pytest.mark.parametrize("name", ["a", "sub/a.safetensors", "a..b", "...", "~", "-rf", "a b", "😀", "C:\\a", "hash-without-suffix"])
def test_names_that_stay(name: str) -> None:
    assert parse({"weight_map": {"a": name}}).shards == (name,)


def test_pointers_and_pages_in_place_of_an_index() -> None:
    with pytest.raises(LfsPointer):
        parse(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    with pytest.raises(NotSafetensorsHtml):
        parse(b"<!doctype html><html>")


@pytest.mark.parametrize(
    "raw", [b'{"metadata":[' + b"[]," * 2_000_000, b'{"weight_map":{' + b'"":[],' * 1_000_000, b'{"x":' + b"{" * 4_000_000]
)
def test_a_hostile_index_costs_a_small_multiple_of_its_length(raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SourceRejected):
            parse(raw)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(raw) + (64 << 20)
    finally:
        tracemalloc.stop()


def test_a_shard_set_that_agrees_gives_every_tensor_once() -> None:
    index = parse({"weight_map": {"a": "1", "b": "1", "c": "2"}})
    found = agree(index, [header("a", "b"), header("c")])
    assert [(name, position, tensor.name) for name, (position, tensor) in found.items()] == [("a", 0, "a"), ("b", 0, "b"), ("c", 1, "c")]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([("a",), ("c",)], "not in the shard that the index names: b (1)"),
        ([("a", "c"), ("b",)], "not in the shard that the index names: b (1), c (2)"),
        ([("a", "b", "d"), ("c",)], "in a shard but not in the index: d (1)"),
        ([("a", "b", "c"), ("c",)], "in two shards: c (1 and 2)"),
        ([("a", "b"), ("c", "a")], "in two shards: a (1 and 2)"),
        ([(), ()], "a (1), b (1), c (2)"),
    ],
)
def test_disagreement_is_told_both_ways(headers: list[tuple[str, ...]], words: str) -> None:
    index = parse({"weight_map": {"a": "1", "b": "1", "c": "2"}})
    with pytest.raises(IndexMismatch) as caught:
        agree(index, [header(*names) for names in headers], unlisted=["stray.safetensors"])
    assert words in caught.value.cause
    assert not caught.value.retryable
    assert caught.value.details["unlisted"] == ("stray.safetensors",)


def test_long_lists_are_cut() -> None:
    index = parse({"weight_map": {f"t{n}": "1" for n in range(1000)}})
    with pytest.raises(IndexMismatch, match="and 995 more") as caught:
        agree(index, [header()])
    assert len(caught.value.details["missing_tensors"]) == 5


def test_contradictions_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="map names"):
        ShardIndex(FILE, {"a": "1"}, ("2",))
    with pytest.raises(ValueError, match="map names"):
        ShardIndex(FILE, {}, ())
