"""What is registered, and what holds its memory.

Owns the exports of the mappings and the list of chunks that may be registered. Promises that a mapping stays for as long as one
chunk of it may be registered (H1): an export is given back after its last chunk was unregistered, and only then, whatever happens
(close, garbage collection, an exception, the end of the interpreter). What cannot be unregistered stays mapped until the process
ends. Refuses to work in a forked child: it forgets, since registrations are not inherited.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from hwr.outcomes import Outcome
from hwr.registration.drivers import Driver, DriverFailed
from hwr.registration.ranges import Chunk, Plan, Region, split_copy
from hwr.store.lease import HostWeightLease
from hwr.telemetry import span
from hwr.telemetry.events import ReleaseBegun
from hwr.units import one_line

# Everything that may be registered; an entry leaves when nothing of it is. Its exports are what keeps the memory mapped.
_holdings: Final[list[Holding]] = []
_hooked = False


class _Buffer(ctypes.Structure):
    """Py_buffer (Include/pybuffer.h); the same in every supported version."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class Export:
    """An export of a buffer, and its address. It ends with `release` only: dropped, it keeps its memory until the process ends."""

    def __init__(self, view: memoryview) -> None:
        """Export the buffer.

        Raises:
            BufferError: it is not contiguous.
        """
        self._buffer: _Buffer | None = _Buffer()
        get: Any = ctypes.pythonapi["PyObject_GetBuffer"]  # by item: a function object of our own, with our own types
        get.argtypes, get.restype = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int), ctypes.c_int
        get(view, ctypes.byref(self._buffer), 0)  # PyBUF_SIMPLE: bytes in a row, read-only is fine
        self.address: Final = int(self._buffer.buf or 0)
        self.nbytes: Final = int(self._buffer.len)
        self.writable: Final = not self._buffer.readonly

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            release: Any = ctypes.pythonapi["PyBuffer_Release"]
            release.argtypes, release.restype = (ctypes.POINTER(_Buffer),), None
            release(ctypes.byref(buffer))


@dataclass(frozen=True, slots=True)
class Exports:
    """The mappings of a lease as regions, exported: the lease cannot be closed until they are released."""

    regions: tuple[Region, ...]
    held: tuple[Export, ...]

    def release(self) -> None:
        """Give all of them back."""
        for export in self.held:
            export.release()


def exports_of(lease: HostWeightLease) -> Exports:
    """Export the mappings of a lease. Hand the result to `register`, or release it.

    Raises:
        LeaseClosed, LeaseInherited: the lease cannot be used any more, or not here.
    """
    ids = dict(zip((file.name for file in lease.manifest.files), lease.mapped().files, strict=True))
    views = lease.regions()
    held = tuple(Export(view) for _, view in views)
    regions = tuple(
        Region(name=name, device=ids[name][0], inode=ids[name][1], address=export.address, nbytes=export.nbytes, writable=export.writable)
        for (name, _), export in zip(views, held, strict=True)
    )
    return Exports(regions, held)


def regions_of(lease: HostWeightLease) -> tuple[Region, ...]:
    """Return the mappings of a lease as regions, for a plan; the addresses hold while the lease is open."""
    exports = exports_of(lease)
    exports.release()
    return exports.regions


