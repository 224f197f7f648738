"""Files for the tests of this room: safetensors written byte by byte, so that wrong ones can be written too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hwr
from hwr.checkpoint.header import FileHeader, read_header

REPOSITORY = Path(hwr.__file__).resolve().parents[1]
NOBODY = 65534


def entry(dtype: str = "U8", shape: list[int] | None = None, begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


def encode(header: object, data: bytes = b"", declared: int | None = None) -> bytes:
    """A file: `header` as it is if it is bytes, as JSON otherwise; its own length before it unless `declared`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if declared is None else declared).to_bytes(8, "little") + raw + data


def tensors_file(*names: str) -> bytes:
    """A valid file with a tensor of four bytes for every name."""
    header = {name: entry(begin=4 * number, end=4 * number + 4) for number, name in enumerate(names)}
    return encode(header, bytes(4 * len(names)))


def model(
    directory: Path, shards: Mapping[str, tuple[str, ...]], index: object = None, index_name: str = "model.safetensors.index.json"
) -> Path:
    """A sharded model: its files, and an index that says the truth unless another is given."""
    directory.mkdir(parents=True, exist_ok=True)
    for shard, names in shards.items():
        (directory / shard).parent.mkdir(parents=True, exist_ok=True)
        (directory / shard).write_bytes(tensors_file(*names))
    if index is None:
        index = {"metadata": {"total_size": 1}, "weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (directory / index_name).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    return directory


def read_file(path: Path) -> FileHeader:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, file=str(path))
    finally:
        os.close(fd)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def run_as_nobody(script: str, *arguments: object) -> str:
    """Run Python without root's rights; the repository and what is world-readable can be read."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    command = [*drop, sys.executable, "-c", script, *map(str, arguments)]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
