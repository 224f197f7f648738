"""/proc/PID/status: who a process is and what memory it holds.

Owns the keys of this file that somebody in the suite reads. Promises bytes, and None for a key that this kernel, this
process (kernel threads have no memory lines) or this text lacks. Refuses smaps' precision: the resident sizes are
per-CPU counters that may lag by some pages a CPU; in exchange reading takes 20 to 30 µs at any size and no lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.reading import PROC_ROOT, Pid, read_text
from hwr.procfs.text import keyed_lines, kilobytes, name_text, number, numbers, unescape_name


@dataclass(frozen=True, slots=True)
class Status:
    """A process or a thread; sizes in bytes.

    `name` may hold any character: escape it before it is shown. `state` is the kernel's letter. `ns_pids` are its ids from
    the reader's PID namespace to its own. `uids` are real, effective, saved and filesystem.
    """

    name: str
    state: str
    pid: int
    ppid: int
    tgid: int | None = None
    tracer_pid: int | None = None
    ns_pids: tuple[int, ...] | None = None
    uids: tuple[int, ...] | None = None
    gids: tuple[int, ...] | None = None
    threads: int | None = None
    kernel_thread: bool | None = None  # since Linux 6.8
    vm_size: int | None = None
    rss: int | None = None
    peak_rss: int | None = None  # VmHWM
    rss_anon: int | None = None  # since Linux 4.5, as the next two
    rss_file: int | None = None
    rss_shmem: int | None = None
    swap: int | None = None
    locked: int | None = None  # VmLck: mlock
    pinned: int | None = None  # VmPin: accounted long-term pins; NVIDIA's driver accounts none
    hugetlb: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a signal or a tracer holds it."""
        return self.state in ("T", "t")


def parse_status(text: bytes) -> Status | Unavailable:
    """Parse the file; without name, state, pid and parent there is no status."""
    found = keyed_lines(text)
    name, state = found.get(b"Name"), found.get(b"State", b"").strip()[:1]
    pid, ppid = number(found.get(b"Pid")), number(found.get(b"PPid"))
    if name is None or not state.isalpha() or pid is None or ppid is None:
        return Unavailable("status: no whole Name, State, Pid and PPid lines")
    kernel_thread = number(found.get(b"Kthread"))
    return Status(
        name=name_text(unescape_name(name.removeprefix(b"\t"))),
        state=state.decode("ascii"),
        pid=pid,
        ppid=ppid,
        tgid=number(found.get(b"Tgid")),
        tracer_pid=number(found.get(b"TracerPid")),
        ns_pids=numbers(found.get(b"NSpid")),
        uids=numbers(found.get(b"Uid")),
        gids=numbers(found.get(b"Gid")),
        threads=number(found.get(b"Threads")),
        kernel_thread=None if kernel_thread is None else kernel_thread != 0,
        vm_size=kilobytes(found.get(b"VmSize")),
        rss=kilobytes(found.get(b"VmRSS")),
        peak_rss=kilobytes(found.get(b"VmHWM")),
        rss_anon=kilobytes(found.get(b"RssAnon")),
        rss_file=kilobytes(found.get(b"RssFile")),
        rss_shmem=kilobytes(found.get(b"RssShmem")),
        swap=kilobytes(found.get(b"VmSwap")),
        locked=kilobytes(found.get(b"VmLck")),
        pinned=kilobytes(found.get(b"VmPin")),
        hugetlb=kilobytes(found.get(b"HugetlbPages")),
        voluntary_switches=number(found.get(b"voluntary_ctxt_switches")),
        involuntary_switches=number(found.get(b"nonvoluntary_ctxt_switches")),
    )


def read_status(pid: Pid, proc_root: Path = PROC_ROOT) -> Status | Unavailable:
    """Read a process's status; never blocks, whatever the process does."""
    text = read_text(proc_root / str(pid) / "status")
    return text if isinstance(text, Unavailable) else parse_status(text)
