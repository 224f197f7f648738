"""/proc/PID/smaps: every mapping of a process, and what each costs.

Owns the mapping's line and its counters, and the sum over the mappings of one file.
Promises to stream (tens of thousands of mappings a second of parsing), attribution by device and inode only, and to
leave a sum unknown where a mapping's counters are missing. Refuses atomicity: the kernel lets go of the mmap lock
between pages of text, so that a busy process changes while it is read. It costs the target what `smaps_rollup` costs, and more.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.file_id import FileId
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, Pid, read_text, unreadable
from hwr.procfs.smaps_rollup import AMOUNT_KEYS, Amounts
from hwr.procfs.text import hexadecimal, kilobytes, name_text, number
from hwr.units import KIB

_BUFFER_BYTES: Final = 1 << 20
_SLOTS: Final = {key: at for at, key in enumerate(AMOUNT_KEYS)}
_UPPER_A: Final = ord("A")
_UPPER_Z: Final = ord("Z")
_NOTHING: Final[tuple[int | None, ...]] = (None,) * len(AMOUNT_KEYS)
# proc(5): start-end, permissions, offset, device, inode, then a path that may hold blanks.
_HEADER_FIELDS: Final = 5
_HEADER: Final = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Vma:
    """One mapping.

    `pathname` is the kernel's raw text, with " (deleted)" and octal escapes: for people, never for attribution.
    `file` is None for anonymous memory. `flags` are the two-letter words of VmFlags.
    """

    start: int
    end: int
    perms: str
    offset: int
    file: FileId | None
    pathname: str
    amounts: Amounts
    flags: tuple[str, ...] | None

    @property
    def size(self) -> int:
        """Bytes of address space."""
        return self.end - self.start

    @property
    def shared(self) -> bool:
        """Whether writes reach the file (MAP_SHARED); a private mapping may hold anonymous copies."""
        return self.perms.endswith("s")


@dataclass(frozen=True, slots=True)
class FileUse:
    """What the mappings of one file cost one process, in bytes; no mapping is a true 0."""

    mappings: int
    size: int
    amounts: Amounts


def iter_smaps(lines: Iterable[bytes], wanted: Container[FileId] | None = None) -> Iterator[Vma]:
    """Parse lines as a binary file yields them, newline included; with `wanted`, only the mappings of these files.

    A line that is torn or strange is skipped; a mapping whose own line is, is left out.
    """
    header: tuple[int, int, str, int, FileId | None, str] | None = None
    values = list(_NOTHING)
    flags: tuple[str, ...] | None = None
    known_flags: dict[bytes, tuple[str, ...]] = {}
    for line in lines:
        if _UPPER_A <= line[0] <= _UPPER_Z:  # a counter; a mapping's line begins with a lower-case hexadecimal digit
            if header is None:
                continue
            key, _, rest = line.partition(b":")
            slot = _SLOTS.get(key)
            if slot is not None:
                values[slot] = _amount(rest)
            elif key == b"VmFlags" and rest.endswith(b"\n"):
                flags = known_flags.get(rest)
                if flags is None:
                    flags = known_flags[rest] = tuple(name_text(word) for word in rest.split())
            continue
        if header is not None:
            yield Vma(*header, Amounts(*values), flags)
        header = parse_mapping_line(line)
        if header is not None and wanted is not None and (header[4] is None or header[4] not in wanted):
            header = None
        values = list(_NOTHING)
        flags = None
    if header is not None:
        yield Vma(*header, Amounts(*values), flags)


@functools.lru_cache(maxsize=4096)  # a hundred thousand mappings repeat few amounts, 0 above all
def _amount(rest: bytes) -> int | None:
    return kilobytes(rest[:-1])  # a torn line loses its unit here, and with it its value


def parse_mapping_line(line: bytes) -> tuple[int, int, str, int, FileId | None, str] | None:
    """Parse the line of a mapping: start, end, permissions, offset, file, the kernel's text; None for a torn or strange one."""
    if not line.endswith(b"\n"):
        return None
    fields = line[:-1].split(None, _HEADER_FIELDS)
    if len(fields) < _HEADER_FIELDS:
        return None
    start, dash, end = fields[0].partition(b"-")
    major, colon, minor = fields[3].partition(b":")
    numbers = [hexadecimal(word) for word in (start, end, fields[2], major, minor)]
    numbers.append(number(fields[4]))
    whole = [value for value in numbers if value is not None]
    if not dash or not colon or len(whole) != len(numbers) or len(fields[1]) != 4:
        return None
    first, last, offset, device_major, device_minor, inode = whole
    anonymous = not (device_major or device_minor or inode)
    file = None if anonymous else FileId(device_major, device_minor, inode)
    pathname = name_text(fields[_HEADER_FIELDS]) if len(fields) > _HEADER_FIELDS else ""
    return first, last, name_text(fields[1]), offset, file, pathname


def parse_smaps(text: bytes, wanted: Container[FileId] | None = None) -> tuple[Vma, ...]:
    """Parse a whole text."""
    # Not splitlines(): a path may hold a carriage return, only the newline is escaped.
    return tuple(iter_smaps(io.BytesIO(text), wanted))


def read_smaps(pid: Pid, proc_root: Path = PROC_ROOT, wanted: Container[FileId] | None = None) -> tuple[Vma, ...] | Unavailable:
    """Read the mappings of a process; may block for as long as the target's mmap lock is held.

    A text without a mapping is Unavailable; that of a kernel thread or a zombie is empty.
    """
    path = proc_root / str(pid) / "smaps"
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as lines:
            found = tuple(iter_smaps(lines, wanted))
            empty = not found and (wanted is None or lines.tell() == 0)
    except OSError as error:
        return unreadable(path, error, capability=CAP_SYS_PTRACE)
    return Unavailable(f"{path}: no mapping: it has no memory of its own (kernel thread, zombie)") if empty else found


def read_text_of(pid: Pid, proc_root: Path = PROC_ROOT) -> bytes | Unavailable:
    """Read the whole text, for `sections` and `total`; may block for as long as the target's mmap lock is held."""
    return read_text(proc_root / str(pid) / "smaps", capability=CAP_SYS_PTRACE)


def sections(text: bytes, wanted: Collection[FileId]) -> bytes:
    """Cut out the mappings of some files: a search over the text costs a hundredth of parsing all of it."""
    if not wanted:
        return b""
    places = b"|".join(re.escape(b"%02x:%02x %d" % (file.major, file.minor, file.inode)) for file in wanted)
    found = re.finditer(rb"^[0-9a-f]+-[0-9a-f]+ .{4} [0-9a-f]+ (?:" + places + rb")[ \n]", text, re.MULTILINE)
    parts: list[bytes] = []
    for match in found:
        following = _HEADER.search(text, match.end())
        parts.append(text[match.start() : following.start() if following else len(text)])
    return b"".join(parts)


def total(text: bytes, key: str) -> int | None:
    """Sum one counter over all mappings, in bytes; None if no mapping has it."""
    # Split, not searched: of a text of a megabyte that is a tenth of the time.
    following = text.split(b"\n" + key.encode("ascii") + b":")[1:]
    found = [amount for amount in (number(part[: part.find(b" kB\n")]) for part in following) if amount is not None]
    return sum(found) * KIB if found else None


def file_use(vmas: Iterable[Vma], file: FileId) -> FileUse:
    """Sum the mappings of one file."""
    own = [vma for vma in vmas if vma.file == file]
    return FileUse(len(own), sum(vma.size for vma in own), Amounts.total(vma.amounts for vma in own))
