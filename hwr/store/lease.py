"""Leases: an artifact mapped into this process.

Owns the mapping, the shared lock, and the handing over. Promises one shared read-only mapping a file and at most two descriptors
(E1): a write faults instead of diverging. A lease never unmaps under a live view (E2): each view holds an export of its mapping, so
closing is a typed refusal while one lives, and a dropped lease is unmapped when its last view dies. A forked child may not use it (E3).
Refuses pickling, and to be taken twice from its carrier.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from hwr.errors import ActiveLease, LeaseClosed, LeaseInherited, LeaseLost
from hwr.outcomes import ValidationLevel
from hwr.store.locks import HeldLock
from hwr.store.manifest import Manifest, ReadyMarker, TensorEntry
from hwr.telemetry import emit
from hwr.telemetry import events as E
from hwr.telemetry.memory import Mapped
from hwr.units import short_key

NAMES_SHOWN: Final = 3
_numbers = itertools.count(1)


@dataclass(slots=True)
class MappedFile:
    """One payload file, mapped shared and read-only; `mapping` is None for what has no bytes."""

    name: str
    size: int
    device: int
    inode: int
    mapping: mmap.mmap | None
    data: memoryview

    def in_use(self) -> bool:
        """Whether somebody else than we holds an export of the mapping; it is as it was afterwards."""
        if self.mapping is None:
            return False
        self.data.release()
        try:
            # The one question that mmap answers about its exports without closing: they are looked at before anything else.
            self.mapping.resize(self.size)
        except BufferError:
            return True
        except (TypeError, ValueError, OSError, SystemError):  # a read-only mapping is never resized
            return False
        finally:
            self.data = memoryview(self.mapping)
        return False

    def unmap(self) -> None:
        """Unmap, unless somebody holds an export: then the mapping goes with that."""
        self.data.release()
        self.data = memoryview(b"")
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                return


class _Tail:
    """What is left to do when the last mapping of a lease is gone, however it went: let go of the lock and tell."""

    def __init__(self, key: str, number: str, lock: HeldLock, mappings: list[mmap.mmap]) -> None:
        self._key, self._number, self._lock = key, number, lock
        self._pid, self._opened = os.getpid(), time.monotonic()
        self._count, self._gone = len(mappings), itertools.count(1)
        self._ended = False
        for mapping in mappings:
            weakref.finalize(mapping, self._one_gone).atexit = False

    def _one_gone(self) -> None:
        if next(self._gone) == self._count:  # one step, since views may die in any thread
            self.end()

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._lock.release()
        if os.getpid() == self._pid:
            emit(E.LeaseClosed(key=self._key, lease=self._number, held_seconds=time.monotonic() - self._opened))


class HostWeightLease:
    """Views of one artifact's bytes, for this process. Close it once, after the last tensor is gone. Any thread may use it."""

    def __init__(
        self,
        manifest: Manifest,
        ready: ReadyMarker,
        files: Mapping[str, MappedFile],
        lock: HeldLock,
        validation: ValidationLevel,
    ) -> None:
        self.manifest, self.ready, self.validation = manifest, ready, validation
        self.number = f"{os.getpid()}-{next(_numbers)}"
        self._files = dict(files)
        self._pid = os.getpid()
        self._views: dict[str, weakref.ref[memoryview]] = {}
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._closed = False
        self._mutex = threading.RLock()  # reentrant: a finalizer may close while this thread makes a view
        # A lease that is dropped and never closed: the lock goes with the last of its mappings, not before.
        self._tail = _Tail(manifest.key, self.number, lock, [file.mapping for file in self._files.values() if file.mapping is not None])
        self._lock = lock
        emit(
            E.LeaseOpened(
                key=self.key,
                lease=self.number,
                bytes=manifest.payload_bytes,
                files=len(files),
                tensors=len(manifest.tensors),
                validation=validation,
            )
        )

    @property
    def key(self) -> str:
        """The artifact's key."""
        return self.manifest.key

    @property
    def closed(self) -> bool:
        """Whether the mapping is gone."""
        return self._closed

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield what the artifact holds, by name."""
        return iter(self.manifest.tensors)

    def view(self, name: str) -> memoryview:
        """Return the bytes of a tensor, read-only. The mapping lives at least as long as the view.

        Raises:
            LeaseClosed, LeaseInherited: this lease cannot be used any more, or not here.
            KeyError: no such tensor.
        """
        self._check()
        with self._mutex:
            self._check()  # another thread may have closed it
            held = self._views.get(name)
            view = held() if held is not None else None
            if view is None:
                tensor = self._tensors[name]
                view = self._files[tensor.file].data[tensor.offset : tensor.offset + tensor.nbytes]
                self._views[name] = weakref.ref(view)
        return view

    def live(self) -> list[str]:
        """Name the tensors whose views are still referenced by somebody."""
        return [name for name, held in list(self._views.items()) if held() is not None]

    def regions(self) -> list[tuple[str, memoryview]]:
        """Return the whole mapping of each file, for registration; like a view, each keeps the lease from being closed."""
        self._check()
        with self._mutex:
            return [(file.name, file.data[:]) for file in self._files.values() if file.size]

    def mapped(self) -> Mapped:
        """Return what to look for in smaps."""
        files = tuple((file.device, file.inode) for file in self._files.values())
        return Mapped(key=self.key, bytes=self.manifest.payload_bytes, files=files)

    def recheck(self) -> None:
        """Ask the kernel whether the files are still those that were mapped.

        Raises:
            LeaseLost: a file was truncated or grew under its mapping; touching it may raise SIGBUS.
        """
        self._check()
        for file in self._files.values():
            size = file.size if file.mapping is None else file.mapping.size()
            if size != file.size:
                emit(E.LeaseLost(key=self.key, file=file.name, cause="size_changed"))
                problem = f"it has {size} bytes, not {file.size}"
                raise LeaseLost(reason="size_changed", key=short_key(self.key), file=file.name, problem=problem)

    def close(self) -> None:
        """Unmap and unlock; a second call does nothing. In a forked child only descriptors are closed.

        Raises:
            ActiveLease: tensors still use the memory; nothing was closed, try again once they are gone.
        """
        if os.getpid() != self._pid:
            self._closed = True
            self._lock.release()
            return
        with self._mutex:
            if self._closed:
                return
            live = self.live()
            # Parts of views, and regions, have no name here; the mapping knows of them all the same.
            count = len(live) or sum(file.in_use() for file in self._files.values())
            if count:
                emit(E.LeaseCloseRefused(key=self.key, lease=self.number, live_tensors=count))
                names = ", ".join(live[:NAMES_SHOWN] or ["parts of them"]) + (", …" if len(live) > NAMES_SHOWN else "")
                raise ActiveLease(reason="live_views", key=short_key(self.key), count=count, names=names)
            self._closed = True
            for file in self._files.values():
                file.unmap()
            self._files.clear()
        self._tail.end()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            emit(E.LeaseInherited(key=self.key, creator_pid=self._pid))
            raise LeaseInherited(reason="forked", key=short_key(self.key), creator_pid=self._pid, pid=os.getpid())
        if self._closed:
            raise LeaseClosed(reason="closed", key=short_key(self.key))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease belongs to its process and cannot be pickled; acquire one there")

    def __enter__(self) -> HostWeightLease:
        self._check()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class HostWeightLeaseCarrier:
    """Hands a lease over exactly once; closing an untaken carrier closes the lease."""

    def __init__(self, lease: HostWeightLease) -> None:
        self._lease: HostWeightLease | None = lease
        self._key = lease.key
        self._mutex = threading.Lock()

    def take(self) -> HostWeightLease:
        """Give the lease to its next owner.

        Raises:
            LeaseClosed: it was taken before.
        """
        with self._mutex:
            lease, self._lease = self._lease, None
        if lease is None:
            raise LeaseClosed(reason="taken", key=short_key(self._key))
        return lease

    @property
    def lease(self) -> HostWeightLease | None:
        """The lease while nobody has taken it; it stays this carrier's."""
        return self._lease

    @property
    def taken(self) -> bool:
        """Whether the lease has gone to its next owner."""
        return self._lease is None

    def close(self) -> None:
        """Close the lease unless it was taken."""
        lease = self._lease
        if lease is not None:
            lease.close()
            self._lease = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a carrier belongs to its process and cannot be pickled")


def map_file(fd: int, name: str, size: int) -> MappedFile:
    """Map a payload file shared and read-only; the mapping keeps a descriptor of its own.

    Raises:
        OSError: ENODEV where the filesystem has no shared mappings, ENOMEM, EMFILE.
    """
    facts = os.fstat(fd)
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) if size else None
    data = memoryview(mapping) if mapping is not None else memoryview(b"")
    return MappedFile(name=name, size=size, device=facts.st_dev, inode=facts.st_ino, mapping=mapping, data=data)
