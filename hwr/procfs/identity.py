"""What makes a PID mean one process: boot, PID namespace and start time.

Owns these three. Promises that (boot id, namespace, pid, start) never names two processes. Refuses to say whether the process lives.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, read_text, unreadable
from hwr.procfs.stat import read_stat

_BOOT_ID: Final = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n")
_NAMESPACE: Final = re.compile(r"pid:\[(\d{1,20})\]", re.ASCII)


def parse_boot_id(text: bytes) -> str | Unavailable:
    """Parse a UUID in the kernel's spelling."""
    if not _BOOT_ID.fullmatch(text):
        return Unavailable("boot_id: not a whole UUID")
    return text[:-1].decode("ascii")


def read_boot_id(proc_root: Path = PROC_ROOT) -> str | Unavailable:
    """Read the id of this boot; a container has its host's."""
    text = read_text(proc_root / "sys/kernel/random/boot_id")
    return text if isinstance(text, Unavailable) else parse_boot_id(text)


def parse_namespace(link: str) -> int | Unavailable:
    """Parse where a link in `ns/` points to: `pid:[4026531836]`."""
    found = _NAMESPACE.fullmatch(link)
    return int(found[1]) if found else Unavailable("ns/pid: not a PID namespace")


def read_pid_namespace(pid: Pid = "self", proc_root: Path = PROC_ROOT) -> int | Unavailable:
    """Read the inode of a process's PID namespace."""
    path = proc_root / str(pid) / "ns/pid"
    try:
        return parse_namespace(os.readlink(path))
    except OSError as error:
        return unreadable(path, error, capability=CAP_SYS_PTRACE)


def start_ns(pid: Pid, proc_root: Path = PROC_ROOT) -> int | Unavailable:
    """Read when a process started, in nanoseconds of CLOCK_BOOTTIME, exact to a tick (10 ms)."""
    stat = read_stat(pid, proc_root)
    return stat if isinstance(stat, Unavailable) else stat.start_ns