@dataclass(frozen=True, slots=True)
class Undone:
    """What became of chunks that were to be unregistered; `problems` are the driver's own words, one for each that was kept."""

    chunks: tuple[Chunk, ...]
    kept: tuple[Chunk, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are not registered any more."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def kept_bytes(self) -> int:
        """Bytes that still may be."""
        return sum(chunk.nbytes for chunk in self.kept)


class Holding:
    """Chunks that may be registered, in order, and the exports that keep their memory mapped."""

    def __init__(self, driver: Driver, exports: Iterable[Export], *, page_bytes: int) -> None:
        """Begin with nothing registered; from now on the exports belong to this."""
        self.driver = driver
        self.chunks: list[Chunk] = []
        self._exports = list(exports)
        self._page_bytes = page_bytes
        self._pid = os.getpid()
        # Held across a driver call: at the end of the interpreter a call of another thread may still be in progress.
        self._mutex = threading.RLock()
        _hook()
        _holdings.append(self)

    def register(self, chunk: Chunk) -> None:
        """Call the driver for one chunk. It counts as registered from before the call, unless the driver says that it is not.

        Raises:
            DriverFailed: it is not registered.
        """
        with self._mutex:
            self.chunks.append(chunk)
            try:
                self.driver.register(chunk.address, chunk.nbytes)
            except DriverFailed:
                self.chunks.pop()
                raise

    def undo(self) -> Undone:
        """Unregister everything in reverse and keep what fails; the exports of what is gone are given back."""
        if self.inherited:  # before the mutex: whoever held it may not exist here
            self._forget()
            return Undone((), (), ())
        with self._mutex:
            gone: list[Chunk] = []
            kept: list[Chunk] = []
            problems: list[str] = []
            while self.chunks:
                chunk = self.chunks[-1]
                try:
                    self.driver.unregister(chunk.address, chunk.nbytes)
                except Exception as error:  # noqa: BLE001 - whatever a driver raises: this chunk may still be registered
                    kept.append(self.chunks.pop())
                    problems.append(_problem(error))
                except BaseException:
                    self.chunks.extend(reversed(kept))
                    raise
                else:
                    gone.append(self.chunks.pop())
            self.chunks.extend(reversed(kept))
            self._give_back()
            return Undone(tuple(gone), tuple(kept), tuple(problems))

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child, where nothing is registered."""
        return os.getpid() != self._pid

    def busy(self) -> bool:
        """Whether another thread is in a driver call now; if not, it is this thread's turn until `done`."""
        return not self._mutex.acquire(blocking=False)

    def done(self) -> None:
        """End what `busy` began."""
        self._mutex.release()

    def _give_back(self) -> None:
        kept = []
        for export in self._exports:
            begin, end = export.address & -self._page_bytes, export.address + export.nbytes
            if any(chunk.address < end and begin < chunk.end for chunk in self.chunks):
                kept.append(export)
            else:
                export.release()
        self._exports = kept
        if not self.chunks and self in _holdings:
            _holdings.remove(self)

    def _forget(self) -> None:
        # Not released: the memory stays mapped here too, for whatever in this process still points to it.
        self.chunks.clear()
        self._exports.clear()
        if self in _holdings:
            _holdings.remove(self)


class Registered:
    """A registration that is held until `close`; dropped, it unregisters first. Any thread may close it, one at a time."""

    def __init__(self, holding: Holding, plan: Plan, *, ends_when_dropped: bool = True) -> None:
        """Take over a holding whose chunks are those of the plan, or (survivors, which nobody tries again by accident) what is left."""
        self.plan = plan
        self.driver = holding.driver.name
        self._holding = holding
        self._finalizer = weakref.finalize(self, _release, holding, "dropped")
        self._finalizer.atexit = False  # our own hook is later in line than telemetry's, and runs before it
        if not ends_when_dropped:
            self._finalizer.detach()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What is registered now."""
        return tuple(self._holding.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered now."""
        return sum(chunk.nbytes for chunk in self._holding.chunks)

    @property
    def closed(self) -> bool:
        """Whether nothing is registered any more."""
        return not self._holding.chunks

    def split(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Split a copy at chunk seams.

        Raises:
            ValueError: a part of it is not registered.
        """
        return split_copy(self.plan, address, nbytes)

    def close(self) -> tuple[str, ...]:
        """Unregister in reverse; return the driver's words for what it refused, nothing if all is gone.

        What was refused stays registered and mapped; a further call tries it again, and does nothing once nothing is left.
        """
        problems = _release(self._holding, "close")
        if self.closed:
            self._finalizer.detach()
        return problems

    def __reduce__(self) -> NoReturn:
        raise TypeError("a registration belongs to its process and cannot be pickled")

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(holding: Holding, cause: str) -> tuple[str, ...]:
    if holding.inherited or not holding.chunks:
        holding.undo()
        return ()
    size = sum(chunk.nbytes for chunk in holding.chunks)
    with span(ReleaseBegun(cause=cause, chunks=len(holding.chunks), bytes=size)) as releasing:
        undone = holding.undo()
        releasing.add(chunks=len(undone.chunks), bytes=undone.nbytes, survivors=len(undone.kept), survivor_bytes=undone.kept_bytes)
        if undone.problems:
            holding.driver.drain()
            releasing.add(outcome=Outcome.FAILED, problem=undone.problems[0])
    return undone.problems


def _problem(error: Exception) -> str:
    if isinstance(error, DriverFailed):
        return f"{error.name} ({error.number}): {error.text}"
    return f"{type(error).__name__}: {one_line(str(error))}"


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    """Unregister before the interpreter takes the mappings down; a call in progress in another thread is left alone."""
    for holding in tuple(_holdings):  # a copy: whatever is released leaves the list
        if holding.inherited or holding.busy():
            continue
        try:
            _release(holding, "exit")
        finally:
            holding.done()
