"""Where journals lie.

Owns the choice of the run directory, the run id, the names below it, and the removal of what dead runs left.
Promises: `HWR_RUN_DIR`, else `/run/hwr` if it exists, else a 0700 directory of this user under the temporary directory;
a directory of another owner is refused, never used. Refuses to delete anything whose writer may live (invariant J6).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.identity import start_ns

SHARED_RUN_DIR: Final = Path("/run/hwr")
KEPT_SECONDS: Final = 7 * 86400
KEPT_BYTES: Final = 1 << 30
ALIVE: Final = "alive"

# A worker locks its alive file right after it made its directory; what is younger than this may be in between.
GRACE_SECONDS: Final = 60.0

_SAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
_RANK_DIR: Final = re.compile(r"r(\d+)\.(\d+)\.(\d+)\Z", re.ASCII)
_ATTEMPTS: Final = 5
# Of a number in a directory's name: 2^64 has 20.
_DIGITS: Final = 20


@dataclass(frozen=True, slots=True)
class WorkerDirectory:
    """One process's directory: `<run>/r<rank>.<pid>.<start_ns>`."""

    path: Path
    run_id: str
    rank: int
    pid: int
    start_ns: int


def run_directory(configured: str | None, environ: Mapping[str, str]) -> Path:
    """Return the directory that holds all runs; it need not exist yet."""
    explicit = configured or environ.get("HWR_RUN_DIR")
    if explicit:
        return Path(explicit)
    if SHARED_RUN_DIR.is_dir() and os.access(SHARED_RUN_DIR, os.W_OK):
        return SHARED_RUN_DIR
    return private_run_directory()


def private_run_directory() -> Path:
    """Return this user's own run directory under the temporary directory."""
    return Path(tempfile.gettempdir()) / f"hwr-{os.geteuid()}"


def run_id(environ: Mapping[str, str]) -> str:
    """Return the id that all ranks of one start share, or a new one; the caller exports it."""
    return shared_run_id(environ) or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


def shared_run_id(environ: Mapping[str, str]) -> str | None:
    """Return the id that the other ranks have too; None if this process would make one up.

    Ranks that a launcher started without giving one (torchrun's own is "none") are told together by their parent process.
    """
    for name in ("HWR_RUN_ID", "TORCHELASTIC_RUN_ID"):
        value = environ.get(name, "").strip()
        if value and not (name == "TORCHELASTIC_RUN_ID" and value == "none"):
            return _SAFE.sub("_", value)[:100].lstrip(".") or "run"
    size, parent = environ.get("WORLD_SIZE", "").strip(), os.getppid()
    if not (size.isascii() and size.isdecimal() and int(size) > 1) or parent <= 1:  # init's children have nothing in common
        return None
    started = start_ns(parent)
    return None if isinstance(started, Unavailable) else f"launch-{parent}-{started}"


def create_worker_directory(run_dir: Path, run: str, rank: int, pid: int, start_ns: int) -> WorkerDirectory:
    """Make the directory that this process writes into.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    shared = run_dir == SHARED_RUN_DIR
    if not shared:
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(mode=0o700, parents=True)
    if run_dir == private_run_directory():
        _refuse_foreign(run_dir)
    path = run_dir / run / f"r{rank}.{pid}.{start_ns}"
    for attempt in range(_ATTEMPTS):
        _make(path.parent, shared=shared)
        try:
            _make(path, shared=shared)
        except FileNotFoundError:  # the run's last dead worker was pruned meanwhile, and the empty run with it
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            break
    return WorkerDirectory(path=path, run_id=run, rank=rank, pid=pid, start_ns=start_ns)


def _make(path: Path, *, shared: bool) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o750)
        if shared:
            path.chmod(0o2770)  # whatever the umask: other members of the group have ranks in the same run


def worker_directories(run_dir: Path) -> Iterator[WorkerDirectory]:
    """Yield the worker directories below a run directory, a run, or a worker directory itself; links are not followed."""
    for path in (run_dir, *_subdirectories(run_dir), *(sub for run in _subdirectories(run_dir) for sub in _subdirectories(run))):
        worker = parse_worker_directory(path)
        if worker is not None:
            yield worker


def parse_worker_directory(path: Path) -> WorkerDirectory | None:
    """Take a path for what its name says, None if that is no process's; nothing is read."""
    match = _RANK_DIR.match(path.name)
    if match is None or any(len(part) > _DIGITS for part in match.groups()):
        return None
    rank, pid, start = (int(part) for part in match.groups())
    return WorkerDirectory(path=path, run_id=path.parent.name, rank=rank, pid=pid, start_ns=start)


def prune(run_dir: Path, *, now: float, keep_seconds: float = KEPT_SECONDS, keep_bytes: int = KEPT_BYTES) -> int:
    """Delete directories of dead workers that are older than a week, or beyond 1 GiB (oldest first); return how many."""
    dead = sorted((_last_written(worker.path), _tree_bytes(worker.path), worker.path) for worker in worker_directories(run_dir))
    total = sum(size for _, size, _ in dead)
    removed = 0
    for written, size, path in dead:
        if now - written <= GRACE_SECONDS or (now - written <= keep_seconds and total <= keep_bytes):
            break
        if _remove_if_dead(path):
            total -= size
            removed += 1
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path / ALIVE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return _remove_if_empty(path)
    except OSError:
        return False  # not ours to judge
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # the run, once its last worker is gone
    except OSError:
        return False  # its writer lives
    finally:
        os.close(fd)
    return not path.exists()


def _remove_if_empty(path: Path) -> bool:
    """Remove what a worker left that died between making its directory and its first file; the kernel refuses if there is one."""
    try:
        path.rmdir()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _refuse_foreign(path: Path) -> None:
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise PermissionError(1, "run directory is not a directory of this user that only it may write", str(path))


def _subdirectories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _last_written(path: Path) -> float:
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = path.lstat().st_mtime
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest


def _tree_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            total += entry.stat(follow_symlinks=False).st_size
    return total
