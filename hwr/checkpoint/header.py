"""The header of one safetensors file, read strictly and within bounds.

Owns the format: the length word, the JSON header, the element types, the coverage of the data section; and the
recognition of files that are something else. Promises that what is accepted opens in stock safetensors (0.8.0 is what
the tests compare with), that every tensor lies inside the file, and that memory stays proportional to a header that is
really there: no length is believed before it was compared with the limit and with the size of the file.
Refuses payload bytes, and everything that stock refuses.

Stricter than stock on purpose: a name given twice (stock lets the last one win), an unknown key in a tensor's entry
(it could change what the bytes mean) or an entry spelt as a list, more than `ENTRY_LIMIT_CHARS` for one entry or
`METADATA_LIMIT_NAMES` in the metadata, and sizes beyond 63 bits beside a zero (no array library has them).
As lenient as stock, although the format's text is not: blanks before the first brace.
Absent, null and empty metadata are one thing: an empty mapping.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hwr.errors import (
    HeaderInvalid,
    HeaderOverLimit,
    LfsPointer,
    NotSafetensors,
    NotSafetensorsHtml,
    SourceChanged,
    SourceUnreadable,
    TensorInvalid,
    TrailingBytes,
    Truncated,
    errno_text,
)
from hwr.units import MIB, one_line

LENGTH_BYTES: Final = 8  # little-endian u64 before the header
HEADER_LIMIT_BYTES: Final = 100_000_000  # the format's own limit; stock accepts exactly this and no more
ENTRY_LIMIT_CHARS: Final = 1 << 16  # one tensor's entry: 64 dimensions (the most torch has) of 20 digits are 1,400
METADATA_LIMIT_NAMES: Final = 1 << 16  # training tools write some hundred; values may be as long as they like
SNIFF_BYTES: Final = 1024  # Git LFS promises pointers below this; error pages say what they are sooner
READ_BYTES: Final = MIB
METADATA_KEY: Final = "__metadata__"
_SIZE_LIMIT: Final = (1 << 63) - 1  # what torch and numpy hold in a dimension or a number of elements
_ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})
_JSON_BLANKS: Final = b" \t\n\r"
_STARTS: Final = re.compile(rb"[ \t\n\r]*\{")


class Dtype(StrEnum):
    """An element type of the format, as spelt in headers; the closed set of safetensors 0.8.0."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"
    C64 = "C64"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"

    @property
    def bits(self) -> int:
        """Bits of one element; below 8 the elements are packed."""
        return DTYPE_BITS[self]


# Every name says its own width, but for BOOL: one byte.
DTYPE_BITS: Final[Mapping[str, int]] = {
    dtype.value: 8 if dtype is Dtype.BOOL else int(re.sub(r"^[A-Z]+(\d+).*$", r"\1", dtype.value)) for dtype in Dtype
}
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
        raise NotSafetensors(file=file, problem=_foreign(prefix) or f"{file_bytes} bytes are too few")
    declared = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    first = prefix[LENGTH_BYTES:].lstrip(_JSON_BLANKS)[:1]
    # A length within the limit has four zero bytes, so no text begins with one; gzip and pickle can, and then go on without a brace.
    if declared == 0 or declared > HEADER_LIMIT_BYTES or (first and first != b"{"):
        refuse_pointer_or_page(prefix, file=file, file_bytes=file_bytes)
        if found := _foreign(prefix):
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
        raise Truncated(file=file, missing_bytes=expected - file_bytes, expected_bytes=expected, file_bytes=file_bytes)
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


