"""What stays in a process after a tensor was read again and again: one file, any interpreter with torch and safetensors.

Owns the cases, the loop, the samples and their JSON (schema 1). Promises a fresh synthetic file a run, one thread, samples after a
garbage collection that keep next to no object, a weak reference that proves that each transient died, and no output unless all that held.
Refuses to judge, to trim an allocator, and to import anything of its project: it runs alone, as `python THIS --mode get_tensor`.

Exit status: 0 and one JSON object; 1 the measurement itself is broken; 2 bad arguments, or nothing can be measured here.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import errno
import gc
import json
import os
import platform
import re
import runpy
import signal
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SCHEMA_VERSION = 1
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ROLLUP, MEMINFO = "/proc/self/smaps_rollup", "/proc/meminfo"
TENSOR, FILLER = "tensor", "filler"
FLOAT32_BYTES = 4
# Enough for the entries of both axes' usual values, so that neither axis moves the header; small enough that a small tensor at
# offset 0 ends within the first 256 bytes, where CPython keeps one object for each integer.
HEADER_BYTES = 160
MOST_SAMPLES = 100_000
PATTERN, BLOCK_BYTES = 8191, 1 << 20
# What decides which allocator serves, and how; recorded, never changed.
ALLOCATOR_VARIABLES = re.compile(
    r"PYTHONMALLOC(STATS)?|LD_PRELOAD|GLIBC_TUNABLES|MALLOC_\w+|\w*MALLOC_CONF|MIMALLOC_\w+|TCMALLOC_\w+", re.ASCII
)

Weak = Callable[[], Any]


class Unusable(Exception):
    """Nothing can be measured here: exit 2."""


class Broken(Exception):
    """What was measured is not what was meant: exit 1."""


class Case:
    """One way to come by a tensor, `count` times in a bare loop. `transient`: nothing of an iteration may live on."""

    transient = True
    tensors = 1
    noun = "tensor"

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.file: dict[str, int] | None = None
        self.path = ""

    def prepare(self, directory: str) -> None:
        """Write what is read, open it, and check it against its source."""
        insist_on_room(self.arguments, directory, self.tensors)
        payload = payload_of(self.arguments)
        self.path = os.path.join(directory, "probe.safetensors")
        self.file = write_file(self.path, payload, self.arguments.offset_bytes, self.arguments.header_bytes, self.tensors)
        self.open()
        check(self.once(), payload)

    def open(self) -> None:
        """Open what stays open over the loop."""

    def once(self) -> Any:
        """Return one tensor, come by in the same way as in the loop."""
        raise NotImplementedError

    def loop(self, count: int) -> Weak:
        """Do it `count` times and return a weak reference to the last tensor; its strong one ends with the call."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what `open` opened, and let go of every tensor."""


class _Reading(Case):
    def open(self) -> None:
        from safetensors import safe_open

        self.opened = contextlib.ExitStack()
        self.reader: Any = self.opened.enter_context(safe_open(self.path, framework="pt", device="cpu"))

    def close(self) -> None:
        self.opened.close()
        del self.reader


class GetTensor(_Reading):
    """One reader, `get_tensor` each time."""

    def once(self) -> Any:
        return self.reader.get_tensor(TENSOR)

    def loop(self, count: int) -> Weak:
        get_tensor = self.reader.get_tensor
        for _ in range(count):
            tensor = get_tensor(TENSOR)
        return weakref.ref(tensor)


class GetSlice(_Reading):
    """One reader, `get_slice` and the whole slice each time."""

    def once(self) -> Any:
        return self.reader.get_slice(TENSOR)[:]

    def loop(self, count: int) -> Weak:
        get_slice = self.reader.get_slice
        for _ in range(count):
            tensor = get_slice(TENSOR)[:]
        return weakref.ref(tensor)


