"""Where journals may lie on this node.

Owns the list of run directories to search. Promises the same choice as a writer's (`hwr.telemetry.rundir`), and for root the private
directories of all users, each only if it is what its name says: a directory of that user which nobody else may write. Refuses links.
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
    """Return the directories to search, the one for our own journal first; the first need not exist."""
    if configured:
        return tuple(dict.fromkeys(Path(os.path.abspath(path)) for path in configured))
    told = environ.get("HWR_RUN_DIR", "")
    if told:
        return (Path(os.path.abspath(told)),)
    below = Path(tempfile.gettempdir()) if temporary is None else temporary
    own = os.geteuid() if uid is None else uid
    found: list[Path] = [shared] if shared.is_dir() else []
    mine = below / f"hwr-{own}"
    if not os.path.lexists(mine) or _is_private(mine, own):
        found.append(mine)
    if own == 0:
        found += _private_directories(below)
    return tuple(dict.fromkeys(found))[:MAX_PLACES] or (mine,)


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
