"""What one file may look like: field cases 1, 2, 5 and 6 and their kinds."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from checkpoint_files import REPOSITORY, encode, entry, no_descriptor_left, read_file, tensors_file

from hwr.checkpoint.foreign import SNIFF_BYTES
from hwr.checkpoint.header import (
    DTYPE_BITS,
    HEADER_LIMIT_BYTES,
    METADATA_LIMIT_NAMES,
    READ_BYTES,
    Dtype,
    FileHeader,
    TensorHeader,
    parse_header,
    read_exact,
    read_header,
)
from hwr.errors import (
    HeaderInvalid,
    HeaderOverLimit,
    LfsPointer,
    NotSafetensors,
    NotSafetensorsHtml,
    SourceChanged,
    SourceRejected,
    SourceUnreadable,
    TensorInvalid,
    TrailingBytes,
    Truncated,
)

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 4976698672\n"


def reject(path: Path, content: bytes, kind: type[SourceRejected]) -> SourceRejected:
    path.write_bytes(content)
    with no_descriptor_left(), pytest.raises(SourceRejected) as caught:
        read_file(path)
    assert type(caught.value) is kind, caught.value
    first, _, second = str(caught.value).partition("\n")
    assert path.name in first
    assert second
    assert str(path.parent) not in first  # basenames only
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# Case 1: what is no safetensors file at all


@pytest.mark.parametrize(
    "content",
    [
        POINTER,
        POINTER.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + POINTER,
        b"\r\n" + POINTER,
        POINTER.decode().encode("utf-16"),
        POINTER.replace(b"https://git-lfs.github.com/spec/v1", b"https://hawser.github.com/spec/v1"),
        POINTER.replace(b"https://git-lfs.github.com/spec/v1", b"http://git-media.io/v/2"),
        POINTER.replace(b"oid", b"ext-0-foo sha256:" + b"00" * 32 + b"\noid"),
        POINTER.rstrip(b"\n"),
    ],
    ids=["plain", "crlf", "bom", "blank-line", "utf-16", "hawser", "git-media", "extension", "no-newline"],
)
def test_a_git_lfs_pointer_says_how_large_the_real_file_is(path: Path, content: bytes) -> None:
    error = reject(path, content, LfsPointer)
    assert error.details["expected_bytes"] == 4976698672
    assert error.details["file_bytes"] == len(content)
    assert "4976698672" in error.cause


def test_a_cut_pointer_is_still_a_pointer(path: Path) -> None:
    error = reject(path, POINTER[:60], LfsPointer)
    assert error.details["expected_bytes"] is None
    assert "the real file has an unknown number of bytes, this one 60" in error.cause


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html><head><title>401</title></head></html>",
        b"\n\n  <!doctype HTML>\r\n<html>",
        b"<html>",
        b"\xef\xbb\xbf<HTML lang=en><body>gone",
        b"<!-- proxy --><html><body>blocked</body></html>",
        b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "x"><html xmlns="y"></html>',
        b"<head><script>{}</script></head>",
        b"<center>{502}</center>",
        b"<html>\n{\n" + b" " * 5000,
        "<!DOCTYPE html><html>é".encode("utf-16"),
    ],
)
def test_an_html_page_is_named(path: Path, content: bytes) -> None:
    reject(path, content, NotSafetensorsHtml)


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return stream.getvalue()


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights.bin"))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (b"\x02\0\0\0\0\0\0", "7 bytes"),
        (bytes(7), "zeros"),
        (bytes(8), "zeros"),
        (bytes(5000), "zeros"),
        (zipped(), "zip archive"),
        (gzip.compress(b"x" * 500, mtime=0), "gzip"),
        (gzip.compress(b"x" * 500, mtime=1_700_000_000), "gzip"),
        (tarred(), "tar"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"\x93NUMPY\x01\0v\0{'descr': '<f4'}", "NumPy"),
        (b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>', "XML"),
        (b'{"error": "Repository not found"}', "Repository not found"),
        (b'[{"error": 1}]', "JSON"),
        (b"Entry not found", "Entry not found"),
        (b"Access to model x is restricted.\n\x1b[31m", "restricted"),
        ("Доступ запрещён".encode(), "text"),
        (b"\x05\0\0\0\0\0\0\0\x01\x02", "no header follows"),
        *((pickle.dumps({"a": 1}, protocol), "pickle") for protocol in (2, 3, 4, 5)),
        *((pickle.dumps({"a": [1] * 500}, protocol), "pickle") for protocol in (2, 3, 4, 5)),
    ],
)
def test_other_kinds_of_file_are_named(path: Path, content: bytes, words: str) -> None:
    error = reject(path, content, NotSafetensors)
    assert words in error.cause
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("declared", [HEADER_LIMIT_BYTES + 1, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_length_beyond_the_limit_is_told_with_limit_and_size(path: Path, declared: int) -> None:
    content = encode(b"{}", declared=declared)
    error = reject(path, content, HeaderOverLimit)
    assert (error.details["declared_header_bytes"], error.details["limit"]) == (declared, 100_000_000)
    assert str(declared) in error.cause
    assert str(len(content)) in error.cause


def test_the_limit_itself_is_legal_and_one_more_is_not(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(HEADER_LIMIT_BYTES.to_bytes(8, "little") + b"{}" + b" " * (HEADER_LIMIT_BYTES - 2))
    assert read_file(path).header_bytes == HEADER_LIMIT_BYTES
    with path.open("r+b") as stream:
        stream.write((HEADER_LIMIT_BYTES + 1).to_bytes(8, "little"))
        stream.seek(0, os.SEEK_END)
        stream.write(b" ")
    with pytest.raises(HeaderOverLimit):
        read_file(path)


@pytest.mark.parametrize("size", [SNIFF_BYTES - 8, SNIFF_BYTES, READ_BYTES - 8, READ_BYTES, 2 * READ_BYTES, 99_994, 100_000])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_headers_as_long_as_an_internal_read_arrive_whole(path: Path, size: int, offset: int) -> None:
    raw = json.dumps({"last": entry()}).encode()
    padded = b"{" + b" " * (size + offset - len(raw)) + raw[1:]
    path.write_bytes(encode(padded, b"1234"))
    assert [tensor.name for tensor in read_file(path).tensors] == ["last"]


LIMITED_READER = """
import os, resource, sys
from hwr.checkpoint.header import read_header
from hwr.errors import SourceRejected
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (24 << 20), -1))
fd = os.open(sys.argv[1], os.O_RDONLY)
try:
    read_header(fd, file="x")
