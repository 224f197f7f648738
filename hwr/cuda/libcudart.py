"""libcudart through ctypes: which copy of it, and calling it.

Owns the search for the library and the one object through which it is called. Promises that nothing is loaded before `load`; that
where torch's CUDA libraries are in the process, the copy that they call is the one that is used, also if it was loaded privately
or its file is gone; that a call releases the GIL; and that a failed call is a typed error with the runtime's own words.
Refuses to guess between several loaded copies, and to import torch.

One copy has one pending error per thread. Registering through one copy and consuming the error through another would leave the
first one's for whoever calls next (maru #65, vLLM #51080).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from hwr.cuda.errors import CudaError, CudaUnavailable, error_class
from hwr.cuda.prototypes import PROTOTYPES, SUCCESS
from hwr.errors import Unavailable
from hwr.units import one_line

# libcudart.so, libcudart.so.12, and what a wheel repair makes of it: libcudart-9335f6a2.so.12
_RUNTIME_NAME: Final = re.compile(rb"libcudart(-[0-9A-Za-z]+)?\.so(\.[0-9.]+)?")
# Both have libcudart among their dependencies; the first is loaded by the second.
_TORCH_NAMES: Final = re.compile(rb"lib(c10|torch)_cuda\.so")
# What the loader finds by its own means: LD_LIBRARY_PATH and the cache of ldconfig. The unversioned name is a developer's link.
_SYSTEM_NAMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
# proc(5): the kernel appends this to the name of a mapped file that was unlinked.
_DELETED: Final = b" (deleted)"
# proc(5): start-end, permissions, offset, device, inode, then a path that may hold blanks.
_MAPS_FIELDS: Final = 6

Origin = Literal["argument", "torch", "process", "wheel", "system"]


class Libcudart:
    """One loaded copy of the runtime. Any thread may call it; current device and pending error belong to the calling thread."""

    def __init__(self, library: ctypes.CDLL, path: str, origin: Origin) -> None:
        """Declare what the library has; `path` is the loader's name of it, `origin` says how it was found."""
        self.path = path
        self.origin = origin
        self._library = library  # keeps the handle, which ctypes never closes
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in PROTOTYPES.items():
            try:
                function = library[name]  # an object of our own: library.name would be shared with whoever holds this CDLL
            except AttributeError:
                continue
            function.restype = result
            function.argtypes = arguments
            self._functions[name] = function

    def function(self, name: str) -> Callable[..., Any] | Unavailable:
        """Return a declared function, for a caller that looks at results itself."""
        if name in self._functions:
            return self._functions[name]
        if name not in PROTOTYPES:
            raise KeyError(name)  # a function that is not in the table must not be called
        return Unavailable(f"{one_line(self.path)} has no function {name}")

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that returns a cudaError_t; the GIL is released meanwhile.

        Raises:
            CudaError: the call returned another code than 0; the code is pending for this thread until it is consumed.
            CudaUnavailable: this copy has no such function.
            ctypes.ArgumentError: an argument is of the wrong type; nothing was called.
        """
        number = self._function(name)(*arguments)
        if number != SUCCESS:
            raise self.error(name, number)

    def error(self, call: str, number: int) -> CudaError:
        """Make the typed error of a code."""
        return error_class(number)(call=call, number=number, name=self.error_name(number), text=self.error_text(number))

    def error_name(self, number: int) -> str:
        """Name a code as the header does; asks the library itself, and takes no pending error away."""
        return self._text("cudaGetErrorName", number, f"cudaError {number}")

    def error_text(self, number: int) -> str:
        """Describe a code in the library's words."""
        return self._text("cudaGetErrorString", number, "the library does not say")

    def last_error(self) -> int | Unavailable:
        """Return the code that is pending for this thread, 0 for none, and consume it.

        A code that is returned again by the next call is that of a destroyed context; nothing consumes it.
        """
        function = self.function("cudaGetLastError")
        return function if isinstance(function, Unavailable) else int(function())

    def pending_error(self) -> int | Unavailable:
        """Return the code that is pending for this thread and leave it there."""
        function = self.function("cudaPeekAtLastError")
        return function if isinstance(function, Unavailable) else int(function())

    def value(self, name: str, *arguments: int) -> int:
        """Call a function that writes an int through its first argument; raises as `call` does."""
        out = ctypes.c_int()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def _function(self, name: str) -> Callable[..., Any]:
        function = self.function(name)
        if isinstance(function, Unavailable):
            raise CudaUnavailable(library=self.path, function=name)
        return function

    def _text(self, name: str, number: int, otherwise: str) -> str:
        function = self.function(name)
        text = None if isinstance(function, Unavailable) else function(number)
        return otherwise if text is None else one_line(text.decode("utf-8", "replace"))


