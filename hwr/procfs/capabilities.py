"""What a process may do in the kernel's eyes: its effective capabilities, and whether they count for the machine.

Owns CapEff of /proc/PID/status and the user namespace it is meant in. Promises to tell a capability over the machine from one
over a namespace: root in a rootless container reads as having all of them, and may lock no more memory than before.
Refuses to guess: what cannot be read is Unavailable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, read_text, unreadable
from hwr.procfs.text import hexadecimal, keyed_lines

# Bit numbers of include/uapi/linux/capability.h.
CAP_IPC_LOCK: Final = 14

# The first user namespace has this inode on every machine (include/linux/proc_ns.h, PROC_USER_INIT_INO).
_INITIAL: Final = "user:[4026531837]"
_MASK_DIGITS: Final = 16


def parse_effective(text: bytes) -> int | Unavailable:
    """Parse the mask of effective capabilities out of a whole `status`."""
    word = keyed_lines(text).get(b"CapEff", b"").strip()
    mask = hexadecimal(word) if len(word) == _MASK_DIGITS else None
    return Unavailable("status: no whole CapEff line") if mask is None else mask


def read_capable(capability: int, pid: Pid = "self", proc_root: Path = PROC_ROOT) -> bool | Unavailable:
    """Ask whether a process has a capability over the machine: effective, and in the first user namespace."""
    text = read_text(proc_root / str(pid) / "status")
    mask = text if isinstance(text, Unavailable) else parse_effective(text)
    if isinstance(mask, Unavailable):
        return mask
    if not mask >> capability & 1:
        return False
    path = proc_root / str(pid) / "ns/user"
    try:
        return os.readlink(path) == _INITIAL
    except FileNotFoundError:
        return True  # a kernel without user namespaces has one only
    except OSError as error:
        return unreadable(path, error, capability=CAP_SYS_PTRACE)