except SourceRejected as error:
    print(error.code)
"""


@pytest.mark.parametrize(
    ("declared", "start", "code"),
    [
        (1 << 39, b"", "header_over_limit"),
        (1 << 39, b"{", "header_over_limit"),
        ((1 << 64) - 1, b"{", "header_over_limit"),
        (HEADER_LIMIT_BYTES, b"", "header_invalid"),
        (HEADER_LIMIT_BYTES, b"{", "header_invalid"),
        (HEADER_LIMIT_BYTES, b'{"a":', "header_invalid"),
        (2, b"{}", "trailing_bytes"),
    ],
)
def test_a_sparse_tebibyte_allocates_nothing(path: Path, declared: int, start: bytes, code: str) -> None:
    path.write_bytes(encode(start, declared=declared))
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(SourceRejected):
            read_file(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * READ_BYTES
    command = [sys.executable, "-c", LIMITED_READER, str(path)]
    child = subprocess.run(command, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.strip() == code


# Case 2: short and long files


def test_a_short_file_says_how_much_is_missing(path: Path) -> None:
    whole = encode({"a": entry("F32", [100], 0, 400)}, bytes(400))
    error = reject(path, whole[:-200], Truncated)
    assert (error.details["missing_bytes"], error.details["expected_bytes"]) == (200, len(whole))
    assert f"truncated: 200 of {len(whole)} bytes are missing" in error.cause


def test_a_long_file_says_how_much_is_too_much(path: Path) -> None:
    whole = encode({"a": entry("F32", [1], 0, 4)}, bytes(4))
    error = reject(path, whole + bytes(100), TrailingBytes)
    assert (error.details["extra_bytes"], error.details["expected_bytes"]) == (100, len(whole))


def test_every_cut_of_a_file_is_a_typed_refusal(path: Path) -> None:
    whole = tensors_file("a", "b")
    for size in range(len(whole)):
        reject(path, whole[:size], NotSafetensors if size < 8 else Truncated)


def test_a_cut_inside_the_header_is_truncated_not_malformed(path: Path) -> None:
    whole = tensors_file("a", "b")
    error = reject(path, whole[:30], Truncated)
    missing, expected = error.details["missing_bytes"], error.details["expected_bytes"]
    assert missing + 30 == expected <= len(whole)
    assert f"truncated: at least {missing} of at least {expected} bytes are missing" in error.cause


@pytest.mark.parametrize("extra", [1, 8, 4096])
def test_a_file_without_tensors_ends_after_its_header(path: Path, extra: int) -> None:
    reject(path, encode({}) + bytes(extra), TrailingBytes)


# Cases 5 and 6: odd and legal


@pytest.mark.parametrize("raw", [b"{}", b"{}   ", b"  {}", b"\n\t\r{ }\n", b'{"__metadata__": {}}', b'{"__metadata__":null}'])
def test_a_file_may_hold_nothing(path: Path, raw: bytes) -> None:
    path.write_bytes(encode(raw))
    header = read_file(path)
    assert (header.tensors, header.metadata, header.data_start) == ((), {}, 8 + len(raw))


def test_metadata_are_kept_as_they_are(path: Path) -> None:
    metadata = {"format": "pt", "": "", "ключ": "\0\n", "__metadata__": "x" * 2_000_000}
    path.write_bytes(encode({"__metadata__": metadata}))
    assert read_file(path).metadata == metadata


def test_zero_sizes_scalars_and_strange_names_keep_names_shapes_and_types(path: Path) -> None:
    header = {
        "": entry("F32", [], 0, 4),
        "z0": entry("F64", [0], 4, 4),
        "z20": entry("I64", [2, 0], 4, 4),
        "a\0b": entry("U8", [1, 1, 1], 4, 5),
        "😀": entry("BF16", [1], 5, 7),
        "end": entry("F16", [0, 3], 7, 7),
    }
    path.write_bytes(encode(header, bytes(7)))
    found = {tensor.name: tensor for tensor in read_file(path).tensors}
    assert {name: (str(t.dtype), list(t.shape), [t.begin, t.end]) for name, t in found.items()} == {
        name: (value["dtype"], value["shape"], value["data_offsets"]) for name, value in header.items()
    }
    assert found["z20"].nbytes == 0


def test_unaligned_data_are_legal(path: Path) -> None:
    path.write_bytes(
        encode(b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}} ', bytes(11))
    )
    assert [(tensor.name, tensor.begin) for tensor in read_file(path).tensors] == [("a", 0), ("b", 3)]


def test_tensors_come_in_the_order_of_their_bytes(path: Path) -> None:
    path.write_bytes(encode({"late": entry(begin=4, end=8), "zero": entry(shape=[0], begin=4, end=4), "early": entry()}, bytes(8)))
    assert [tensor.name for tensor in read_file(path).tensors] == ["early", "zero", "late"]


@pytest.mark.parametrize("dtype", list(Dtype))
def test_every_type_has_its_width(path: Path, dtype: Dtype) -> None:
    path.write_bytes(encode({"a": entry(dtype, [8], 0, dtype.bits)}, bytes(dtype.bits)))
    assert read_file(path).tensors[0].dtype is dtype
    assert DTYPE_BITS[dtype] == dtype.bits


# What a header may not be

U8 = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[]", "brace"),
        (b"null", "brace"),
        (b"   ", "blank"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"{}\0\0", "NUL"),
        (b"{} {}", "the end"),
        (b"{", "ends before"),
        (b'{"a"', "ends before"),
        (b'{"__metadata__":{},}', "a string"),
        (b'{"__metadata__":{},"__metadata__":{}}', "twice"),
        (b'{"__metadata__":{"a":"1","a":"2"}}', "twice"),
        (b'{"__metadata__":{"a":1}}', "a string"),
        (b'{"__metadata__":{"a":null}}', "a string"),
        (b'{"__metadata__":{"a":{"b":"c"}}}', "a string"),
        (b'{"__metadata__":[]}', "'{'"),
        (b'{"__metadata__":"x"}', "'{'"),
        (b'{"__metadata__":{"a":"\\ud800"}}', "surrogate"),
        (f'{{"__metadata__":{{{U8}}}}}'.encode(), "a string"),
        (f'{{"\\udc80":{{{U8}}}}}'.encode(), "surrogate"),
        (f'{{"a\xff":{{{U8}}}}}'.encode("latin-1"), "UTF-8"),
        (f'{{"\x01":{{{U8}}}}}'.encode(), "control character"),
        (f'{{"a":{{{U8}}},"a":{{{U8}}}}}'.encode(), "twice"),
        (f"{{a:{{{U8}}}}}".encode(), "a string"),
        (f'{{"a" {{{U8}}}}}'.encode(), "':'"),
    ],
)
def test_headers_that_are_not_strict_json_maps(path: Path, raw: bytes, words: str) -> None:
    assert words in reject(path, encode(raw, b"1234"), HeaderInvalid).cause


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('["U8",[4],[0,4]]', "flat object"),
        ("null", "flat object"),
        ("NaN", "flat object"),
        ("[" * 200_000 + "]" * 200_000, "flat object"),
        (f'{{{U8},"x":1}}', "unknown key 'x'"),
        (f'{{{U8},"x":{{"y":{{}}}}}}', "flat object"),
        (f'{{{U8},"x":{"[" * 20_000}{"]" * 20_000}}}', "nested"),
        (f'{{{U8},"dtype":"U8"}}', "twice"),
        (f"{{{U8}{' ' * 70_000}}}", "65536"),
        ('{"shape":[4],"data_offsets":[0,4]}', "lacks dtype"),
        ("{}", "lacks data_offsets, dtype, shape"),
        ('{"dtype":"u8","shape":[4],"data_offsets":[0,4]}', "unknown dtype 'u8'"),
        ('{"dtype":"F128","shape":[4],"data_offsets":[0,4]}', "unknown dtype"),
        ('{"dtype":8,"shape":[4],"data_offsets":[0,4]}', "dtype"),
        ('{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}', "dtype"),
        ('{"dtype":' + "[" * 900 + "]" * 900 + ',"shape":[4],"data_offsets":[0,4]}', ""),
        ('{"dtype":"}","shape":[4],"data_offsets":[0,4]}', "Unterminated"),
        ('{"dtype":"U8","shape":null,"data_offsets":[0,4]}', "shape"),
        ('{"dtype":"U8","shape":4,"data_offsets":[0,4]}', "shape"),
        ('{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}', "shape"),
        ('{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}', "shape"),
        ('{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}', "shape"),
        ('{"dtype":"U8","shape":[true],"data_offsets":[0,1]}', "shape"),
        ('{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}', "NaN"),
        ('{"dtype":"U8","shape":[Infinity],"data_offsets":[0,4]}', "Infinity"),
        ('{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}', "negative"),
        ('{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}', "negative"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}', "negative"),
        ('{"dtype":"U8","shape":[' + "9" * 10_000 + '],"data_offsets":[0,4]}', "20 digits"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551615]}', "20 digits"),
        ('{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}', "63 bits"),
        ('{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}', "63 bits"),
        ('{"dtype":"F64","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}', "63 bits"),
        ('{"dtype":"F64","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}', "63 bits"),
        ('{"dtype":"U8","shape":[' + "2," * 70 + '2],"data_offsets":[0,4]}', "63 bits"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[4,0]}', "backwards"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[4]}', "data_offsets"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}', "data_offsets"),
        ('{"dtype":"U8","shape":[4],"data_offsets":null}', "data_offsets"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[0,4.0]}', "data_offsets"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[false,4]}', "data_offsets"),
        ('{"dtype":"U8","shape":[3],"data_offsets":[0,4]}', "takes 3 bytes"),
        ('{"dtype":"U8","shape":[0],"data_offsets":[0,4]}', "takes 0 bytes"),
        ('{"dtype":"F32","shape":[],"data_offsets":[0,3]}', "takes 4 bytes"),
        ('{"dtype":"F4","shape":[3],"data_offsets":[0,1]}', "takes 1.5 bytes"),
        ('{"dtype":"F6_E2M3","shape":[1],"data_offsets":[0,0]}', "takes 0.75 bytes"),
        ('{"dtype":"U8","shape":[4],"data_offsets":[1,5]}', "a hole of 1 bytes"),
    ],
)
def test_entries_that_describe_no_tensor(path: Path, value: str, words: str) -> None:
    error = reject(path, encode(f'{{"the name":{value}}}'.encode(), b"12345"), TensorInvalid)
    assert "'the name'" in error.cause
    assert words in error.cause
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (entry(begin=5, end=9), "a hole of 1 bytes"),
        (entry(begin=0, end=4), "overlaps"),
        (entry(begin=3, end=7), "overlaps the tensor before it by 1 bytes"),
        (entry(shape=[0], begin=2, end=2), "overlaps"),
        (entry(shape=[0], begin=9, end=9), "a hole of 5 bytes"),
    ],
)
def test_bytes_belong_to_exactly_one_tensor(path: Path, second: dict[str, object], words: str) -> None:
    assert words in reject(path, encode({"a": entry(), "b": second}, bytes(9)), TensorInvalid).cause


def test_names_from_outside_reach_no_terminal_unescaped(path: Path) -> None:
    hostile = path.with_name("m\x1b[31m\udcff.safetensors")
    for name in ("\x1b]0;owned\x07\u202e\n", "n" * 5_000_000, "\0"):
        hostile.write_bytes(encode({name: entry("U8", [3])}))
        with pytest.raises(TensorInvalid) as caught:
            read_file(hostile)
        text = str(caught.value)
        assert all(line.isprintable() for line in text.split("\n"))
        assert text.count("\n") == 1
        text.encode()
        assert len(text) < 10_000


def test_metadata_have_a_bound(path: Path) -> None:
    names = {str(number): "" for number in range(METADATA_LIMIT_NAMES)}
    path.write_bytes(encode({"__metadata__": names}))
    assert len(read_file(path).metadata) == METADATA_LIMIT_NAMES
    reject(path, encode({"__metadata__": {**names, "one more": ""}}), HeaderInvalid)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":' + b"[" * 4_000_000,
        b'{"a":[' + b"[]," * 1_400_000,
        b'{"a":{' + b'"x":' * 1_000_000,
        b'{"a":{"dtype":"}", "shape":[' + b"[]," * 1_400_000 + b"]}}",
        b'{"__metadata__":{' + b",".join(b'"%x":""' % number for number in range(400_000)) + b"}}",
        b'{"__metadata__":{"a":"' + b"\\u0041" * 700_000 + b'","a":""}}',
        b"{" + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(70_000)) + b",}",
        b"{" + b"\n" * 4_000_000,
        b'{"\xf0\x9f\x98\x80' + b"a" * 4_000_000,
    ],
    ids=["deep", "lists", "names", "brace-in-string", "metadata", "escapes", "tensors", "blanks", "wide"],
)
def test_a_hostile_header_costs_a_small_multiple_of_its_length(raw: bytes) -> None:
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(SourceRejected):
            parse_header(raw, file="x", file_bytes=8 + len(raw))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(raw) + (8 << 20)
    assert time.monotonic() - started < 30


def test_many_tensors_are_parsed_in_seconds(path: Path) -> None:
    count = 60_000
    names = [f"model.layers.{number}.mlp.experts.weight" for number in range(count)]
    path.write_bytes(tensors_file(*names))
    started = time.process_time()
    header = read_file(path)
    assert time.process_time() - started < 5  # 0.4 s on the slowest machine seen
    assert [tensor.name for tensor in header.tensors] == names


# Descriptors


def test_what_is_no_regular_file_is_refused_without_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for target, flags in ((tmp_path, os.O_DIRECTORY), (tmp_path / "fifo", os.O_NONBLOCK), (Path("/dev/zero"), 0)):
        fd = os.open(target, os.O_RDONLY | flags)
        try:
            with pytest.raises(SourceUnreadable, match="not a regular file"):
                read_header(fd, file="x")
        finally:
            os.close(fd)


def test_an_error_of_the_kernel_is_named(path: Path) -> None:
    path.write_bytes(tensors_file("a"))
    fd = os.open(path, os.O_WRONLY)
    try:
        with pytest.raises(SourceUnreadable, match="EBADF"):
            read_header(fd, file="x")
    finally:
        os.close(fd)
    with pytest.raises(SourceUnreadable, match="EBADF"):
        read_header(resource.RLIM_INFINITY if resource.RLIM_INFINITY > 0 else 1_000_000, file="x")


def test_a_file_that_ends_early_has_changed(path: Path) -> None:
    path.write_bytes(bytes(10))
    with path.open("rb") as stream, pytest.raises(SourceChanged):
        read_exact(stream.fileno(), 4, 7, file="x")


def test_reading_leaves_the_position_of_the_descriptor_alone(path: Path) -> None:
    path.write_bytes(tensors_file("a"))
    with path.open("rb") as stream:
        stream.seek(3)
        read_header(stream.fileno(), file="x")
        assert stream.tell() == 3


def test_contradictions_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="does not lie"):
        TensorHeader("a", Dtype.U8, (1,), 4, 3)
    with pytest.raises(ValueError, match="cover"):
        FileHeader(2, 10, 11, {}, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorHeader("a", Dtype.U8, (1,), 0, 1).begin = 1  # type: ignore[misc]


def test_values_and_errors_cross_processes(path: Path) -> None:
    path.write_bytes(tensors_file("a"))
    header = read_file(path)
    assert pickle.loads(pickle.dumps(header)) == header
    for content, kind in ((POINTER, LfsPointer), (POINTER[:60], LfsPointer), (path.read_bytes()[:30], Truncated)):
        error = reject(path, content, kind)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.details) == (kind, str(error), error.details)
        path.write_bytes(tensors_file("a"))
