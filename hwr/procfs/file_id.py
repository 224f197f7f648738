"""What a file is called in the kernel's tables: device and inode.

Owns the one key by which locks and mappings are attributed to files; a path in /proc is text that anybody may forge
with a file name, and " (deleted)" may be part of it.
Promises the device that /proc/locks, /proc/PID/maps and smaps print. Refuses to open files for reading.

Those tables print the device of the mounted filesystem. `stat` answers the same on ext4, xfs and tmpfs, but a device of
its own on btrfs (one a subvolume) and on overlayfs with layers on several filesystems. `FileId.in_tables` asks the
mount instead, so that a store inside a container's root filesystem is found too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.mountinfo import read_mountinfo
from hwr.procfs.reading import PROC_ROOT, read_text, unreadable
from hwr.procfs.text import keyed_lines, number


@dataclass(frozen=True, slots=True)
class FileId:
    """Device and inode of a file."""

    major: int
    minor: int
    inode: int

    def __str__(self) -> str:
        """Write it as /proc/locks does: the device in hexadecimal."""
        return f"{self.major:02x}:{self.minor:02x}:{self.inode}"

    @classmethod
    def of_stat(cls, stat: os.stat_result) -> FileId:
        """Take what `stat` answered; see the module for the filesystems where the tables say something else."""
        return cls(os.major(stat.st_dev), os.minor(stat.st_dev), stat.st_ino)

    @classmethod
    def in_tables(cls, path: str | os.PathLike[str], proc_root: Path = PROC_ROOT) -> FileId | Unavailable:
        """Learn the name that the kernel's tables use for the file at `path`."""
        try:
            # O_PATH asks for no permission on the file and waits for nobody, also on a FIFO.
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            return unreadable(Path(path), error)
        except ValueError:
            return Unavailable("a path cannot hold a NUL byte")
        try:
            answered = cls.of_stat(os.fstat(descriptor))
            info = read_text(proc_root / "self" / "fdinfo" / str(descriptor))
        except OSError as error:
            return unreadable(Path(path), error)
        finally:
            os.close(descriptor)
        mounts = read_mountinfo("self", proc_root)
        if isinstance(info, Unavailable) or isinstance(mounts, Unavailable):
            return answered  # a tree without us in it (a copied one): what stat says is the best there is
        mount_id = number(keyed_lines(info).get(b"mnt_id"))
        for mount in mounts:
            if mount.mount_id == mount_id:
                return cls(mount.major, mount.minor, answered.inode)
        return answered
