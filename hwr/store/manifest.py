"""The manifest and the READY marker of an artifact.

Owns their JSON, strictly: what each key is, and that the pieces fit together. Promises that a parsed manifest describes files without
holes or overlaps, tensors inside them, and digests of every byte (M1). Refuses unknown keys, absurd sizes and names that could
leave the directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from hwr import digest
from hwr.format import BYTE_DTYPE_BITS
from hwr.outcomes import TensorKind
from hwr.store.layout import PAYLOAD
from hwr.units import MIB, canonical_json

SCHEMA_VERSION: Final = 1
MAX_METADATA_BYTES: Final = 64 * MIB
PAD_PREFIX: Final = "__hwr_pad"

_HEX: Final = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: contiguous, C order. `offset` counts from the start of its file; `stride` in elements."""

    name: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    units: tuple[str, ...]
    digest: str

    def __post_init__(self) -> None:
        _need(self.nbytes >= 0 and self.offset >= 8, f"tensor {self.name!r}: impossible place")
        # What a view is made of: were these wrong, it would reach into its neighbour.
        bits = BYTE_DTYPE_BITS.get(self.dtype, 0)
        _need(
            bits > 0 and self.nbytes == math.prod(self.shape) * bits // 8,
            f"tensor {self.name!r}: dtype and shape are not those of its bytes",
        )
        _need(self.stride == contiguous_stride(self.shape), f"tensor {self.name!r}: its stride is not that of C order")
        _need(len(self.units) == len(list(digest.unit_ranges(self.nbytes))), f"tensor {self.name!r}: wrong number of units")
        _need(self.digest == digest.of_units(self.units), f"tensor {self.name!r}: its digest is not that of its units")


@dataclass(frozen=True, slots=True)
class Filler:
    """A named filler tensor of zeros, there for alignment only."""

    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One payload file: header, tensors and fillers cover it without holes."""

    name: str
    size: int
    header_bytes: int
    header_digest: str
    fillers: tuple[Filler, ...] = ()

    def __post_init__(self) -> None:
        _need(bool(PAYLOAD.match(self.name)), f"file {self.name!r}: not a payload name")
        _need(8 <= self.header_bytes <= self.size, f"file {self.name!r}: header does not fit")


@dataclass(frozen=True, slots=True)
class Unit:
    """One range of a file with its digest; `tensor` is None for headers and fillers."""

    file: str
    offset: int
    length: int
    digest: str
    tensor: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The immutable inventory of an artifact. `aliases` name tensors that share another's storage (tied weights)."""

    key: str
    identity: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    content_digest: str
    aliases: Mapping[str, str]
    alignment: Mapping[str, int]
    algorithm: str = digest.ALGORITHM
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _need(self.schema_version == SCHEMA_VERSION, f"manifest schema {self.schema_version!r}, not {SCHEMA_VERSION}")
        _need(self.algorithm == digest.ALGORITHM, f"digest algorithm {self.algorithm!r}, not {digest.ALGORITHM}")
        names = [tensor.name for tensor in self.tensors]
        _need(names == sorted(set(names)), "tensors are not sorted and unique")
        known = set(names)
        _need(all(target in known for target in self.aliases.values()), "an alias names no tensor")
        _need(not known & set(self.aliases), "an alias is also a tensor")
        _need(len({file.name for file in self.files}) == len(self.files), "a file is listed twice")
        self._check_coverage()
        _need(self.content_digest == self.computed_content_digest(), "content digest is not that of the tensors")

    def computed_content_digest(self) -> str:
        """Return the content digest that the tensors give."""
        rows = ((t.name, t.kind.value, t.dtype, t.shape, t.digest) for t in self.tensors)
        return digest.of_content(rows, self.aliases)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payload files."""
        return sum(file.size for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, fillers and headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def units(self) -> list[Unit]:
        """Return every unit of every file, in the order of the bytes: together they cover each file."""
        found = [Unit(file.name, 0, file.header_bytes, file.header_digest, None) for file in self.files]
        found += [Unit(file.name, pad.offset, pad.nbytes, pad.digest, None) for file in self.files for pad in file.fillers]
        for tensor in self.tensors:
            ranges = digest.unit_ranges(tensor.nbytes, tensor.offset)
            found += [Unit(tensor.file, at, n, told, tensor.name) for (at, n), told in zip(ranges, tensor.units, strict=True)]
        return sorted(found, key=lambda unit: (unit.file, unit.offset))

    def to_bytes(self) -> bytes:
        """Return the document."""
        return canonical_json(asdict(self))

    def _check_coverage(self) -> None:
        ends = {file.name: 0 for file in self.files}
        sizes = {file.name: file.size for file in self.files}
        _need(all(tensor.file in ends for tensor in self.tensors), "a tensor lies in a file that is not listed")
        for unit in self.units():
            if unit.length:
                _need(unit.offset == ends[unit.file], f"file {unit.file!r}: hole or overlap at byte {ends[unit.file]}")
                ends[unit.file] += unit.length
        _need(ends == sizes, "the tensors do not cover their files")


@dataclass(frozen=True, slots=True)
class ReadyMarker:
    """Written last: ties the publication, the manifest and the content together."""

    publication_id: str
    manifest_digest: str
    content_digest: str
    published_ns: int
    integrity_mode: str = "full_checksum"
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _need(self.schema_version == SCHEMA_VERSION, f"READY schema {self.schema_version!r}, not {SCHEMA_VERSION}")
        _need(bool(_HEX.match(self.manifest_digest) and _HEX.match(self.content_digest)), "READY has no digests")

    def to_bytes(self) -> bytes:
        """Return the document."""
        return canonical_json(asdict(self))


def document_digest(raw: bytes) -> str:
    """Return the digest of a manifest's bytes: SHA-256, so that any tool can check it."""
    return hashlib.sha256(raw).hexdigest()