class Reuse(_Reading):
    """One reader, one view, looked up in a mapping each time: the control."""

    transient = False

    def open(self) -> None:
        super().open()
        self.views = {TENSOR: self.reader.get_tensor(TENSOR)}

    def once(self) -> Any:
        return self.views[TENSOR]

    def loop(self, count: int) -> Weak:
        views = self.views
        for _ in range(count):
            tensor = views[TENSOR]
        return weakref.ref(tensor)

    def close(self) -> None:
        self.views.clear()
        super().close()


class Reopen(Case):
    """Open a file of many tensors, read one, close: what opening itself keeps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.tensors = arguments.tensors

    def once(self) -> Any:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt", device="cpu") as reader:
            return reader.get_tensor(TENSOR)

    def loop(self, count: int) -> Weak:
        from safetensors import safe_open

        path = self.path
        for _ in range(count):
            with safe_open(path, framework="pt", device="cpu") as reader:
                tensor = reader.get_tensor(TENSOR)
        return weakref.ref(tensor)


class LoadFile(Case):
    """`safetensors.torch.load_file` each time: every tensor of the file, the filler before an offset included."""

    def once(self) -> Any:
        from safetensors.torch import load_file

        return load_file(self.path)[TENSOR]

    def loop(self, count: int) -> Weak:
        from safetensors.torch import load_file

        path = self.path
        for _ in range(count):
            tensors = load_file(path)
        return weakref.ref(tensors[TENSOR])


Make = Callable[[argparse.Namespace], Case]
CASES: Mapping[str, Make] = {
    "get_tensor": GetTensor, "get_slice": GetSlice, "reopen": Reopen, "load_file": LoadFile, "reuse": Reuse,
}  # fmt: skip


def payload_of(arguments: argparse.Namespace) -> array.array[float]:
    """Return the elements of the tensor: a pattern that repeats."""
    pattern: array.array[float] = array.array("f", range(PATTERN))
    payload: array.array[float] = pattern * (arguments.tensor_elements // PATTERN)
    payload.extend(pattern[: arguments.tensor_elements % PATTERN])
    return payload


def insist_on_room(arguments: argparse.Namespace, directory: str, tensors: int) -> None:
    """Raise Unusable unless disk and memory have room for the file, and memory for what is written, what is read, what is compared.

    A filler is read by some cases, and lies in memory where the directory is a tmpfs. An entry is some 100 bytes of header.
    """
    payload, disk = arguments.tensor_elements * FLOAT32_BYTES, os.statvfs(directory)
    rest = arguments.offset_bytes + (arguments.header_bytes or HEADER_BYTES)
    room = {f"space in {directory}": (payload + rest + tensors * 128, disk.f_bavail * disk.f_frsize)}
    with contextlib.suppress(OSError, StopIteration), open(MEMINFO, "rb") as file:  # a /proc that does not say limits nothing
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"MemAvailable:"))
        room["memory"] = (3 * payload + 2 * rest + tensors * 1024, free)
    for what, (needed, free) in room.items():
        if needed > free:
            needs = f"the file of this tensor needs some {needed:,} bytes of {what}, and {free:,} are free"
            raise Unusable(f"{needs}: give a smaller tensor, offset or header")


def check(tensor: Any, payload: array.array[float]) -> None:
    """Raise Broken unless a tensor has exactly these elements."""
    import torch

    if not torch.equal(tensor, torch.frombuffer(payload, dtype=torch.float32)):
        raise Broken(f"the payload that was read ({tensor.dtype}, {tuple(tensor.shape)}) is not the one that was written")


def write_file(path: str, payload: array.array[float], offset: int, header_bytes: int | None, tensors: int) -> dict[str, int]:
    """Write a file whose tensor begins `offset` bytes into the data section, behind a filler; return where all lies.

    `save_file` reorders tensors, so the header is written here; blanks pad it to `header_bytes` (a multiple of 8), as the format allows.
    With `tensors` > 1 others of one element follow.
    """
    size = len(payload) * FLOAT32_BYTES
    entries: dict[str, Any] = {}
    if offset:
        entries[FILLER] = {"dtype": "U8", "shape": [offset], "data_offsets": [0, offset]}
    entries[TENSOR] = {"dtype": "F32", "shape": [len(payload)], "data_offsets": [offset, offset + size]}
    end = offset + size
    for number in range(1, tensors):
        entries[f"other.{number}"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + FLOAT32_BYTES]}
        end += FLOAT32_BYTES
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    least = -(-len(text) // 8) * 8
    header = max(HEADER_BYTES, least) if header_bytes is None else header_bytes
    if header < least:
        raise Unusable(f"--header-bytes {header}: the header of this file needs {least}")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", header) + text.ljust(header))
        for at in range(0, offset, BLOCK_BYTES):
            file.write(bytes(min(BLOCK_BYTES, offset - at)))
        file.write(payload)
        file.write(bytes(end - offset - size))
    begin, end = read_back(path)
    if (begin, end) != (8 + header + offset, 8 + header + offset + size):
        raise Broken(f"the tensor lies at {begin} to {end} of the file, not {offset} bytes into its data section")
    return {
        "header_bytes": header, "payload_bytes": size, "file_bytes": os.stat(path).st_size,
        "offset_bytes": offset, "begin": begin, "end": end, "tensors": tensors,
    }  # fmt: skip


def read_back(path: str) -> tuple[int, int]:
    """Return where the tensor lies in a file, as its own header says."""
    with open(path, "rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(header))[TENSOR]["data_offsets"]
    return 8 + header + begin, 8 + header + end


UNKNOWN = -1
COLUMNS = (
    "iterations", "loop_ns", "rss_bytes", "private_bytes", "anonymous_bytes", "fd_count", "last_tensor_alive", "allocated_blocks",
    "interpreter_bytes", "malloc_in_use_bytes", "malloc_free_bytes", "file_bytes", "locked_bytes", "reader_bytes",
)  # fmt: skip


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3), glibc >= 2.33."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


class Sampler:
    """Reads this process's memory. What it keeps lies in one array that was made before: a sample retains no object."""

    def __init__(self, loops: int, stream: int | None) -> None:
        self.phases: list[str] = ["before_file", "baseline", *["loop"] * loops, "closed"]
        self.values, self.taken = array.array("q", [UNKNOWN]) * (len(COLUMNS) * len(self.phases)), 0
        self.path: str | None = None  # the probe's file, once there is one
        self.stream, self.mallinfo2 = stream, usable_mallinfo2()
        self.classes = {phase: array.array("q", [0] * SIZE_CLASSES) for phase in ("baseline", "loop", "closed")}

    def rehearse(self) -> None:
        """Take samples that do not count: whatever a first one keeps, it keeps now."""
        stream, self.stream = self.stream, None
        self.take(1 << 40, 1 << 40)
        self.take(1 << 40, 1 << 40, 1)
        self.stream, self.taken = stream, 0

    def take(self, iterations: int, loop_ns: int, alive: int = UNKNOWN) -> None:
        """Collect garbage, then read everything once; a loop sample says whether the last tensor lives."""
        phase = self.phases[self.taken]
        gc.collect()
        blocks = sys.getallocatedblocks() or UNKNOWN  # 0: pymalloc is off
        rollup = read_rollup()
        in_use, free = self.malloc()
        interpreter = UNKNOWN if blocks == UNKNOWN else interpreter_blocks(self.classes.get(phase))
        fds, reader = len(os.listdir("/proc/self/fd")) - 1, self.mapped()
        private = rollup["Private_Clean"] + rollup["Private_Dirty"]
        row = (
            iterations, loop_ns, rollup["Rss"], private, rollup["Anonymous"], fds, alive, blocks,
            interpreter, in_use, free, rollup["Rss"] - rollup["Anonymous"], rollup.get("Locked", UNKNOWN), reader,
        )  # fmt: skip
        at = self.taken * len(COLUMNS)
        for column, value in enumerate(row):
            self.values[at + column] = value
        self.taken += 1
        if self.stream is not None:
            write_line(self.stream, {"sample": self.told(self.taken - 1)})

    def told(self, number: int) -> dict[str, Any]:
        """Return a sample as JSON values."""
        at = number * len(COLUMNS)
        known = {name: self.values[at + column] for column, name in enumerate(COLUMNS)}
        said: dict[str, Any] = {"phase": self.phases[number], "iterations": known.pop("iterations")}
        said["loop_seconds"] = known.pop("loop_ns") / 1e9
        alive = known.pop("last_tensor_alive")
        said.update({name: None if value == UNKNOWN else value for name, value in known.items()})
        if said["phase"] == "loop":
            said["last_tensor_alive"] = bool(alive)
        return said

    def size_classes(self) -> dict[str, dict[str, int]] | None:
        """Return the interpreter's blocks in use by block size, where they changed after the baseline."""
        counts = list(zip(*self.classes.values(), strict=True))
        if not any(map(any, counts)):
            return None
        return {str((at + 1) * ALIGNMENT): dict(zip(self.classes, row, strict=True)) for at, row in enumerate(counts) if len(set(row)) > 1}

    def malloc(self) -> tuple[int, int]:
        """Return malloc's bytes in use, and held free. The top chunk is left out: most of it was never touched."""
        if self.mallinfo2 is None:
            return UNKNOWN, UNKNOWN
        info = self.mallinfo2()
        return info.uordblks + info.hblkhd, max(0, info.fordblks - info.keepcost)

    def mapped(self) -> int:
        """Return the address space over the probe's file: one view alive keeps all of it."""
        if self.path is None:
            return UNKNOWN
        total, suffix = 0, self.path + "\n"
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if line.endswith(suffix):
                    begin, _, end = line.partition(" ")[0].partition("-")
                    total += int(end, 16) - int(begin, 16)
        return total


