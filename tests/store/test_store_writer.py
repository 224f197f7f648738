"""The writer of payload files: W1 (stock opens them, aligned), W2 (digests while writing), W3 (bounded memory), D1 (content digest)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from store_artifacts import SMALL, Given, Zeros, artifact, identity, left_in, payload, put, run, store

from hwr import digest
from hwr.errors import ProducerFailed, ProducerUnsupported
from hwr.format import BYTE_DTYPE_BITS as DTYPE_BITS
from hwr.format import METADATA_KEY
from hwr.loader.dtypes import dtype_of, word_of
from hwr.loader.producer import ModelTensor
from hwr.outcomes import FailureCode, PublicationOutcome, TensorKind
from hwr.store.domain import Domain
from hwr.store.manifest import PAD_PREFIX, Manifest, parse_manifest
from hwr.store.publish import publish
from hwr.store.writer import ALIGNMENT, PAGE_BYTES, PayloadWriter, plan_files
from hwr.units import MIB

WORDS = sorted(DTYPE_BITS)


def tensor(word: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Random bits of a dtype, NaN payloads included."""
    dtype = dtype_of(word)
    assert dtype is not None
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if word == "BOOL" else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(tuple(shape)) if raw.numel() else torch.empty(tuple(shape), dtype=dtype)


def source(name: str, value: torch.Tensor, kind: TensorKind = TensorKind.PARAMETER) -> ModelTensor:
    word = word_of(value.dtype)
    assert word is not None
    return ModelTensor(name=name, kind=kind, dtype=word, shape=tuple(value.shape), tensor=value)


def bits(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""


def manifest_of(domain: Domain, name: str = "a") -> Manifest:
    return parse_manifest((artifact(domain, name) / "manifest.json").read_bytes())


def check_files(directory: Path, told: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """W1: stock reads every tensor bit for bit; data begins on a page; every tensor is aligned."""
    seen: set[str] = set()
    for file in told.files:
        assert file.header_bytes % PAGE_BYTES == 0
        with safe_open(directory / file.name, framework="pt") as opened:
            names = {name for name in opened.keys() if not name.startswith(PAD_PREFIX)}  # noqa: SIM118  (no mapping)
            for name in names:
                value = opened.get_tensor(name)
                assert value.dtype == tensors[name].dtype
                assert tuple(value.shape) == tuple(tensors[name].shape)
                assert bits(value) == bits(tensors[name])
        seen |= names
    assert seen == set(tensors)
    for one in told.tensors:
        if one.nbytes:
            assert one.offset % (DTYPE_BITS[one.dtype] // 8) == 0, one.name
            assert math.prod(one.shape) == 1 or one.offset % ALIGNMENT == 0, one.name
    for unit in told.units():  # W2: what was hashed while writing is what lies there
        data = (directory / unit.file).read_bytes()[unit.offset : unit.offset + unit.length]
        assert blake3(data).hexdigest() == unit.digest


def test_every_dtype_of_the_format_opens_with_stock_safetensors(domain: Domain) -> None:
    tensors = {f"t.{word}": tensor(word, (3, 5), seed) for seed, word in enumerate(WORDS)}
    put(domain, tensors=[source(name, value) for name, value in tensors.items()])
    check_files(artifact(domain), manifest_of(domain), tensors)


def test_the_table_of_dtypes_is_that_of_this_torch() -> None:
    assert {word_of(dtype) for dtype in map(dtype_of, WORDS) if dtype is not None} == set(WORDS)
    for word in WORDS:
        dtype = dtype_of(word)
        assert dtype is not None
        assert dtype.itemsize * 8 == DTYPE_BITS[word]


def test_odd_shapes_and_names_come_back_as_they_were(domain: Domain) -> None:
    tensors = {
        "": tensor("F32", ()),
        "empty": tensor("BF16", (0,)),
        "rows of nothing": tensor("F32", (2, 0)),
        'ünï.çödé \n\t"\\ 😀': tensor("I64", (1, 1, 3)),
        "\ufffd": tensor("U8", (5,)),
        "a" * 5000: tensor("F64", (1,)),
        " leading": tensor("BOOL", (3,)),
    }
    done = put(domain, tensors=[source(name, value) for name, value in tensors.items()])
    told = manifest_of(domain)
    check_files(artifact(domain), told, tensors)
    assert {one.name: one.shape for one in told.tensors} == {name: tuple(value.shape) for name, value in tensors.items()}
    assert done.payload_bytes == payload(domain).stat().st_size


def test_an_artifact_without_tensors_is_one_empty_file(domain: Domain) -> None:
    put(domain, tensors=[])
    told = manifest_of(domain)
    check_files(artifact(domain), told, {})
    assert told.payload_bytes == PAGE_BYTES


@pytest.mark.parametrize(
    ("names", "aliases"),
    [
        ([METADATA_KEY], {}),
        ([f"{PAD_PREFIX}_000001"], {}),
        (["twice", "twice"], {}),
        (["lone \ud800 surrogate"], {}),
        (["a"], {"a": "a"}),
        (["a"], {METADATA_KEY: "a"}),
    ],
)
def test_a_bad_name_is_refused_before_any_byte(domain: Domain, names: list[str], aliases: dict[str, str]) -> None:
    done = publish(domain, identity(), [Given(name, b"x") for name in names], aliases=aliases)
    assert isinstance(done.failure, ProducerUnsupported)
    assert done.failure.reason == "name"
    assert not left_in(domain.layout.temporary)
    assert not left_in(domain.layout.locks) or left_in(domain.layout.locks) == ["domain-init.lock"]


def test_a_dtype_that_the_format_lacks_is_refused(domain: Domain) -> None:
    done = publish(domain, identity(), [Given("x", b"1234", "F4")])
    assert done.failure is not None
    assert done.failure.code is FailureCode.PRODUCER_UNSUPPORTED


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(max_size=12).filter(lambda n: not n.startswith("__")), unique=True, max_size=8))
    sizes = st.lists(st.integers(0, 40), max_size=3)
    return {name: tensor(draw(st.sampled_from(WORDS)), draw(sizes), draw(st.integers(0, 9))) for name in names}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensor_sets(), file_bytes=st.sampled_from([1, 300, 5000, 1 << 30]), seed=st.integers(0, 99))
