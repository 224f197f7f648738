"""Where journals may lie on this node.

Owns the list of run directories to search. Promises the same choice as a writer's (`hwr.telemetry.rundir`), and for root the private
directories of all users, each only if it is what its name says: a directory of that user which nobody else may write. A place that is not
there yet is listed too: a worker may make it later. Refuses links, and to put our own journal where a writer would not put its own.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hwr.telemetry.rundir import SHARED_RUN_DIR

_PRIVATE: Final = re.compile(r"hwr-(\d{1,10})\Z", re.ASCII)
MAX_PLACES: Final = 64


def run_directories(
    configured: Sequence[Path],
    environ: Mapping[str, str],
    *,
    shared: Path = SHARED_RUN_DIR,
    temporary: Path | None = None,
    uid: int | None = None,
) -> tuple[Path, ...]:
    """Return the directories to search, the one for our own journal first; none of them need exist."""
    if configured:
        return tuple(dict.fromkeys(Path(os.path.abspath(path)) for path in configured))
    told = environ.get("HWR_RUN_DIR", "")
    if told:
        return (Path(os.path.abspath(told)),)
    below = Path(tempfile.gettempdir()) if temporary is None else temporary
    own = os.geteuid() if uid is None else uid
    mine = below / f"hwr-{own}"
    found = [mine] if not os.path.lexists(mine) or _is_private(mine, own) else []
    # As a writer does: whoever may not write there goes to its private directory, and so does who comes before it is made.
    at = 0 if os.path.isdir(shared) and os.access(shared, os.W_OK) else len(found)
    found.insert(at, shared)
    if own == 0:
        found += _private_directories(below)
    return tuple(dict.fromkeys(found))[:MAX_PLACES]


def _private_directories(below: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(below))
    except OSError:
        return []
    matches = ((below / name, _PRIVATE.match(name)) for name in names)
    return [path for path, match in matches if match and _is_private(path, int(match[1]))]


def _is_private(path: Path, uid: int) -> bool:
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == uid and not facts.st_mode & 0o022