def read_rollup() -> dict[str, int]:
    """Return /proc/self/smaps_rollup in bytes; raise Unusable where it says too little."""
    try:
        with open(ROLLUP, "rb", buffering=0) as file:
            lines = file.read().splitlines()[1:]
        found = {line.partition(b":")[0].decode("ascii"): int(line.split()[1]) * 1024 for line in lines}
        if not found.keys() >= {"Rss", "Private_Clean", "Private_Dirty", "Anonymous"}:
            raise ValueError("counters are missing")
    except (OSError, ValueError, IndexError) as error:
        raise Unusable(f"{ROLLUP} cannot be read ({error}); Linux >= 4.14 has it, some sandboxes hide it") from error
    return found


def usable_mallinfo2() -> Callable[[], Mallinfo] | None:
    """Return glibc's mallinfo2, None where it is absent or another allocator serves malloc."""
    library = ctypes.CDLL(None)
    try:
        mallinfo2 = library.mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype, mallinfo2.argtypes = Mallinfo, ()
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    size, before = 1 << 16, mallinfo2()
    block = library.malloc(size)
    after = mallinfo2()
    library.free(block)
    counted: bool = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd >= size
    return mallinfo2 if counted else None


# CPython's Objects/obmalloc.c: blocks of up to 512 bytes in steps of 16.
ALIGNMENT, SIZE_CLASSES = 16, 32
_CLASS_LINE = re.compile(rb"^ *(\d+) +\d+ +\d+ +(\d+) +\d+$", re.MULTILINE)
_ALLOCATED_LINE = re.compile(rb"^# bytes in allocated blocks += +([\d,]+)$", re.MULTILINE)


