"""Other processes that have the probe's libraries mapped, and which of them came or went while it measured.

Owns the looking: everybody at the start and at the end, once a second those that are new. Promises never to wait for a process that does
not answer (its mmap lock may be held for as long as it likes), to count it as unread instead, and to tell two owners of one PID apart.
Refuses to see what starts and ends between two looks. Why it matters: a page that one more process maps is private to none of them.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.errors import Unavailable
from hwr.procfs.reading import CAP_SYS_PTRACE, PROC_ROOT, read_text
from hwr.procfs.stat import read_stat
from hwr.units import printable

LOOK_EVERY_S: Final = 1.0
ANSWER_S: Final = 1.0
# Listing 200 processes takes 0.2 ms. A new process maps the libraries some seconds after it appeared, so it is looked at again.
_YOUNG_LOOKS: Final = 10
_LAST_LOOK_S: Final = 2.0
# A thread that hangs costs its stack; this many and nobody is asked any more.
_MOST_HUNG: Final = 16
_LIBRARY: Final = re.compile(rb"/(?:_safetensors_rust|libtorch|libc10|libpython|python\d|pypy)[^/]*\Z")
_FIELDS: Final = 5  # start-end, permissions, offset, device, inode; then the path


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process by what tells it apart."""

    pid: int
    name: str
    start_ns: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"pid": self.pid, "name": self.name}


def library_keys(maps: bytes) -> tuple[bytes, ...]:
    """Return the parts ` device inode ` of a maps text that name the libraries of the probe, and its interpreter."""
    found = set()
    for line in maps.splitlines():
        fields = line.split(None, _FIELDS)
        if len(fields) > _FIELDS and _LIBRARY.search(fields[_FIELDS]):
            found.add(b" %s %s " % (fields[3], fields[4]))
    return tuple(sorted(found))


