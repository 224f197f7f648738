"""Reading one file of a /proc tree.

Owns the way from an `OSError` to an `Unavailable` that says what failed and what would help.
Promises that a file that cannot be read is a value, not an exception. Refuses to know any format.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final, Literal, TypeAlias

from hwr.errors import Unavailable, errno_text
from hwr.units import one_line

PROC_ROOT: Final = Path("/proc")

# ptrace(2), "Ptrace access mode checking": what another user's smaps, maps and ns links ask for.
CAP_SYS_PTRACE: Final = "CAP_SYS_PTRACE"

Pid: TypeAlias = int | Literal["self"]

_MEANING: Final = {
    errno.ENOENT: "it has ended, is hidden (hidepid), or this kernel has no such file",
    errno.ESRCH: "it has ended, or has no memory of its own (kernel thread, zombie)",
}
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})


def read_text(path: Path, *, capability: str | None = None) -> bytes | Unavailable:
    """Read a whole file; `capability` is what opens it to a reader that is denied."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        return unreadable(path, error, capability=capability)


def unreadable(path: Path, error: OSError, *, capability: str | None = None) -> Unavailable:
    """Say why `path` gave nothing: the errno, what it means for /proc, and the capability that is missing."""
    reason = f"{path}: {errno_text(error)}"
    if error.errno in _MEANING:
        reason += f": {_MEANING[error.errno]}"
    elif error.errno in _DENIED and capability is not None:
        reason += f": needs {capability}"
    return Unavailable(one_line(reason))
