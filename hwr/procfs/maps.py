"""/proc/PID/maps: the mappings of a process, without their counters.

Owns the file read for the mappings of certain files. Promises attribution by device and inode only. Refuses to be free: it takes the
target's mmap lock as smaps does, for a fraction of the time, since no page is looked at.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, unreadable
from hwr.procfs.smaps import parse_mapping_line

_BUFFER_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping of a file."""

    start: int
    end: int
    perms: str
    offset: int
    file: FileId

    @property
    def size(self) -> int:
        """Bytes of address space."""
        return self.end - self.start


def iter_maps(lines: Iterable[bytes], wanted: Container[FileId] | None = None) -> Iterator[Mapping]:
    """Parse lines as a binary file yields them; anonymous mappings, other files and torn lines are left out."""
    for line in lines:
        parsed = parse_mapping_line(line)
        if parsed is not None:
            start, end, perms, offset, file, _ = parsed
            if file is not None and (wanted is None or file in wanted):
                yield Mapping(start, end, perms, offset, file)


def read_maps(pid: Pid, proc_root: Path = PROC_ROOT, wanted: Container[FileId] | None = None) -> tuple[Mapping, ...] | Unavailable:
    """Read the file mappings of a process; may block for as long as the target's mmap lock is held.

    A text without a line is Unavailable: that of a kernel thread or a zombie.
    """
    path = proc_root / str(pid) / "maps"
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as lines:
            found = tuple(iter_maps(lines, wanted))
            empty = not found and lines.tell() == 0
    except OSError as error:
        return unreadable(path, error, capability=CAP_SYS_PTRACE)
    return Unavailable(f"{path}: no mapping: it has no memory of its own (kernel thread, zombie)") if empty else found
