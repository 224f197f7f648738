"""A canonical checkpoint on disk: which files are its weights, and that they belong together.

Owns the choice of the weight files in a directory, the opening of each by descriptor, the rule for links, and the value
that later stages take: `CheckpointSource`. Promises that the facts of a file (size, inode, times) are those of the bytes
that were parsed, that one directory gives equal values however its path is spelt, that no descriptor stays open, and
that a FIFO or a device is never opened. Refuses a partial set of shards, a path that leaves the model's folder, and a
choice between several sets of weights that only a person can make.

The choice: the only one of the four `DEFAULT_NAMES` (of two, libraries disagree about which wins, and the identity must
be that of what is loaded), then the only index of any name (a variant such as `model.fp16…` is thus never preferred to
a default), then the only `*.safetensors`. Names that begin with a dot are leftovers and are not looked at.

A link may lead anywhere inside the model's directory, or inside the repository folder of a Hugging Face cache
(`models--*/snapshots/<rev>/x` to `models--*/blobs/<hash>`). What a name ends with is never asked of a link's target.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.checkpoint.header import (
    FileHeader,
    TensorHeader,
    kind_of,
    read_exact,
    read_header,
    regular_file,
)
from hwr.checkpoint.index import INDEX_LIMIT_BYTES, INDEX_SUFFIX, ShardIndex, agree, parse_index, shown
from hwr.errors import AmbiguousWeights, MissingShard, NoWeights, PathEscape, SourceChanged, SourceRejected, SourceUnreadable, errno_text
from hwr.units import MIB, one_line

WEIGHTS_SUFFIX: Final = ".safetensors"
# What transformers and diffusers look for when no variant is asked for.
DEFAULT_NAMES: Final = (
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
)
CONFIG_NAME: Final = "config.json"
CONFIG_LIMIT_BYTES: Final = 16 * MIB  # label tables of 20,000 classes take about 1 MB
_REPOSITORY: Final = re.compile(r"(models|datasets|spaces)--.")
_ONE_OF_MANY: Final = re.compile(r"-0*(\d{1,9})-of-0*([1-9]\d{0,8})\.safetensors$")


@dataclass(frozen=True, slots=True)
class StatFacts:
    """What the kernel said of a file while it was open; equal facts are taken for equal bytes."""

    size: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> StatFacts:
        """Keep what changes when bytes do (the access time does not)."""
        return cls(facts.st_size, facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file; `name` is relative to the directory, `symlink_target` is the link's own text or None."""

    name: str
    path: Path
    resolved_path: Path
    facts: StatFacts
    symlink_target: str | None
    header: FileHeader

    def __post_init__(self) -> None:
        if self.facts.size != self.header.file_bytes:
            raise ValueError("a header belongs to the file that was parsed")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A whole checkpoint, strictly parsed; its payload was not looked at.

    `tensors` gives the position in `shards` and the header of each tensor. `unlisted` are `*.safetensors` beside the
    weights, ignored; whoever opened the source says so. `config` is None with `config_problem` set if `config.json` is
    absent or no JSON object; it may hold infinities, which some model configurations write.
    """

    directory: Path
    shards: tuple[Shard, ...]
    index_path: Path | None
    tensors: Mapping[str, tuple[int, TensorHeader]]
    unlisted: tuple[str, ...]
    config: Mapping[str, Any] | None
    config_text: str | None
    config_problem: str | None

    def __post_init__(self) -> None:
        if not self.shards or len(self.tensors) != sum(len(shard.header.tensors) for shard in self.shards):
            raise ValueError("a checkpoint has shards, and each of their tensors once")
        if (self.config is None) is (self.config_problem is None):
            raise ValueError("a configuration is there, or there is a reason why not")

    @property
    def file_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(shard.facts.size for shard in self.shards)


def open_source(directory: str | os.PathLike[str]) -> CheckpointSource:
    """Find, open and check the weights of a model directory; every file is closed again.

    Raises:
        SourceRejected: one of its kinds, whatever lies there.
    """
    root, names = _listing(directory)
    index_name, single = _choose(root, names)
    index: ShardIndex | None = None
    if index_name is not None:
        index = parse_index(_read_up_to(root, index_name, INDEX_LIMIT_BYTES + 1), file=index_name)
    wanted = index.shards if index else (single,)
    unlisted = tuple(name for name in names if name.endswith(WEIGHTS_SUFFIX) and name not in wanted)
    resolved = _resolve_all(root, wanted, listed_by=index_name)
    shards = tuple(_open_shard(root, name, path) for name, path in zip(wanted, resolved, strict=True))
    if index:
        tensors = agree(index, [shard.header for shard in shards], unlisted=unlisted)
    else:
        tensors = {tensor.name: (0, tensor) for tensor in shards[0].header.tensors}
    config, config_text, config_problem = read_config(root)
    index_path = root / index_name if index_name is not None else None
    return CheckpointSource(root, shards, index_path, tensors, unlisted, config, config_text, config_problem)


# The choice ------------------------------------------------------------------------------------------------------


def _real(directory: str | os.PathLike[str]) -> Path:
    given = os.fsdecode(directory)
    try:
        # An empty path would resolve to the working directory.
        return Path(os.path.realpath(given if given else "\0", strict=True))
    except OSError as error:
        raise _no_directory(given, error) from error
    except ValueError:  # a NUL, or a surrogate that no file name can hold
        raise SourceUnreadable(file=one_line(given), problem="this cannot be a path") from None


def _no_directory(given: str, error: OSError) -> SourceUnreadable:
    hint = ": give the directory that the file is in" if isinstance(error, NotADirectoryError) else ""
    return SourceUnreadable(file=one_line(given), problem=errno_text(error) + hint)


def _listing(directory: str | os.PathLike[str]) -> tuple[Path, list[str]]:
    root = _real(directory)
    try:
        return root, sorted(name for name in os.listdir(root) if not name.startswith("."))
    except OSError as error:
        raise _no_directory(os.fsdecode(directory), error) from error


def _choose(root: Path, names: list[str]) -> tuple[str | None, str]:
    """Return the index, or None and the single file."""
    defaults = [name for name in DEFAULT_NAMES if name in names]
    if len(defaults) > 1:
        raise AmbiguousWeights(file=root.name, problem=f"libraries disagree about which of these wins: {shown(defaults)}")
    indexes = [name for name in defaults or names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise AmbiguousWeights(file=root.name, problem=f"{len(indexes)} indexes, none of them the default: {shown(indexes)}")
    if indexes:
        return indexes[0], ""
    weights = [name for name in defaults or names if name.endswith(WEIGHTS_SUFFIX)]
    if not weights:
        raise NoWeights(directory=str(root), found=_what_is_there(names))
    if len(weights) > 1:
        raise AmbiguousWeights(file=root.name, problem=f"{len(weights)} files and no index: {shown(weights)}")
    part = _ONE_OF_MANY.search(weights[0])
    if part and int(part[2]) > 1:  # nobody has to choose: it is a partial set, which stock loading must not try either
        others = int(part[2]) - 1
        what = "the other shard" if others == 1 else f"the other {others} shards"
        raise MissingShard(file=weights[0], problem=f"{what} and the index are missing", count=others, missing_shards=())
    return None, weights[0]


def _what_is_there(names: list[str]) -> str:
    if "snapshots" in names:
        return "a Hugging Face repository folder: its models are in snapshots/<revision>"
    return f"{len(names)} other names: {shown(names)}" if names else "the directory is empty"


# Paths and descriptors -------------------------------------------------------------------------------------------


def _allowed_roots(root: Path) -> tuple[Path, ...]:
    for folder in root.parents:
        if folder.name == "snapshots" and _REPOSITORY.match(folder.parent.name):
            return root, folder.parent
    return (root,)


def _resolve(root: Path, name: str) -> Path:
    """Follow the links of one name.

    Raises:
        FileNotFoundError: it is not there, or a link dangles.
        SourceRejected: it leaves the folder, or cannot be followed.
    """
    try:
        path = Path(os.path.realpath(root / name, strict=True))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(name) from error
    except OSError as error:
        raise SourceUnreadable(file=os.path.basename(name), problem=errno_text(error)) from error
    except ValueError:
        raise SourceUnreadable(file=os.path.basename(name), problem="this cannot be a file name here") from None
    if not any(path.is_relative_to(allowed) for allowed in _allowed_roots(root)):
        raise PathEscape(file=os.path.basename(name), target=str(path))
    return path


def _resolve_all(root: Path, names: tuple[str, ...], *, listed_by: str | None) -> list[Path]:
    found: list[Path] = []
    missing: list[str] = []
    for name in names:
        try:
            found.append(_resolve(root, name))
        except FileNotFoundError:
            missing.append(name)
    if missing:
        if listed_by is None:
            raise _absent(missing[0])
        what = "1 shard named by the index is" if len(missing) == 1 else f"{len(missing)} shards named by the index are"
        problem = f"{what} missing: {shown(missing)}"
        raise MissingShard(file=listed_by, problem=problem, count=len(missing), missing_shards=tuple(missing[:5]))
    return found


def _absent(name: str) -> MissingShard:
    return MissingShard(file=name, problem="it is absent, or a link that dangles", count=1, missing_shards=(name,))


@contextmanager
def open_regular(path: Path, *, file: str) -> Iterator[tuple[int, StatFacts]]:
    """Open a regular file whose path has no links left, and make sure that it was the same file all along."""
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a device may do something, opening a FIFO waits: both are asked before
            raise SourceUnreadable(file=file, problem=f"it is {kind_of(mode)}, not a regular file")
        # Between the two calls it may become a link or a FIFO: neither is followed or waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SourceUnreadable(file=file, problem=errno_text(error)) from error
    try:
        facts = StatFacts.of(regular_file(fd, file=file))
        yield fd, facts
        if StatFacts.of(regular_file(fd, file=file)) != facts:
            raise SourceChanged(file=file)
    finally:
        os.close(fd)


def _open_shard(root: Path, name: str, resolved: Path) -> Shard:
    path = root / name
    with open_regular(resolved, file=os.path.basename(name)) as (fd, facts):
        header = read_header(fd, file=name)
    try:
        target = os.readlink(path)
    except OSError:  # EINVAL: not a link
        target = None
    return Shard(name, path, resolved, facts, target, header)


def _read_up_to(root: Path, name: str, limit: int) -> bytearray:
    """Read at most `limit` bytes of a text file; whoever parses it refuses what is longer than it should be."""
    try:
        resolved = _resolve(root, name)
    except FileNotFoundError:
        raise _absent(name) from None
    with open_regular(resolved, file=name) as (fd, facts):
        return read_exact(fd, 0, min(facts.size, limit), file=name)


def read_config(root: str | os.PathLike[str]) -> tuple[Mapping[str, Any] | None, str | None, str | None]:
    """Return the configuration, its text, and why there is no configuration; a checkpoint may do without.

    The text may be there without a configuration. Nothing is raised, even if `root` does not exist.
    """
    try:
        raw = _read_up_to(_real(root), CONFIG_NAME, CONFIG_LIMIT_BYTES + 1)
    except MissingShard:
        return None, None, "absent, or a link that dangles"
    except SourceRejected as error:
        return None, None, error.cause
    if len(raw) > CONFIG_LIMIT_BYTES:
        return None, None, f"it has more than {CONFIG_LIMIT_BYTES} bytes"
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        return None, None, f"not UTF-8 at byte {error.start}"
    try:
        value = json.loads(text)
    except RecursionError:
        return None, text, "nested too deeply"
    except ValueError as error:
        return None, text, one_line(str(error))
    return (value, text, None) if isinstance(value, dict) else (None, text, f"not an object but {type(value).__name__}")