def test_any_tensors_in_any_order_and_any_files(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], file_bytes: int, seed: int
) -> None:
    """W1, W2, and D1: order and sharding leave the content digest alone."""
    told = []
    for order, limit in ((list(tensors), file_bytes), (random.Random(seed).sample(list(tensors), len(tensors)), 1 << 30)):
        directory = tmp_path_factory.mktemp("files")
        told.append(written(directory, [source(name, tensors[name]) for name in order], limit))
        check_files(directory, told[-1], tensors)
    assert told[0].content_digest == told[1].content_digest
    if file_bytes == 1:
        assert len(told[0].files) >= sum(1 for value in tensors.values() if value.numel())


def written(directory: Path, sources: Sequence[ModelTensor], file_bytes: int) -> Manifest:
    writer = PayloadWriter(directory, "0" * 64, lambda done: None)
    pairs = [writer.write(plan) for plan in plan_files(sources, file_bytes=file_bytes)]
    tensors = tuple(sorted((one for _, some in pairs for one in some), key=lambda one: one.name))
    content = digest.of_content(((t.name, t.kind.value, t.dtype, t.shape, t.digest) for t in tensors), {})
    return Manifest("0" * 64, {}, tensors, tuple(file for file, _ in pairs), content, {}, {})


def test_what_changes_the_content_digest_and_what_does_not(tmp_path: Path) -> None:
    """D1."""
    base = [Given("a", bytes(range(100)), "U8"), Given("b", bytes(8), "F32", (2,))]
    changed = {
        "name": [replace(base[0], name="c"), base[1]],
        "kind": [replace(base[0], kind=TensorKind.BUFFER), base[1]],
        "dtype": [base[0], replace(base[1], dtype="I32")],
        "shape": [base[0], replace(base[1], shape=(1, 2))],
        "bytes": [base[0], replace(base[1], data=bytes(7) + b"\1")],
    }
    domain = store(tmp_path / "root")
    first = put(domain, "base", base).content_digest
    assert put(domain, "order", base[::-1]).content_digest == first
    assert put(domain, "files", base, file_bytes=1).content_digest == first
    for name, tensors in changed.items():
        assert put(domain, name, tensors).content_digest != first, name
    assert put(domain, "alias", base, aliases={"tied": "a"}).content_digest != first
    assert len(list(artifact(domain, "files").glob("*.safetensors"))) == 2


def test_a_content_digest_has_no_order() -> None:
    """D1."""
    rows = [("a", "parameter", "U8", (1,), "0" * 64), ("b", "parameter", "U8", (1,), "1" * 64)]
    assert digest.of_content(rows, {"c": "a", "d": "b"}) == digest.of_content(rows[::-1], {"d": "b", "c": "a"})
    assert digest.of_content(rows, {}) != digest.of_content(rows[:1], {})


def test_fillers_are_there_for_alignment_and_not_in_the_content(domain: Domain) -> None:
    """W1: tensors of an odd size need fillers, which stock sees and the manifest does not; single numbers need next to none."""
    tensors = {"a": tensor("U8", (4097,)), "b": tensor("F32", (3,), 1), "even": tensor("F32", (16,)), "s": tensor("F32", ())}
    tensors |= {f"n{number}": tensor("F64" if number % 2 else "U8", (1,), number) for number in range(9)}
    put(domain, tensors=[source(name, value) for name, value in tensors.items()])
    told = manifest_of(domain)
    check_files(artifact(domain), told, tensors)
    assert [pad.nbytes for pad in told.files[0].fillers] == [63, 4]
    assert {one.name for one in told.tensors} == set(tensors)


