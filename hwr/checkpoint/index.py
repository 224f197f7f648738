"""The index of a sharded checkpoint, and whether the shards keep its word.

Owns the parsing of `*.safetensors.index.json`, which shard names are allowed, and the comparison with the shards' own
headers in both directions. Promises that a name that comes out stays inside the model's folder as far as a name can
tell (links are looked at where files are opened), and that an accepted index describes every tensor exactly once.
Refuses a partial set.

A shard name may go into a sub-directory (`transformer/a.safetensors`); absolute names and `..` escape. A second
spelling of one path (`./a`, `b//a`) is refused, because two names would then stand for one file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hwr.checkpoint.foreign import SNIFF_BYTES, refuse_pointer_or_page
from hwr.checkpoint.header import FileHeader, TensorHeader
from hwr.checkpoint.strict_json import JsonReader
from hwr.errors import IndexInvalid, IndexMismatch, PathEscape
from hwr.units import MIB, one_line

INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX_LIMIT_BYTES: Final = 32 * MIB  # the largest public ones are about 10 MB, for some 90,000 tensors
SHARDS_LIMIT: Final = 1 << 14  # published models have up to some hundred
# `metadata` and keys that are not ours; one object of sizes and names in every index seen.
_OTHER_VALUE_LIMIT_CHARS: Final = MIB
_OTHER_VALUES_LIMIT: Final = 16
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Which shard each tensor is in; `shards` are the distinct names, sorted."""

    file: str
    weight_map: Mapping[str, str]
    shards: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.shards or set(self.shards) != set(self.weight_map.values()):
            raise ValueError("the shards of an index are those that its map names")


def parse_index(raw: bytes | bytearray, *, file: str) -> ShardIndex:
    """Parse the text of an index.

    Raises:
        IndexInvalid: not strict JSON, no `weight_map`, an empty one, or names that cannot be files.
        PathEscape: a shard name that is absolute or climbs.
        SourceRejected: a Git LFS pointer or an HTML page in its place.
    """
    file = os.path.basename(file)
    if len(raw) > INDEX_LIMIT_BYTES:
        raise IndexInvalid(file=file, problem=f"it has more than {INDEX_LIMIT_BYTES} bytes")
    refuse_pointer_or_page(raw[:SNIFF_BYTES], file=file, file_bytes=len(raw))
    weight_map: dict[str, str] | None = None
    others = 0
    try:
        reader = JsonReader(str(raw, "utf-8"))
        for key in reader.members():
            if key == "weight_map":
                weight_map = _weight_map(reader)
            else:
                others += 1
                if others > _OTHER_VALUES_LIMIT:
                    raise ValueError(f"more than {_OTHER_VALUES_LIMIT} keys besides weight_map")
                reader.any_value(_OTHER_VALUE_LIMIT_CHARS)
        reader.end()
    except UnicodeDecodeError as error:
        raise IndexInvalid(file=file, problem=f"not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise IndexInvalid(file=file, problem=one_line(str(error))) from None
    if not weight_map:
        raise IndexInvalid(file=file, problem="it has no weight_map" if weight_map is None else "its weight_map is empty")
    shards = tuple(sorted(set(weight_map.values())))
    for shard in shards:
        _check_shard_name(shard, file=file)
    return ShardIndex(file, weight_map, shards)


def _weight_map(reader: JsonReader) -> dict[str, str]:
    # One string object a shard, not one a tensor.
    shards: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for name in reader.members():
        shard = reader.string()
        weight_map[name] = shards.setdefault(shard, shard)
        if len(shards) > SHARDS_LIMIT:
            raise ValueError(f"it names more than {SHARDS_LIMIT} shards")
    return weight_map


def _check_shard_name(name: str, *, file: str) -> None:
    # A backslash is an ordinary character here, but whoever writes one before `..` means to climb.
    if name.startswith("/") or ".." in re.split(r"[/\\]", name):
        raise PathEscape(file=file, target=name)
    if "\0" in name:
        raise IndexInvalid(file=file, problem=f"the shard name {one_line(name, 80)} holds a NUL")
    if not name or any(part in ("", ".") for part in name.split("/")):
        raise IndexInvalid(file=file, problem=f"the shard name {name!r} is not a plain relative path")


def agree(index: ShardIndex, headers: Sequence[FileHeader], *, unlisted: Sequence[str] = ()) -> dict[str, tuple[int, TensorHeader]]:
    """Compare the index with the headers of its shards (in the order of `index.shards`), both ways.

    Returns every tensor with the position of its shard, in the order of shards and bytes. `unlisted` files are only
    carried in the error's details.

    Raises:
        IndexMismatch: a tensor that is not where the index says, that the index does not name, or that is in two shards.
    """
    found: dict[str, tuple[int, TensorHeader]] = {}
    twice: dict[str, str] = {}
    for position, header in enumerate(headers):
        shard = index.shards[position]
        for tensor in header.tensors:
            first = found.setdefault(tensor.name, (position, tensor))
            if first[0] != position:
                twice[tensor.name] = f"{tensor.name} ({index.shards[first[0]]} and {shard})"
    missing = [
        f"{name} ({shard})"
        for name, shard in index.weight_map.items()
        if name not in twice and (name not in found or index.shards[found[name][0]] != shard)
    ]
    unnamed = [f"{name} ({index.shards[position]})" for name, (position, _) in found.items() if name not in index.weight_map]
    doubled = list(twice.values())
    problems = [
        f"{what}: {shown(names)}"
        for what, names in (
            ("not in the shard that the index names", missing),
            ("in a shard but not in the index", unnamed),
            ("in two shards", doubled),
        )
        if names
    ]
    if problems:
        raise IndexMismatch(
            file=index.file,
            problem="; ".join(problems),
            missing_tensors=tuple(missing[:_NAMES_SHOWN]),
            unnamed_tensors=tuple(unnamed[:_NAMES_SHOWN]),
            duplicate_tensors=tuple(doubled[:_NAMES_SHOWN]),
            unlisted=tuple(unlisted[:_NAMES_SHOWN]),
        )
    return found


def shown(names: Sequence[str]) -> str:
    """List the first names for a message, and how many more there are."""
    listed = ", ".join(one_line(name, 120) for name in names[:_NAMES_SHOWN])
    return listed if len(names) <= _NAMES_SHOWN else f"{listed} and {len(names) - _NAMES_SHOWN} more"