class Watch:
    """The neighbours of one process, from the first look to `finish`. For one thread."""

    def __init__(
        self,
        pid: int,
        *,
        proc_root: Path = PROC_ROOT,
        clock: Callable[[], float] = time.monotonic,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._root, self._clock, self._answer_s = proc_root, clock, answer_s
        self._excluded = {pid, os.getpid()}
        self._answers: queue.SimpleQueue[tuple[int, Neighbour | Unavailable | None]] = queue.SimpleQueue()
        self._asked: dict[int, bool] = {}  # whether it was asked at the first look: who maps the libraries then, was there before
        self._looks: dict[int, int] = {}  # of those that were not there at the first look
        self._known: dict[int, Neighbour] = {}
        self._unread: set[int] = set()
        self._started: list[Neighbour] = []
        self._ended: list[Neighbour] = []
        self._present: set[int] = set()
        self._hung = 0
        self._keys: tuple[bytes, ...] = ()
        # Read here: it is our own child, and it waits for nothing of ours.
        maps = read_text(proc_root / str(pid) / "maps", capability=CAP_SYS_PTRACE)
        if not isinstance(maps, Unavailable):
            self._keys = library_keys(maps)
        self._reader = _Reader(self._root, self._keys, self._answers)
        self._due = clock()
        if self._keys:
            self._ask(self._listed(), first=True)

    def look(self) -> None:
        """Take in what was answered; once a second ask those that are new."""
        self._take()
        if not self._keys or self._clock() < self._due:
            return
        self._due = self._clock() + LOOK_EVERY_S
        listed = self._listed()
        self._gone(listed)
        new = listed - self._present
        self._looks.update(dict.fromkeys(new, 0))
        self._present |= new
        young = [pid for pid, looks in self._looks.items() if looks < _YOUNG_LOOKS]
        for pid in young:
            self._looks[pid] += 1
        self._ask(young, first=False)

    def finish(self) -> dict[str, Any] | None:
        """Look at everybody once more and return what changed; None where the probe's libraries were never seen."""
        if self._keys:
            deadline = time.monotonic() + _LAST_LOOK_S
            self._wait(deadline)  # whoever was asked at first and answers only now was there before
            listed = self._listed()
            self._gone(listed)
            self._ask(listed, first=False)
            self._wait(deadline)
            self._unread.update(self._asked)
        self._reader.stop()
        if not self._keys:
            return None
        return {
            "started": [neighbour.to_json() for neighbour in self._started],
            "ended": [neighbour.to_json() for neighbour in self._ended],
            "unread": len(self._unread),
        }

    def _wait(self, deadline: float) -> None:
        self._take()
        while self._asked and time.monotonic() < deadline:
            self._reader.answered.wait(0.02)
            self._reader.answered.clear()
            self._take()

    def _listed(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._root) if name.isdecimal()} - self._excluded
        except OSError:
            return set()

    def _gone(self, listed: set[int]) -> None:
        """Forget who is not there any more, so that the next owner of its number is new."""
        for pid, neighbour in list(self._known.items()):
            stat = read_stat(pid, self._root)
            if isinstance(stat, Unavailable) or stat.start_ns != neighbour.start_ns or stat.state in ("Z", "X"):
                self._ended.append(self._known.pop(pid))
                self._present.discard(pid)
        self._present &= listed
        for pid in self._looks.keys() - listed:
            del self._looks[pid]

    def _ask(self, pids: Iterable[int], *, first: bool) -> None:
        if first:
            self._present.update(pids)
        for pid in pids:
            if pid not in self._known and pid not in self._asked and pid not in self._unread:
                self._asked[pid] = first
                self._reader.ask(pid)

    def _take(self) -> None:
        while not self._answers.empty():
            pid, answer = self._answers.get()
            first = self._asked.pop(pid, None)
            if first is None:  # it was given up before
                continue
            if isinstance(answer, Neighbour):
                self._known[pid] = answer
                if not first:
                    self._started.append(answer)
            elif isinstance(answer, Unavailable):
                self._unread.add(pid)
        busy = self._reader.busy
        if busy is None or time.monotonic() - busy[1] < self._answer_s or busy[0] not in self._asked:
            return
        del self._asked[busy[0]]
        self._unread.add(busy[0])
        self._hung += 1
        self._reader.stop()
        if self._hung >= _MOST_HUNG:
            self._unread.update(self._asked)
            self._asked.clear()
        self._reader = _Reader(self._root, self._keys, self._answers)
        for pid in self._asked:
            self._reader.ask(pid)


class _Reader:
    """A thread that reads maps, one after the other; whoever it hangs on, it hangs alone."""

    def __init__(self, root: Path, keys: tuple[bytes, ...], answers: queue.SimpleQueue[tuple[int, Neighbour | Unavailable | None]]) -> None:
        self.busy: tuple[int, float] | None = None
        self.answered = threading.Event()
        self._root, self._keys, self._answers = root, keys, answers
        self._questions: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="hwr-neighbours", daemon=True).start()

    def ask(self, pid: int) -> None:
        self._questions.put(pid)

    def stop(self) -> None:
        self._stopped.set()
        self._questions.put(None)

    def _run(self) -> None:
        while (pid := self._questions.get()) is not None and not self._stopped.is_set():
            self.busy = pid, time.monotonic()
            answer = self._read(pid)
            if self._stopped.is_set():  # it was given up, and its questions have gone to another
                return
            self._answers.put((pid, answer))
            self.busy = None
            self.answered.set()

    def _read(self, pid: int) -> Neighbour | Unavailable | None:
        """Return the process if it has a library mapped, None if it has none or has gone, why it cannot be read otherwise."""
        path = self._root / str(pid) / "maps"
        maps = read_text(path, capability=CAP_SYS_PTRACE)
        if isinstance(maps, Unavailable):
            return maps if os.path.lexists(path) and CAP_SYS_PTRACE in maps.reason else None
        if not any(key in maps for key in self._keys):
            return None
        stat = read_stat(pid, self._root)
        return None if isinstance(stat, Unavailable) else Neighbour(pid, printable(stat.comm), stat.start_ns)
