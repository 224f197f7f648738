"""The header of one safetensors file, read strictly and within bounds.

Owns the format: the length word, the JSON header, the element types, the coverage of the data section; and bounded
reads of a descriptor. Promises that what is accepted opens in stock safetensors (0.8.0 is what the tests compare with),
that every tensor lies inside the file, and that memory stays proportional to a header that is really there: no length
is believed before it was compared with the limit and with the size of the file.
Refuses payload bytes, and everything that stock refuses.

Stricter than stock on purpose: a name given twice (stock lets the last one win), an unknown key in a tensor's entry
(it could change what the bytes mean) or an entry spelt as a list, more than `strict_json.ENTRY_LIMIT_CHARS` for one entry or
`METADATA_LIMIT_NAMES` in the metadata, and sizes beyond 63 bits beside a zero (no array library has them).
As lenient as stock, although the format's text is not: blanks before the first brace.
Absent, null and empty metadata are one thing: an empty mapping.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hwr.checkpoint.foreign import SNIFF_BYTES, foreign_kind, refuse_pointer_or_page
from hwr.checkpoint.strict_json import JsonReader
from hwr.errors import (
    HeaderInvalid,
    HeaderOverLimit,
    NotSafetensors,
    SourceChanged,
    SourceUnreadable,
    TensorInvalid,
    TrailingBytes,
    Truncated,
    errno_text,
)
from hwr.format import DTYPE_BITS, HEADER_LIMIT_BYTES, LENGTH_BYTES, METADATA_KEY, Dtype
from hwr.units import MIB, one_line

METADATA_LIMIT_NAMES: Final = 1 << 16  # training tools write some hundred; values may be as long as they like
READ_BYTES: Final = MIB
_SIZE_LIMIT: Final = (1 << 63) - 1  # what torch and numpy hold in a dimension or a number of elements
_ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})
_JSON_BLANKS: Final = b" \t\n\r"
_STARTS: Final = re.compile(rb"[ \t\n\r]*\{")


_DTYPES: Final = {dtype.value: dtype for dtype in Dtype}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its header describes it; `begin` and `end` count bytes from the start of the data section."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise ValueError(f"a tensor does not lie at [{self.begin}, {self.end}]")

    @property
    def nbytes(self) -> int:
        """Bytes of the payload; 0 for a shape with a zero in it."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A whole header; `tensors` lie in the order of their bytes, without a hole, up to the end of the file."""

    header_bytes: int
    data_start: int
    file_bytes: int
    metadata: Mapping[str, str]
    tensors: tuple[TensorHeader, ...]

    def __post_init__(self) -> None:
        covered = self.tensors[-1].end if self.tensors else 0
        if self.data_start != LENGTH_BYTES + self.header_bytes or self.data_start + covered != self.file_bytes:
            raise ValueError("the tensors of a header cover its file exactly")


def read_header(fd: int, *, file: str) -> FileHeader:
    """Read and check the header of the open safetensors file `fd`; its position stays where it was.

    Raises:
        SourceRejected: one of its kinds; nothing else, whatever the bytes.
    """
    file = os.path.basename(file)
    file_bytes = regular_file(fd, file=file).st_size
    prefix = read_exact(fd, 0, min(file_bytes, SNIFF_BYTES), file=file)
    if file_bytes < LENGTH_BYTES:
        refuse_pointer_or_page(prefix, file=file, file_bytes=file_bytes)
        raise NotSafetensors(file=file, problem=foreign_kind(prefix) or f"{file_bytes} bytes are too few")
    declared = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    first = prefix[LENGTH_BYTES:].lstrip(_JSON_BLANKS)[:1]
    # A length within the limit has four zero bytes, so no text begins with one; gzip and pickle can, and then go on without a brace.
    if declared == 0 or declared > HEADER_LIMIT_BYTES or (first and first != b"{"):
        refuse_pointer_or_page(prefix, file=file, file_bytes=file_bytes)
        if found := foreign_kind(prefix):
            raise NotSafetensors(file=file, problem=found)
        if declared > HEADER_LIMIT_BYTES:
            raise HeaderOverLimit(file=file, declared_header_bytes=declared, limit=HEADER_LIMIT_BYTES, file_bytes=file_bytes)
        start = bytes(prefix[LENGTH_BYTES : LENGTH_BYTES + min(declared, 4)])
        if LENGTH_BYTES + declared > file_bytes:
            raise NotSafetensors(file=file, problem=f"no header follows the first 8 bytes, but {start!r}")
        raise HeaderInvalid(file=file, problem=_bad_start(start))
    if LENGTH_BYTES + declared > file_bytes:
        # The header itself is cut, so what it would have described is unknown: the least that is missing.
        expected = LENGTH_BYTES + declared
        raise Truncated(file=file, missing_bytes=expected - file_bytes, expected_bytes=expected, file_bytes=file_bytes, header_cut=True)
    return parse_header(_read_text(fd, declared, file=file), file=file, file_bytes=file_bytes)