def interpreter_blocks(classes: array.array[int] | None) -> int:
    """Return the bytes of pymalloc's blocks in use, from what CPython's own statistics print on stderr; fill in those of each class."""
    write_statistics = getattr(sys, "_debugmallocstats", None)
    if write_statistics is None:
        return UNKNOWN
    stderr, file = os.dup(2), os.memfd_create("retention")
    try:
        os.dup2(file, 2)
        write_statistics()
        text = os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(file)
    if classes is not None:
        for found in _CLASS_LINE.finditer(text):
            if int(found[1]) < SIZE_CLASSES:
                classes[int(found[1])] = int(found[2])
    total = _ALLOCATED_LINE.search(text)
    return UNKNOWN if total is None else int(total[1].replace(b",", b""))


def write_line(stream: int, value: object) -> None:
    """Append one JSON line, whole."""
    line = json.dumps(value, allow_nan=False).encode("ascii") + b"\n"
    if os.write(stream, line) != len(line):  # write(2): less than was asked for, where there is no room for more
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file of --samples")


def measure(arguments: argparse.Namespace, make: Make, stream: int | None) -> dict[str, Any]:
    """Run one case and return the JSON object."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import safetensors
        import torch
    except ImportError as error:
        raise Unusable(f"{sys.executable} has no torch with safetensors: {error}") from error
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    facts = known_facts(arguments, torch, safetensors)
    with tempfile.TemporaryDirectory(prefix="retention-") as directory:
        case = make(arguments)
        sampler = Sampler(-(-arguments.iterations // arguments.sample_every), stream)
        if stream is not None:
            write_line(stream, {"begin": facts})
        sampler.rehearse()
        sampler.take(0, 0)
        begun = time.perf_counter()
        case.prepare(directory)
        sampler.path = os.path.realpath(case.path) if case.path else None
        case.loop(arguments.warmup)
        preparation = time.perf_counter() - begun
        before = cached_references(case.file)
        sampler.take(0, 0)
        recorded = recording(directory) if arguments.attribute else None
        with recorded or contextlib.nullcontext():
            loop_ns, last = loops(case, arguments, sampler)
        after = cached_references(case.file)
        case.close()
        sampler.take(arguments.iterations, loop_ns)
        if last() is not None:
            raise Broken(f"the last {case.noun} is alive though everything that should hold it was let go of")
        facts.update(
            preparation_seconds=preparation, samples=[sampler.told(number) for number in range(sampler.taken)], file=case.file,
            size_classes=sampler.size_classes(), attribution=recorded and recorded.stacks(arguments.iterations),
            cached_integer_references=before and after and {number: after[number] - before[number] for number in before},
        )  # fmt: skip
    if stream is not None:
        write_line(stream, {"end": facts})
    return facts


def loops(case: Case, arguments: argparse.Namespace, sampler: Sampler) -> tuple[int, Weak]:
    """Do all iterations with a sample after each share; return the nanoseconds of the bare loops and the last tensor's reference."""
    done = spent = 0
    while True:
        count = min(arguments.sample_every, arguments.iterations - done)
        begun = time.perf_counter_ns()
        last = case.loop(count)
        spent += time.perf_counter_ns() - begun
        done += count
        gc.collect()
        alive = last() is not None
        if alive and case.transient:
            raise Broken(f"the {case.noun} of iteration {done} is alive after a garbage collection: that is a reference, not retention")
        sampler.take(done, spent, int(alive))
        if done == arguments.iterations:
            return spent, last


