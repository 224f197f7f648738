"""What lies in each store, as one elected reporter sees it.

Owns which roots are looked at (`Roots`), the way into one, the election, and the inventory. Promises to write nothing into a store and to
take no lock in it, that each root is touched by its own collector only, and that a journal sends a privileged reader nowhere but into a
directory that the journal's own owner has. Refuses to judge: a listed artifact was not validated.

The election: whoever holds `reporter.<domain>.lock` of the run directory reports that domain. The file is never deleted, its inode is the
protocol.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diag.node.artifact_files import ArtifactIndex
from diag.node.collecting import Collected
from diag.node.runs import Seen
from diag.node.snapshot import Artifact, Store
from hwr.errors import Unavailable, errno_text
from hwr.outcomes import InventoryState, Liveness
from hwr.procfs.mountinfo import mount_of, read_mountinfo
from hwr.procfs.reading import PROC_ROOT
from hwr.store.inventory import Inventory, Tree, document
from hwr.store.layout import StoreLayout
from hwr.telemetry import span
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.events import InventoryBegun
from hwr.units import MIB, NS_PER_S, printable

MAX_DOMAINS: Final = 8
MAX_ARTIFACTS: Final = 20_000
DOMAIN_DIGITS: Final = 12
# Between two looks at what is leased and whose turn it is; an inventory is made again after the second, or this many times its cost.
EVERY_SECONDS: Final = 2.0
INVENTORY_EVERY_SECONDS: Final = 10.0
COST_SHARE: Final = 200
DEADLINE_SECONDS: Final = 10.0

_POLICY_BYTES: Final = MIB
_LOCK_MODE: Final = 0o660
_MAX_PATH: Final = 4096
_MAX_REASON: Final = 64


@dataclass(frozen=True, slots=True)
class Root:
    """A root as the operator or a journal calls it; a journal's is entered only as far as its owner has it."""

    name: str
    configured: bool