def parse_ready(raw: bytes) -> ReadyMarker:
    """Parse READY.json.

    Raises:
        ValueError: it is not one of ours.
    """
    return ReadyMarker(**_fields(ReadyMarker, _load(raw), {}))


def parse_manifest(raw: bytes) -> Manifest:
    """Parse manifest.json.

    Raises:
        ValueError: it is not one of ours, or its parts do not fit together.
    """
    value = _load(raw)
    return Manifest(
        **_fields(
            Manifest,
            value,
            {
                "identity": lambda item: _typed(item, dict),
                "aliases": lambda item: {_typed(k, str): _typed(v, str) for k, v in _typed(item, dict).items()},
                "alignment": lambda item: {_typed(k, str): _typed(v, int) for k, v in _typed(item, dict).items()},
                "tensors": lambda item: tuple(_tensor(one) for one in _typed(item, list)),
                "files": lambda item: tuple(_file(one) for one in _typed(item, list)),
            },
        )
    )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the C-order stride of a shape, in elements."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _tensor(value: Any) -> TensorEntry:
    return TensorEntry(
        **_fields(
            TensorEntry,
            value,
            {
                "kind": TensorKind,
                "shape": _integers,
                "stride": _integers,
                "units": lambda item: tuple(_hex(one) for one in _typed(item, list)),
            },
        )
    )


def _file(value: Any) -> FileEntry:
    return FileEntry(
        **_fields(
            FileEntry,
            value,
            {
                "header_digest": _hex,
                "fillers": lambda item: tuple(Filler(**_fields(Filler, one, {"digest": _hex})) for one in _typed(item, list)),
            },
        )
    )


_PLAIN: Final = {"int": int, "str": str}


def _fields(kind: Any, value: Any, converters: Mapping[str, Any]) -> dict[str, Any]:
    names = kind.__slots__
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"wrong keys in {kind.__name__}")
    out: dict[str, Any] = {}
    for name in names:
        if name in converters:
            out[name] = converters[name](value[name])
        else:
            out[name] = _typed(value[name], _PLAIN[kind.__annotations__[name]])
    return out


def _typed(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {kind.__name__} was expected, not {type(value).__name__}")
    return value


def _integers(value: Any) -> tuple[int, ...]:
    found = tuple(_typed(one, int) for one in _typed(value, list))
    _need(all(one >= 0 for one in found), "a size is negative")
    return found


def _hex(value: Any) -> str:
    _need(type(value) is str and bool(_HEX.match(value)), "a digest was expected")
    return str(value)


def _load(raw: bytes) -> Any:
    if len(raw) > MAX_METADATA_BYTES:
        raise ValueError(f"larger than {MAX_METADATA_BYTES} bytes")
    try:
        return json.loads(raw)
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {type(error).__name__}") from error


def _need(held: bool, problem: str) -> None:
    if not held:
        raise ValueError(problem)
