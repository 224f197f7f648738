"""/proc/PID/limits: the resource limits of a process.

Owns the table. Promises each limit in the unit that the kernel names, None for unlimited, and no row for one that this
text lacks. Refuses what a capability lifts: CAP_IPC_LOCK makes "Max locked memory" void, and this file does not show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, read_text
from hwr.procfs.text import complete_lines, number

_ROW: Final = re.compile(rb"(Max [ -~]*?) {2,}(\d+|unlimited) +(\d+|unlimited)(?: +[a-z]+)? *")
_UNLIMITED: Final = b"unlimited"


@dataclass(frozen=True, slots=True)
class Limit:
    """A soft and a hard limit; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits by the kernel's name, for example `Max open files`."""

    rows: Mapping[str, Limit]

    @property
    def locked_memory(self) -> Limit | None:
        """RLIMIT_MEMLOCK, in bytes."""
        return self.rows.get("Max locked memory")


def parse_limits(text: bytes) -> Limits | Unavailable:
    """Parse the table; lines that are not whole are skipped."""
    rows: dict[str, Limit] = {}
    for line in complete_lines(text):
        row = _ROW.fullmatch(line)
        if row is None:
            continue
        soft, hard = (None if word == _UNLIMITED else number(word) for word in row.group(2, 3))
        if (soft is None and row[2] != _UNLIMITED) or (hard is None and row[3] != _UNLIMITED):
            continue  # more digits than the kernel has
        rows.setdefault(row[1].decode("ascii"), Limit(soft, hard))
    return Limits(rows) if rows else Unavailable("limits: no whole row")


def read_limits(pid: Pid = "self", proc_root: Path = PROC_ROOT) -> Limits | Unavailable:
    """Read a process's limits."""
    text = read_text(proc_root / str(pid) / "limits", capability=CAP_SYS_PTRACE)
    return text if isinstance(text, Unavailable) else parse_limits(text)