def parse_header(raw: bytes | bytearray, *, file: str, file_bytes: int) -> FileHeader:
    """Check the JSON header `raw` (without its length word) of a file of `file_bytes` bytes.

    Raises:
        SourceRejected: `HeaderInvalid`, `TensorInvalid`, `Truncated` or `TrailingBytes`.
    """
    file = os.path.basename(file)
    if not _STARTS.match(raw):
        raise HeaderInvalid(file=file, problem=_bad_start(bytes(raw.lstrip(_JSON_BLANKS)[:4])))
    metadata: Mapping[str, str] = {}
    tensors: list[TensorHeader] = []
    try:
        reader = JsonReader(str(raw, "utf-8"))
        for name in reader.members():
            if name == METADATA_KEY:
                metadata = reader.string_map_or_null(METADATA_LIMIT_NAMES)
            else:
                try:
                    tensors.append(_tensor(name, reader.entry()))
                except ValueError as error:
                    raise TensorInvalid(file=file, tensor=name, problem=one_line(str(error))) from None
        reader.end()
    except UnicodeDecodeError as error:
        raise HeaderInvalid(file=file, problem=f"not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise HeaderInvalid(file=file, problem=one_line(str(error))) from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    covered = _covered(tensors, file=file)
    expected = LENGTH_BYTES + len(raw) + covered
    if file_bytes < expected:
        raise Truncated(file=file, missing_bytes=expected - file_bytes, expected_bytes=expected, file_bytes=file_bytes)
    if file_bytes > expected:
        raise TrailingBytes(file=file, extra_bytes=file_bytes - expected, expected_bytes=expected, file_bytes=file_bytes)
    return FileHeader(len(raw), LENGTH_BYTES + len(raw), file_bytes, metadata, tuple(tensors))


def _tensor(name: str, entry: dict[str, Any]) -> TensorHeader:
    if entry.keys() != _ENTRY_KEYS:
        missing, unknown = sorted(_ENTRY_KEYS - entry.keys()), sorted(entry.keys() - _ENTRY_KEYS)
        raise ValueError(f"its entry lacks {', '.join(missing)}" if missing else f"its entry has the unknown key {unknown[0]!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    known = _DTYPES.get(dtype) if type(dtype) is str else None
    if known is None:
        raise ValueError(f"unknown dtype {dtype!r}" if type(dtype) is str else "its dtype is not a string")
    if type(offsets) is not list or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        raise ValueError("its data_offsets are not two integers")
    begin, end = offsets
    if begin > end:
        raise ValueError(f"its data_offsets go backwards: {begin} to {end}")
    if type(shape) is not list:
        raise ValueError("its shape is not a list")
    # Zeros are left out of the product: whether the rest overflows must not depend on the order of the dimensions.
    bits = DTYPE_BITS[dtype]
    for size in shape:
        if type(size) is not int:  # True and 1.0 are equal to 1, and are not sizes
            raise ValueError("its shape holds something other than integers")
        bits *= size or 1
        if bits > _SIZE_LIMIT:
            raise ValueError("its shape is larger than 63 bits can count")
    if 0 in shape:
        bits = 0
    if end - begin != bits >> 3 or bits & 7:
        raise ValueError(f"{dtype} of shape {one_line(str(shape), 80)} takes {bits / 8:.15g} bytes, its data_offsets span {end - begin}")
    return TensorHeader(name, known, tuple(shape), begin, end)


def _covered(tensors: list[TensorHeader], *, file: str) -> int:
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            gap = tensor.begin - position
            problem = f"a hole of {gap} bytes lies before it" if gap > 0 else f"overlaps the tensor before it by {-gap} bytes"
            raise TensorInvalid(file=file, tensor=tensor.name, problem=problem)
        position = tensor.end
    return position


def _bad_start(start: bytes) -> str:
    if not start.strip(_JSON_BLANKS):
        return "it is empty or blank"
    return "it begins with a byte order mark" if start.startswith(b"\xef\xbb\xbf") else f"it begins with {start!r}, not with a brace"


# Descriptors -----------------------------------------------------------------------------------------------------


def regular_file(fd: int, *, file: str) -> os.stat_result:
    """Return the facts of a descriptor; refuse what is not a regular file."""
    try:
        facts = os.fstat(fd)
    except OSError as error:
        raise SourceUnreadable(file=file, problem=errno_text(error)) from error
    if not stat.S_ISREG(facts.st_mode):
        raise SourceUnreadable(file=file, problem=f"it is {kind_of(facts.st_mode)}, not a regular file")
    return facts


def kind_of(mode: int) -> str:
    """Name the kind of a file that is not a regular one."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_exact(fd: int, offset: int, count: int, *, file: str) -> bytearray:
    """Read `count` bytes that the file had when it was looked at; fewer are a file that changed."""
    data = bytearray()
    while len(data) < count:
        try:
            piece = os.pread(fd, min(READ_BYTES, count - len(data)), offset + len(data))
        except OSError as error:
            raise SourceUnreadable(file=file, problem=errno_text(error)) from error
        if not piece:
            raise SourceChanged(file=file)
        data += piece
    return data


def _read_text(fd: int, count: int, *, file: str) -> bytearray:
    # NUL is never JSON: a sparse or zero-padded header ends at its first zero, before the rest is read into memory.
    data = bytearray()
    while len(data) < count:
        piece = read_exact(fd, LENGTH_BYTES + len(data), min(READ_BYTES, count - len(data)), file=file)
        if (nul := piece.find(0)) >= 0:
            raise HeaderInvalid(file=file, problem=f"a NUL byte at position {len(data) + nul}; only blanks may pad it")
        data += piece
    return data