def known_facts(arguments: argparse.Namespace, torch: Any, safetensors: Any) -> dict[str, Any]:
    """Return what is known before the first iteration, with the keys of schema 1 all there."""
    libc = None
    with contextlib.suppress(ValueError, OSError):  # another C library than glibc
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    environment = {name: value for name, value in os.environ.items() if ALLOCATOR_VARIABLES.fullmatch(name)}
    return {
        "schema_version": SCHEMA_VERSION,
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("samples", "attribute")},
        "python": platform.python_version(), "torch": str(torch.__version__), "safetensors": str(safetensors.__version__),
        "kernel": platform.release(), "hostname": platform.node(), "pid": os.getpid(), "cpu_affinity": sorted(os.sched_getaffinity(0)),
        "torch_threads": {"intraop": torch.get_num_threads(), "interop": torch.get_num_interop_threads()},
        "pythonmalloc": os.environ.get("PYTHONMALLOC"), "preparation_seconds": None, "samples": [],
        "executable": sys.executable, "implementation": platform.python_implementation(), "page_bytes": PAGE_BYTES,
        "allocator": {"libc": libc, "environment": environment},
    }  # fmt: skip


def cached_references(file: Mapping[str, int] | None) -> dict[str, int] | None:
    """Return the references to each of a slice's three integers (begin, end, step) that CPython has one object for: up to 256.

    Whoever keeps such an integer takes no memory, but counts up. None where there is none, or where they are immortal (CPython >= 3.12).
    """
    numbers = [] if file is None else [number for number in sorted({1, file["begin"], file["end"]}) if number <= 256]
    before = sum(map(sys.getrefcount, numbers))
    held = list(numbers)
    counted = sum(map(sys.getrefcount, held)) > before
    return {str(number): sys.getrefcount(number) for number in numbers} if counted else None


