"""What a writer's process is called here.

Owns the way from a journal's (namespace, pid, start) to a number in our own PID namespace. Promises never to take another process for the
writer: a start time that differs by more than a tick is somebody else, and so is whoever the kernel does not name as the holder of the
writer's lock. Refuses to guess: what is not visible is `Unavailable`, with why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import Unavailable
from hwr.procfs.identity import read_pid_namespace, start_ns
from hwr.procfs.reading import PROC_ROOT
from hwr.procfs.status import read_status
from hwr.units import NS_PER_S

# One tick of the clock that /proc counts starts in is 10 ms; a journal's writer read the same file.
TICK_NS: Final = 10_000_000
# Looking at every process costs 25 us each. Who was not found is in a namespace beside ours, and nothing will change that: one look serves
# all who are looked for. Another follows after a minute, or sooner for a process that has started since.
SEARCH_AGAIN_NS: Final = 60 * NS_PER_S
SEARCH_NEW_NS: Final = 5 * NS_PER_S
# Processes of one search; a node runs some thousands.
MAX_SEARCHED: Final = 20_000
MAX_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Writer:
    """Who a journal says that it is. `namespace` is the inode of its PID namespace, None if it did not say."""

    ns_pid: int
    start_ns: int
    namespace: int | None


class Pids:
    """Translates; remembers what it found."""

    def __init__(self, proc_root: Path = PROC_ROOT) -> None:
        self._proc_root = proc_root
        self._own = read_pid_namespace("self", proc_root)
        self._found: dict[Writer, int] = {}
        self._inner: dict[int, tuple[int, ...]] = {}
        self._searched_ns: int | None = None

    def of(self, writer: Writer, holder: int | None, now_ns: int) -> int | Unavailable:
        """Return the writer's number here; `holder` is who the kernel says holds its alive file's lock."""
        known = self._found.get(writer)
        if known is not None:
            if holder in (None, known) and self.is_writer(known, writer):
                return known
            del self._found[writer]
        if holder is not None:
            # The kernel translates into our own namespace. Whoever made the directory could have given it any other process's numbers.
            if self.is_writer(holder, writer):
                return self._remember(writer, holder)
            return Unavailable(
                f"its lock is held by pid {holder}, not by the process that its directory names (or that is hidden: hidepid)"
            )
        if writer.namespace is None or writer.namespace == self._own:
            if self.is_writer(writer.ns_pid, writer):
                return self._remember(writer, writer.ns_pid)
            if writer.namespace is not None:
                return Unavailable("its process is not visible: it has ended, or is hidden (hidepid)")
        for candidate in self._named_inside(writer, now_ns):
            if self.is_writer(candidate, writer):
                return self._remember(writer, candidate)
        return Unavailable("its process is not visible: its PID namespace is not below ours (run the agent in the host's: hostPID)")

    def is_writer(self, pid: int, writer: Writer) -> bool:
        """Say whether the process of this number, in our namespace, started when the writer did."""
        started = start_ns(pid, self._proc_root)
        return not isinstance(started, Unavailable) and abs(started - writer.start_ns) <= TICK_NS

    def _named_inside(self, writer: Writer, now_ns: int) -> tuple[int, ...]:
        """Return the processes whose own namespace, below ours, calls them what the writer calls itself."""
        last = self._searched_ns
        if last is None or now_ns - last > (SEARCH_NEW_NS if writer.start_ns > last else SEARCH_AGAIN_NS):
            self._searched_ns, self._inner = now_ns, self._search()
        return self._inner.get(writer.ns_pid, ())

    def _search(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        try:
            names = os.listdir(self._proc_root)
        except OSError:
            return found
        pids = [int(name) for name in names if name.isascii() and name.isdecimal()]
        for pid in pids[:MAX_SEARCHED]:
            status = read_status(pid, self._proc_root)
            inner = None if isinstance(status, Unavailable) else status.ns_pids
            if inner is not None and len(inner) > 1:
                found[inner[-1]] = (*found.get(inner[-1], ()), pid)
        return found

    def _remember(self, writer: Writer, pid: int) -> int:
        if len(self._found) >= MAX_REMEMBERED:
            self._found.clear()
        self._found[writer] = pid
        return pid