def load(libcudart: Path | None = None, proc_root: Path = Path("/proc")) -> Libcudart | Unavailable:
    """Find the runtime, load it if nobody has, and declare its functions.

    An argument is obeyed. Otherwise the copy that torch calls, else the only one in the process, else the one of a wheel,
    else the loader's own.
    """
    if libcudart is not None:
        return _opened(os.fspath(libcudart), "argument", os.RTLD_LOCAL)
    loaded = _mapped(proc_root, _RUNTIME_NAME)
    if isinstance(loaded, Unavailable):
        return loaded
    torch = _mapped(proc_root, _TORCH_NAMES)
    if isinstance(torch, Unavailable):
        return torch
    for name in torch:
        called = _provider(name)
        if called is not None:
            return _opened(called, "torch", os.RTLD_NOLOAD)
    if len(loaded) > 1:
        names = one_line(", ".join(loaded))
        return Unavailable(f"several copies of libcudart are loaded and nothing says which one torch calls: {names}")
    if loaded:
        return _opened(loaded[0], "process", os.RTLD_NOLOAD)
    return _first(_on_this_machine())


def _on_this_machine() -> Iterator[tuple[str, Origin]]:
    # nvidia/cuda_runtime/lib of the CUDA 12 wheels, nvidia/cu13/lib of the later ones; never the working directory
    for entry in filter(os.path.isabs, sys.path):
        for path in sorted(Path(entry).glob("nvidia/*/lib/libcudart.so.*"), reverse=True):
            yield os.fspath(path), "wheel"
    for name in _SYSTEM_NAMES:
        yield name, "system"


def _first(candidates: Iterable[tuple[str, Origin]]) -> Libcudart | Unavailable:
    reasons = []
    for name, origin in candidates:
        opened = _opened(name, origin, os.RTLD_LOCAL)
        if isinstance(opened, Libcudart):
            return opened
        reasons.append(opened.reason)
    return Unavailable(f"no libcudart is loaded or can be found: {reasons[0]}")


def _opened(name: str, origin: Origin, mode: int) -> Libcudart | Unavailable:
    try:
        library = ctypes.CDLL(name, mode=mode)  # never PyDLL, which would hold the GIL for as long as the driver pins
    except OSError as error:
        return Unavailable(one_line(f"{name}: {error}"))
    return Libcudart(library, name, origin)


class _DlInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("symbol_address", ctypes.c_void_p))


def _loader_name(address: int) -> str | None:
    """Return the loader's own name of the object at an address: the only one that it knows again once the file is gone."""
    dladdr = ctypes.CDLL(None)["dladdr"]
    dladdr.restype = ctypes.c_int
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    info = _DlInfo()
    if not dladdr(address, ctypes.byref(info)) or not info.file:
        return None
    return os.fsdecode(info.file)


def _mapped(proc_root: Path, pattern: re.Pattern[bytes]) -> list[str] | Unavailable:
    """Return the loader's names of the loaded libraries whose file name matches; a file that is merely mapped is none."""
    try:
        text = (proc_root / "self" / "maps").read_bytes()
    except OSError as error:
        return Unavailable(one_line(f"{proc_root}/self/maps: {error.strerror}"))
    found: dict[str, None] = {}
    for line in text.splitlines():
        fields = line.split(None, _MAPS_FIELDS - 1)
        if len(fields) < _MAPS_FIELDS:
            continue
        if pattern.fullmatch(fields[-1].removesuffix(_DELETED).rpartition(b"/")[2]):
            name = _loader_name(int(fields[0].partition(b"-")[0], 16))
            if name is not None:
                found[name] = None
    return list(found)


def _provider(dependent: str) -> str | None:
    """Return the name of the library that gives `dependent` its cudaGetLastError.

    A symbol looked up through a handle is searched in that library and then in what it depends on (dlsym(3)), so that a runtime
    that was loaded privately is found, and another copy is not.
    """
    try:
        function = ctypes.CDLL(dependent, mode=os.RTLD_NOLOAD)["cudaGetLastError"]
    except (OSError, AttributeError):
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    return None if address is None else _loader_name(address)