class Roots:
    """Which roots there are: those given, then those that journals name, the newest first; at most eight."""

    def __init__(self, configured: Sequence[Path], limit: int = MAX_DOMAINS) -> None:
        self._configured, self._limit = tuple(dict.fromkeys(str(path) for path in configured)), limit
        self.left_out: tuple[str, ...] = ()

    def find(self, workers: Sequence[Seen]) -> tuple[Root, ...]:
        """Return them, the living workers' before those of the dead; touches no filesystem."""
        named: dict[str, None] = dict.fromkeys(self._configured)
        for worker in sorted(workers, key=lambda worker: (worker.liveness is not Liveness.ALIVE, -worker.start_ns)):
            for root in reversed(worker.roots):
                if root.startswith("/") and "\0" not in root and len(root) <= _MAX_PATH:
                    named.setdefault(os.path.normpath(root))
        roots = tuple(Root(name, name in self._configured) for name in named)
        self.left_out = tuple(printable(root.name) for root in roots[self._limit :])
        return roots[: self._limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFound:
    """A store and its artifacts; `root` is the collector's target.

    `path` is where this reader enters it, `device` what the kernel's tables print for files of it; None while it could not be entered.
    `artifacts` is the same object as long as nothing changed.
    """

    store: Store
    artifacts: tuple[Artifact, ...] = ()
    root: str = ""
    path: Path | None = None
    device: tuple[int, int] | None = None


class Reporters:
    """Which domains this process reports. Any thread may ask."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` is the run directory where agents meet; without one, everybody reports."""
        self._directory, self._guard = directory, threading.Lock()
        self._held: dict[str, int] = {}
        self._owners: dict[tuple[int, int], tuple[str, str]] = {}  # of the root's directory: domain, and the collector's root

    def domain_of(self, path: Path, facts: os.stat_result, root: str) -> tuple[str, str]:
        """Return the domain of a root, and by which name this process reads it: two names of one directory are one domain."""
        place = (facts.st_dev, facts.st_ino)
        known = self._owners.get(place)
        if known is not None:
            return known
        real = os.path.realpath(path)  # outside of the guard: this may hang
        with self._guard:
            domain = _digits(real)
            if any(domain == other for other, _ in self._owners.values()):  # the same path, in another mount namespace
                domain = _digits(f"{real}\0{place}")
            return self._owners.setdefault(place, (domain, root))

    def elected(self, domain: str) -> bool | Unavailable:
        """Say whether this process reports a domain; Unavailable where the run directory does not let agents agree."""
        with self._guard:
            if domain in self._held:
                return True
            if self._directory is None:
                return Unavailable("there is no run directory to agree in")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                descriptor = os.open(self._directory / f"reporter.{domain}.lock", flags, _LOCK_MODE)
            except OSError as error:
                return Unavailable(f"the run directory does not let agents agree on one reporter: {errno_text(error)}")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                return False if isinstance(error, BlockingIOError) else Unavailable(f"flock in the run directory: {errno_text(error)}")
            self._held[domain] = descriptor
            return True

    def forget(self, root: str) -> None:
        """Let another name have the domain that was read by this one."""
        with self._guard:
            for place in [place for place, (_, owner) in self._owners.items() if owner == root]:
                domain, _ = self._owners.pop(place)
                descriptor = self._held.pop(domain, -1)
                if descriptor >= 0:
                    os.close(descriptor)

    def close(self) -> None:
        """Let other agents report."""
        with self._guard:
            while self._held:
                os.close(self._held.popitem()[1])


class StoreCollector:
    """Reads one root."""

    def __init__(
        self,
        root: Root,
        workers: Callable[[], Sequence[Seen]],
        index: ArtifactIndex,
        reporters: Reporters,
        *,
        proc_root: Path = PROC_ROOT,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self.root = root
        self._workers, self._index, self._reporters = workers, index, reporters
        self._proc_root, self._clock = proc_root, clock
        self._inventory: Inventory | None = None
        self._path: Path | None = None
        self._due_ns = 0
        self._found: StoreFound | None = None
        self._artifacts: dict[Path, tuple[Tree, Artifact]] = {}

    def collect(self) -> Collected[StoreFound] | Unavailable:
        """Look: at the whole store if that is due, else at what is leased and not known yet."""
        entered = enter(self.root, self._workers(), self._proc_root)
        if isinstance(entered, Unavailable):
            self._found = None
            return entered
        path, facts = entered
        if path != self._path:
            self._path, self._inventory, self._found, self._due_ns = path, Inventory(path, MAX_ARTIFACTS), None, 0
        domain, owner = self._reporters.domain_of(path, facts, self.root.name)
        elected = self._reporters.elected(domain) if owner == self.root.name else False
        problem = elected.reason if isinstance(elected, Unavailable) else None
        self._leased(path)
        if elected is False:
            told = None if owner == self.root.name else f"the same directory is reported as {printable(owner)}"
            self._found, self._due_ns = None, 0
            store = Store(domain=domain, root=printable(self.root.name), reporting=False, problem=told)
            return Collected(StoreFound(store=store, root=self.root.name, path=path, device=self._device(path, facts)))
        if self._found is not None and self._clock() < self._due_ns:
            return Collected(self._found, self._found.store.problem)
        begun = time.perf_counter()
        found = self._look(path, facts, domain, problem)
        cost = time.perf_counter() - begun
        self._due_ns = self._clock() + int(max(INVENTORY_EVERY_SECONDS, cost * COST_SHARE) * NS_PER_S)
        if isinstance(found, Unavailable):
            self._found = None
            return found
        after = enter(self.root, self._workers(), self._proc_root)
        if isinstance(after, Unavailable) or (after[1].st_dev, after[1].st_ino) != (facts.st_dev, facts.st_ino):
            return Unavailable("the root was replaced while it was read")
        self._found = found
        return Collected(found, found.store.problem)

    def _leased(self, path: Path) -> None:
        """Learn the files of what was leased since the last inventory, so that nobody waits for the next one."""
        keys = {str(lease.get("key")) for worker in self._workers() for lease in worker.state.leases.values()}
        for key in keys:
            if self._index.known(key) is None:
                self._index.find(key, path)

    def _look(self, path: Path, facts: os.stat_result, domain: str, problem: str | None) -> StoreFound | Unavailable:
        assert self._inventory is not None
        with span(InventoryBegun(root=self.root.name), root=self.root.name) as telling:
            trees = self._inventory.look()
            if isinstance(trees, Unavailable):
                telling.add(problem=trees.reason)
                return trees
            self._index.learn(path, trees)
            sizes = dict.fromkeys(InventoryState, 0)
            entries = dict.fromkeys(InventoryState, 0)
            for tree in trees:
                sizes[tree.entry.state] += tree.entry.size_bytes
                entries[tree.entry.state] += 1
            telling.add(entries=len(trees), bytes=sum(sizes.values()), problem=problem)
        if self._inventory.left_out:
            problem = f"{self._inventory.left_out} more than {MAX_ARTIFACTS} artifacts are not listed"
        free: os.statvfs_result | None = None
        with contextlib.suppress(OSError):
            free = os.statvfs(path)
        store = Store(
            domain=domain,
            root=printable(self.root.name),
            reporting=True,
            problem=problem,
            sampled_ns=self._clock(),
            fstype=self._fstype(path),
            entries=entries,
            bytes=sizes,
            limit_bytes=_limit(path),
            free_bytes=None if free is None else free.f_bavail * free.f_frsize,
            free_inodes=None if free is None or not free.f_files else free.f_favail,
        )
        artifacts = self._named(trees, domain)
        if self._found is not None and artifacts == self._found.artifacts:
            artifacts = self._found.artifacts
        return StoreFound(store=store, artifacts=artifacts, root=self.root.name, path=path, device=self._device(path, facts))

    def _named(self, trees: Sequence[Tree], domain: str) -> tuple[Artifact, ...]:
        before, self._artifacts = self._artifacts, {}
        for tree in trees:
            known = before.get(tree.entry.path)
            if known is None or known[0] is not tree:  # an unchanged tree is the object that it was, and so is its artifact
                known = (tree, _artifact(tree, domain))
            self._artifacts[tree.entry.path] = known
        return tuple(artifact for _, artifact in self._artifacts.values())

    def _device(self, path: Path, facts: os.stat_result) -> tuple[int, int]:
        return self._index.device(path, path, facts.st_dev)

    def _fstype(self, path: Path) -> str | None:
        mounts = read_mountinfo("self", self._proc_root)
        mount = mounts if isinstance(mounts, Unavailable) else mount_of(os.path.realpath(path), mounts)
        return None if isinstance(mount, Unavailable) else printable(mount.fstype, _MAX_REASON)


def enter(root: Root, workers: Sequence[Seen], proc_root: Path = PROC_ROOT) -> tuple[Path, os.stat_result] | Unavailable:
    """Find the directory of a root as this process can reach it.

    A root that only a journal names must belong to the owner of such a journal: a journal is somebody's file, and this reader may be
    privileged. Where its writer has mounts of its own, the way goes through that writer's root.
    """
    reasons: list[str] = []
    for path, owner in _ways(root, workers, proc_root):
        try:
            facts = os.stat(path)
        except OSError as error:
            reasons.append(errno_text(error))
            continue
        if not stat.S_ISDIR(facts.st_mode):
            reasons.append("it is not a directory")
        elif owner is not None and facts.st_uid != owner:
            reasons.append(f"it belongs to uid {facts.st_uid}, the journal that names it to uid {owner}")
        else:
            return path, facts
    return Unavailable(reasons[0] if reasons else "no journal names it any more")


def _ways(root: Root, workers: Sequence[Seen], proc_root: Path) -> list[tuple[Path, int | None]]:
    if root.configured:
        return [(Path(root.name), None)]
    ways: dict[tuple[Path, int | None], None] = {}
    own = _mounts("self", proc_root)
    for worker in workers:
        if worker.uid is None or root.name not in map(os.path.normpath, worker.roots):
            continue
        theirs = None if worker.pid is None or worker.liveness is not Liveness.ALIVE else _mounts(str(worker.pid), proc_root)
        if theirs is not None and own is not None and theirs != own:
            ways[proc_root / str(worker.pid) / "root" / root.name.lstrip("/"), worker.uid] = None
        else:
            ways[Path(root.name), worker.uid] = None
    return list(ways)


def _digits(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:DOMAIN_DIGITS]


def _mounts(pid: str, proc_root: Path) -> str | None:
    try:
        return os.readlink(proc_root / pid / "ns/mnt")
    except OSError:
        return None


def _artifact(tree: Tree, domain: str) -> Artifact:
    entry = tree.entry
    return Artifact(
        key=printable(entry.key, 128),
        domain=domain,
        state=entry.state,
        reason=None if entry.reason is None else printable(entry.reason, _MAX_REASON),
        bytes=entry.size_bytes,
        files=entry.files,
        modified_ns=entry.modified_ns,
    )


def _limit(path: Path) -> int | None:
    """Return the limit that the store's policy names, if it names one."""
    policy: Mapping[str, object] = document(StoreLayout(path).policy, _POLICY_BYTES) or {}
    limit = policy.get("max_store_bytes")
    return limit if type(limit) is int and limit >= 0 else None