# JSON within bounds ----------------------------------------------------------------------------------------------


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_no_constant)
_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_FLAT_OBJECT: Final = re.compile(rf"\{{[^{{}}]{{0,{ENTRY_LIMIT_CHARS}}}\}}")
_LONG_NUMBER: Final = re.compile(r"[0-9]{20}")  # 2^63 - 1 has 19
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class JsonReader:
    """Walk one JSON object from member to member, so that nothing is built that was not asked for.

    `members` yields a name; the caller then takes that member's value with one of the other methods. Every method
    raises `ValueError` for what is not strict JSON, is given twice, or is longer than the caller allows.
    """

    __slots__ = ("_position", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def members(self) -> Iterator[str]:
        """Yield the names of the object that begins here; a name that was there already is refused."""
        seen: set[str] = set()
        self._expect("{")
        if self._peek() == "}":
            self._position += 1
            return
        while True:
            name = self.string()
            if name in seen:
                raise ValueError(f"the name {one_line(name, 200)!r} is given twice")
            seen.add(name)
            self._expect(":")
            yield name
            if self._peek() == "}":
                self._position += 1
                return
            self._expect(",")

    def string(self) -> str:
        """Take a string without lone surrogates."""
        if self._peek() != '"':
            raise self._unexpected("a string")
        value, self._position = _DECODER.raw_decode(self._text, self._position)
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError("a string holds half of a surrogate pair")
        return str(value)

    def string_map_or_null(self, limit_names: int) -> dict[str, str]:
        """Take an object of at most `limit_names` strings, or null for an empty one."""
        self._peek()
        if self._text.startswith("null", self._position):
            self._position += 4
            return {}
        found: dict[str, str] = {}
        for name in self.members():
            if len(found) == limit_names:
                raise ValueError(f"more than {limit_names} names")
            found[name] = self.string()
        return found

    def entry(self) -> dict[str, Any]:
        """Take an object that holds no other, of at most `ENTRY_LIMIT_CHARS` characters, its numbers of at most 19 digits."""
        self._peek()
        match = _FLAT_OBJECT.match(self._text, self._position)
        if match is None:
            found = self._text[self._position : self._position + 12]
            raise ValueError(f"its entry is not a flat object of at most {ENTRY_LIMIT_CHARS} characters, but begins with {found!r}")
        # Only the matched text is decoded: a brace inside a string cannot lead the decoder any further. Nothing legal
        # holds a minus sign, and Python would read -0 as 0.
        text = match[0]
        if "-" in text or _LONG_NUMBER.search(text):
            raise ValueError("a number is negative or has 20 digits or more")
        value: dict[str, Any] = _guarded(text, 0)[0]
        self._position = match.end()
        return value

    def any_value(self, limit_chars: int) -> Any:
        """Take a value of any kind of at most `limit_chars` characters."""
        self._peek()
        value, taken = _guarded(self._text[self._position : self._position + limit_chars], 0)
        self._position += taken
        return value

    def end(self) -> None:
        """Refuse anything but blanks after the object."""
        if self._peek():
            raise self._unexpected("the end")

    def _peek(self) -> str:
        found = self._text[self._position : self._position + 1]
        if found and found not in " \t\n\r":  # compact JSON has no blanks: this is the usual way out
            return found
        match = _BLANKS.match(self._text, self._position)
        self._position = match.end() if match else self._position
        return self._text[self._position : self._position + 1]

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._unexpected(repr(character))
        self._position += 1

    def _unexpected(self, wanted: str) -> ValueError:
        found = self._text[self._position : self._position + 12]
        return ValueError(f"{wanted} should stand at character {self._position}, not {found!r}" if found else f"it ends before {wanted}")


def _guarded(text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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


# What else it may be ---------------------------------------------------------------------------------------------

_MAGICS: Final = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it (a renamed .bin or .pt?)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "gzip-compressed"),
    (b"GGUF", "a GGUF model"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (b"\xfd7zXZ", "xz-compressed"),
    (b"BZh", "bzip2-compressed"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x7fELF", "an ELF binary"),
)
# The aliases that Git LFS itself still accepts: git-media and hawser are its older names.
_POINTER: Final = re.compile(r"version\s+\S*(git-lfs|hawser|git-media)", re.IGNORECASE)
_POINTER_SIZE: Final = re.compile(r"^size[ \t]+(\d{1,20})\s*$", re.MULTILINE)
_HTML: Final = re.compile(r"<(!doctype\s+html|!--|html|head|body|title|script|meta|center|div|h1|p)\b|<!--", re.IGNORECASE)


def refuse_pointer_or_page(prefix: bytes | bytearray, *, file: str, file_bytes: int) -> None:
    """Refuse what a download tends to leave in place of a file; `prefix` is its first `SNIFF_BYTES` bytes.

    Raises:
        LfsPointer: with the size that the pointer promises, or words if the pointer is cut.
        NotSafetensorsHtml: an HTML page.
    """
    text = _as_text(prefix)
    if _POINTER.match(text):
        size = _POINTER_SIZE.search(text)
        raise LfsPointer(file=file, expected_bytes=int(size[1]) if size else "an unknown number of", file_bytes=file_bytes)
    if text.startswith("<") and _HTML.search(text):
        raise NotSafetensorsHtml(file=file, file_bytes=file_bytes)


def _foreign(prefix: bytes | bytearray) -> str:
    if not prefix:
        return "it is empty"
    if not prefix.strip(b"\0"):
        return "it begins with zeros: space was set aside, the content never arrived"
    for magic, found in _MAGICS:
        if prefix.startswith(magic):
            return f"it is {found}"
    if prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "it is a Python pickle (a renamed .bin or .pt?)"
    if prefix[257:262] == b"ustar":
        return "it is a tar archive"
    text = _as_text(prefix)
    if not text:
        return ""
    kinds = {"<": "an XML document", "{": "a JSON document", "[": "a JSON document"}
    return f"it is {kinds.get(text[0], 'text')}, perhaps an error message: {one_line(text, 60)}"


def _as_text(prefix: bytes | bytearray) -> str:
    """Decode what is plainly text, without byte order mark and leading blanks; otherwise return nothing."""
    if prefix[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = prefix.decode("utf-16", "ignore")
    else:  # bytes that are no UTF-8 become surrogates, which are not printable
        text = prefix.decode("utf-8-sig", "surrogateescape")
    text = text.lstrip(" \t\r\n").replace("\r", "\n")
    start = text[:16]
    return text if start and all(character.isprintable() or character in "\n\t" for character in start) else ""