def test_units_of_64_mib_are_right_across_their_seams(domain: Domain) -> None:
    """W2: 130 MiB in blocks that do not end at the seams; the digests are those of the file's own ranges."""
    size = 130 * MIB + 3
    put(domain, tensors=[Zeros("zeros", size, block_bytes=3_000_001), Given("after", b"abc")])
    told = next(one for one in manifest_of(domain).tensors if one.name == "zeros")
    expected = [blake3(bytes(length)).hexdigest() for _, length in digest.unit_ranges(size)]
    assert list(told.units) == expected
    assert len(expected) == 3


class Rotating:
    """A producer that has three buffers and uses them in turn, as the contract of `blocks` allows."""

    name, dtype, kind, shape = "rotating", "U8", TensorKind.PARAMETER, (24 * MIB,)

    def blocks(self) -> Iterator[memoryview]:
        buffers = [bytearray(MIB) for _ in range(3)]
        for number in range(24):
            buffer = buffers[number % 3]
            buffer[:] = bytes([number]) * MIB
            yield memoryview(buffer)


def test_a_block_may_be_reused_when_the_third_after_it_is_asked_for(domain: Domain) -> None:
    put(domain, tensors=[Rotating()])
    (told,) = manifest_of(domain).tensors
    data = b"".join(bytes([number]) * MIB for number in range(24))
    assert list(told.units) == [blake3(data).hexdigest()]
    assert payload(domain).read_bytes()[told.offset :] == data


@pytest.mark.parametrize("given_bytes", [0, 9, 11])
def test_a_producer_that_gives_other_bytes_than_it_declared(domain: Domain, given_bytes: int) -> None:
    done = publish(domain, identity(), [Given("x", bytes(given_bytes), shape=(10,))])
    assert isinstance(done.failure, ProducerFailed)
    assert done.failure.reason == "coverage"
    assert not left_in(domain.layout.temporary)


class Raising:
    name, dtype, kind, shape = "bad", "U8", TensorKind.PARAMETER, (10,)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def blocks(self) -> Iterator[memoryview]:
        yield memoryview(bytes(3))
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("of a library"), MemoryError(), OSError(5, "of the source's disk"), KeyError("x")])
def test_whatever_a_producer_raises_is_its_typed_failure(domain: Domain, error: Exception) -> None:
    """A publication that fails must not end a load that went well."""
    done = publish(domain, identity(), [*SMALL, Raising(error)])
    assert done.outcome is PublicationOutcome.FAILED
    assert isinstance(done.failure, ProducerFailed)
    assert done.failure.reason == type(error).__name__
    assert not left_in(domain.layout.temporary)
    assert not left_in(domain.layout.artifacts)


_MEMORY = """
import mmap, os, threading, torch
from hwr.loader.plan import LayoutPlan
from hwr.loader.producer import finalized_model
from hwr.procfs.status import read_status

size, cast = int(sys.argv[2]), sys.argv[3]
domain = store(sys.argv[1])
module = torch.nn.Module()
flat = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_SHARED), dtype=torch.float32)
module.weight = torch.nn.Parameter(flat.view(-1, 1024))
put(domain, "warm-up", finalized_model(torch.nn.Linear(64, 64), LayoutPlan(cast=cast or None)).tensors)
before = read_status(os.getpid()).rss_anon
peak = before
over = threading.Event()
def sample():
    global peak
    while not over.wait(0.002):
        peak = max(peak, read_status(os.getpid()).rss_anon)
sampler = threading.Thread(target=sample)
sampler.start()
put(domain, "big", finalized_model(module, LayoutPlan(cast=cast or None)).tensors)
over.set()
sampler.join()
print(peak - before)
"""


@pytest.mark.parametrize("cast", ["bfloat16", ""])
def test_memory_of_a_publication_does_not_grow_with_the_model(tmp_path: Path, cast: str) -> None:
    """W3: 256 MiB, cast and as they are; RssAnon sampled all the while."""
    assert int(run(_MEMORY, tmp_path / "root", 256 * MIB, cast)) <= 64 * MIB


@pytest.mark.soak
@pytest.mark.parametrize("cast", ["bfloat16", ""])
def test_memory_of_a_publication_of_a_gibibyte(tmp_path: Path, cast: str) -> None:
    """W3."""
    assert int(run(_MEMORY, tmp_path / "root", 1024 * MIB, cast)) <= 64 * MIB