def recording(directory: str) -> Any:
    """Return what records the loop's allocations: attribution.py beside this file."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "attribution.py")
    if not os.path.isfile(beside):
        raise Unusable(f"--attribute needs a file beside this one: copy diag/probes/attribution.py of hwr-suite to {beside}")
    try:
        return runpy.run_path(beside)["Recording"](directory)
    except ImportError as error:
        raise Unusable(f"--attribute needs memray in {sys.executable}: pip install 'hwr-suite[attribute]' ({error})") from error


def whole(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


NUMBERS = (
    ("--tensor-elements", 1, 64, "float32 elements of the tensor"),
    ("--iterations", 1, 1_000_000, "measured calls"),
    ("--sample-every", 1, 100_000, "calls between samples"),
    ("--warmup", 1, 1_000, "calls before the baseline"),
    ("--offset-bytes", 0, 0, "where the tensor begins in the data section"),
    ("--header-bytes", 8, None, f"length of the header, a multiple of 8; as much as it needs, at least {HEADER_BYTES}, if not given"),
    ("--tensors", 1, 64, "tensors in the file of mode reopen"),
)


def parsed(modes: Sequence[str], argv: Sequence[str] | None, target: Callable[[str], str]) -> argparse.Namespace:
    """Parse and judge the arguments, `--call` by `target`; end with status 2 and a message if they are refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--mode", required=True, choices=modes, help="how a tensor is come by; reuse is the control")
    for flag, least, default, text in NUMBERS:
        parser.add_argument(flag, type=whole(least), default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--samples", metavar="FILE", help="append each sample at once, as a JSON line; end when the parent process ends")
    parser.add_argument("--attribute", action="store_true", help="have memray record what stays; memory is not comparable then")
    parser.add_argument("--call", type=target, metavar="FILE.py:FUNCTION", help="what mode call calls; MODULE:FUNCTION on PYTHONPATH too")
    arguments = parser.parse_args(argv)
    if (arguments.mode == "call") != (arguments.call is not None):
        parser.error("--mode call and --call FILE.py:FUNCTION go together")
    if arguments.header_bytes is not None and arguments.header_bytes % 8:
        parser.error("--header-bytes is a multiple of 8")
    if arguments.iterations / arguments.sample_every > MOST_SAMPLES:
        parser.error(f"--iterations over --sample-every gives more than {MOST_SAMPLES} samples")
    return arguments


def main(argv: Sequence[str] | None = None, cases: Mapping[str, Make] = CASES, target: Callable[[str], str] = str) -> int:
    """Measure one case and print its JSON; the arguments and this process's rollup are looked at before torch is loaded."""
    arguments = parsed(tuple(cases), argv, target)
    try:
        read_rollup()
        stream = None
        if arguments.samples is not None:
            ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: the kernel ends us with our parent
            stream = os.open(arguments.samples, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        told = measure(arguments, cases[arguments.mode], stream)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  (whatever torch, safetensors or the file system raised: no figure may come of it)
        unusable = isinstance(error, Unusable) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
        said = error if unusable or isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        print(f"{'cannot measure' if unusable else 'broken measurement'}: {said}", file=sys.stderr)
        return 2 if unusable else 1
    print(json.dumps(told, indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
