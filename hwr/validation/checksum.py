"""Full checksum: every payload byte is read and hashed.

Owns the hashing child, its progress and its end. Promises the file, unit and tensor of the first mismatch; progress at most four times a
second; and a typed failure when the payload is truncated meanwhile or the disk fails (V3). Start-up pays for it once, in proportion to
the bytes; nothing is paid per inference. Refuses to claim more: it neither authenticates a writer nor sees a later change.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from hwr.errors import ArtifactInvalid, ChecksumMismatch, StoreError, StoreIoError, errno_text
from hwr.store.manifest import Unit
from hwr.telemetry import span
from hwr.telemetry.events import ChecksumBegun, ChecksumProgress
from hwr.telemetry.hub import Span
from hwr.units import short_key
from hwr.validation.metadata import OpenedArtifact, typed

TELL_SECONDS: Final = 0.25
_HASHER: Final = Path(__file__).with_name("hasher.py")


def verify(opened: OpenedArtifact, root: str) -> None:
    """Hash every payload byte of an opened artifact.

    Raises:
        ChecksumMismatch: bytes differ from their digest.
        ArtifactInvalid: a file was truncated while it was read.
        StoreIoError: it could not be read, or no process could be started.
    """
    manifest = opened.manifest
    planned = manifest.payload_bytes
    with span(ChecksumBegun(key=manifest.key, planned_bytes=planned, files=len(opened.files))) as checking:
        done = _run(opened, checking, root)
        checking.add(bytes=done)


def _run(opened: OpenedArtifact, checking: Span, root: str) -> int:
    key = opened.manifest.key
    by_file: dict[str, list[Unit]] = {name: [] for name in opened.files}
    for unit in opened.manifest.units():
        if unit.length:
            by_file[unit.file].append(unit)
    sizes = {file.name: file.size for file in opened.manifest.files}
    names = list(opened.files)
    job = [[opened.files[name], sizes[name], [[u.offset, u.length, u.digest] for u in by_file[name]]] for name in names]
    planned = opened.manifest.payload_bytes
    done = 0
    last: dict[str, Any] = {}
    told = time.monotonic()
    with _start(opened, key, root) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            json.dump(job, child.stdin)
            child.stdin.close()
        except BrokenPipeError:  # it died at once; its exit status says why
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()  # what it did not take is still buffered
        for line in child.stdout:
            last = json.loads(line)
            done = last.get("done", done)
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                checking.progress(ChecksumProgress(done_bytes=done, planned_bytes=planned))
    if "actual" in last:
        unit = by_file[names[last["file"]]][last["unit"]]
        what = f"bytes {unit.offset}..{unit.offset + unit.length}"
        what += f" of tensor {unit.tensor!r}" if unit.tensor is not None else " (header or filler)"
        raise ChecksumMismatch(
            reason="tensor" if unit.tensor is not None else "header_or_filler",
            root=root,
            key=short_key(key),
            file=unit.file,
            what=what,
            expected=unit.digest,
            actual=last["actual"],
            tensor=unit.tensor,
            chunk=last["unit"],
        )
    if child.returncode != 0 or done != planned:
        raise _ended(child.returncode, opened, sizes, root)
    return done


def _start(opened: OpenedArtifact, key: str, root: str) -> subprocess.Popen[str]:
    found = importlib.util.find_spec("blake3")
    where = str(Path(found.origin).parent.parent) if found and found.origin else ""
    try:
        # Isolated and without site: 20 ms instead of 60, and nothing of the host's start-up files runs in it.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HASHER), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(opened.files.values()),
            text=True,
        )
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise typed(error, "the pipe to the hashing process", key, root) from error
        problem = f"no process can be started to hash in: {errno_text(error)}"
        raise StoreIoError(reason="no_process", root=root, path=short_key(key), operation="full_checksum", problem=problem) from error


def _ended(code: int, opened: OpenedArtifact, sizes: dict[str, int], root: str) -> StoreError:
    key = short_key(opened.manifest.key)
    for name, fd in opened.files.items():
        size = os.fstat(fd).st_size
        if size != sizes[name]:
            problem = f"{name} has {size} bytes, not {sizes[name]}: it changed while it was read"
            return ArtifactInvalid(reason="truncated_while_read", root=root, key=key, problem=problem)
    how = f"killed by signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"status {code}"
    problem = f"the hashing process ended early ({how})" + (": the disk could not give a page" if code == -signal.SIGBUS else "")
    return StoreIoError(reason="hasher_ended", root=root, path=key, operation="full_checksum", problem=problem)
