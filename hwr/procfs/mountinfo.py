"""/proc/PID/mountinfo: which filesystem a path lies on.

Owns the columns, their octal escapes, and the walk from a path to its mount.
Promises the mount that a path lookup ends in, also where mounts hide one another. Refuses to touch the filesystems
(asking one that hangs would hang), so that symbolic links are the caller's to resolve.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, Pid, read_text
from hwr.procfs.text import complete_lines, name_text, number, unescape_octal

# Six columns, any number of optional ones, "-", then type, source and the filesystem's own options.
_FIXED: Final = 6
_AFTER_SEPARATOR: Final = 3


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount, names unescaped.

    `options` are the mount's own, `super_options` the filesystem's; `root` is the part of the filesystem that shows here.
    """

    mount_id: int
    parent_id: int
    major: int
    minor: int
    root: str
    mount_point: str
    options: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written here, by this mount or by the filesystem."""
        return "ro" in self.options or "ro" in self.super_options

    def covers(self, path: str) -> bool:
        """Whether `path` is the mount point or lies below it."""
        point = self.mount_point.rstrip("/")
        return path == point or path.startswith(point + "/")


def parse_mountinfo(text: bytes) -> tuple[Mount, ...]:
    """Parse the table in its own order; lines that are not whole are skipped."""
    mounts = (_parse_line(line) for line in complete_lines(text))
    return tuple(mount for mount in mounts if mount is not None)


def _parse_line(line: bytes) -> Mount | None:
    # Not split(): that would eat an empty source (mount -t tmpfs "") and move what follows.
    fields = line.split(b" ")
    try:
        separator = fields.index(b"-", _FIXED)
    except ValueError:
        return None
    device = fields[2].split(b":")
    numbers = [number(word) for word in (fields[0], fields[1], *device)]
    whole = [value for value in numbers if value is not None]
    if len(device) != 2 or len(whole) != len(numbers) or len(fields) <= separator + _AFTER_SEPARATOR:
        return None
    mount_id, parent_id, major, minor = whole
    root, mount_point = (_name(field) for field in fields[3:5])
    fstype, source = (_name(field) for field in fields[separator + 1 : separator + 3])
    options, super_options = (tuple(_name(part) for part in fields[at].split(b",")) for at in (5, separator + _AFTER_SEPARATOR))
    return Mount(mount_id, parent_id, major, minor, root, mount_point, options, fstype, source, super_options)


def _name(field: bytes) -> str:
    return name_text(unescape_octal(field))


def read_mountinfo(pid: Pid = "self", proc_root: Path = PROC_ROOT) -> tuple[Mount, ...] | Unavailable:
    """Read the mounts that a process sees; an empty or unreadable table is Unavailable."""
    path = proc_root / str(pid) / "mountinfo"
    text = read_text(path)
    if isinstance(text, Unavailable):
        return text
    return parse_mountinfo(text) or Unavailable(f"{path}: holds no whole line")


def mount_of(path: str | os.PathLike[str], mounts: Sequence[Mount]) -> Mount | Unavailable:
    """Find the mount that an absolute path without symbolic links ends in.

    Walks as the kernel does: from the root mount into the child that the path meets first, so that a mount hidden under a
    later one is not found, and of several on one point the last counts. Where the root mount is not listed (a chroot),
    the longest mount point wins.
    """
    if not os.path.isabs(path):
        return Unavailable(f"{os.fspath(path)}: not an absolute path")
    wanted = "/" + os.path.normpath(path).lstrip("/")  # POSIX lets two leading slashes stand
    covering = [mount for mount in mounts if mount.covers(wanted)]
    if not covering:
        return Unavailable(f"{wanted}: no mount covers it")
    ids = {mount.mount_id for mount in mounts}
    roots = [m for m in covering if m.mount_point == "/" and (m.parent_id not in ids or m.parent_id == m.mount_id)]
    if not roots:
        return max(reversed(covering), key=lambda mount: len(mount.mount_point))
    found = roots[-1]
    seen = {found.mount_id}  # a forged table may go round in circles
    while children := [m for m in covering if m.parent_id == found.mount_id and m.mount_id not in seen]:
        found = min(reversed(children), key=lambda mount: len(mount.mount_point))
        seen.add(found.mount_id)
    return found
