"""What a writer's process is called here.

Owns the way from a journal's (namespace, pid, start) to a number in our own PID namespace. Promises never to take another process for the
writer: a start time that differs by more than a tick is somebody else. Refuses to guess: what is not visible is `Unavailable`, with why.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from hwr.errors import Unavailable
from hwr.procfs.identity import read_pid_namespace, start_ns
from hwr.procfs.reading import PROC_ROOT
from hwr.procfs.status import read_status

# One tick of the clock that /proc counts starts in is 10 ms; a journal's writer read the same file.
_TICK_NS: Final = 10_000_000
# A search reads every process's status once; a process that was not found is looked for again after this many nanoseconds.
_SEARCH_AGAIN_NS: Final = 10_000_000_000


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
        self._missed_ns: dict[Writer, int] = {}

    def of(self, writer: Writer, holder: int | None, now_ns: int) -> int | Unavailable:
        """Return the writer's number here; `holder` is who the kernel says holds its alive file's lock."""
        known = self._found.get(writer)
        if known is not None:
            if self._is(known, writer):
                return known
            del self._found[writer]
        same = writer.namespace is None or writer.namespace == self._own
        for candidate in (writer.ns_pid if same else None, holder):
            if candidate is not None and self._is(candidate, writer):
                return self._remember(writer, candidate)
        if same and holder is None:
            return Unavailable("its process is not visible: it has ended, or is hidden (hidepid)")
        missed = self._missed_ns.get(writer)
        if missed is None or now_ns - missed > _SEARCH_AGAIN_NS:
            for candidate in psutil.pids() if self._proc_root == PROC_ROOT else []:
                status = read_status(candidate, self._proc_root)
                inner = None if isinstance(status, Unavailable) else status.ns_pids
                if inner and len(inner) > 1 and inner[-1] == writer.ns_pid and self._is(candidate, writer):
                    return self._remember(writer, candidate)
            self._missed_ns[writer] = now_ns
        return Unavailable("its PID namespace is not below ours: run the agent in the host's (hostPID)")

    def _is(self, pid: int, writer: Writer) -> bool:
        started = start_ns(pid, self._proc_root)
        return not isinstance(started, Unavailable) and abs(started - writer.start_ns) <= _TICK_NS

    def _remember(self, writer: Writer, pid: int) -> int:
        if len(self._found) > 4096:
            self._found.clear()
        self._missed_ns.pop(writer, None)
        self._found[writer] = pid
        return pid
