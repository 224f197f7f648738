"""The programs of the eight workers: each configures its telemetry, says `ready`, and waits for the word that causes its state.

They are real: the store's own lock, the registrar with a stand-in for the driver, gloo. A program is text for `python -c`; its arguments
are the run directory, the rank, and what it needs besides.
"""

from __future__ import annotations

_BEGIN = """
import ctypes, os, sys, threading, time
from pathlib import Path
from hwr import telemetry
from hwr.outcomes import *
from hwr.telemetry import events as E
run_dir, rank, *more = sys.argv[1:]
telemetry.configure(run_dir=run_dir, engine="default", rank=int(rank))
"""
_READY = """
telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))
def told():
    print("ready", flush=True)
    return sys.stdin.readline().strip()
def caused():
    print("caused", flush=True)
"""

# 0: holds a build lock of the store; its test stops it.
STOPPED = (
    _BEGIN
    + """
from hwr.store.locks import acquire
held = acquire(Path(more[0]), LockKind.BUILD, exclusive=True, deadline=time.monotonic() + 30)
"""
    + _READY
    + """
told()
caused()
sys.stdin.readline()
"""
)

# 1: holds its interpreter's lock in a C call: PyDLL does not give it up. It sleeps there, or spins in a regular expression of no end.
GIL_HELD = (
    _BEGIN
    + _READY
    + """
libc = ctypes.PyDLL(None)
word = told()
caused()
if word == "spin":
    import re
    re.match(r"(a*)*b", "a" * 60)
while True:
    libc.usleep(600_000_000)
"""
)

# 2: holds its mmap lock: one mprotect over a memfd that is mapped many times; again and again. CDLL lets the interpreter run on.
MMAP_LOCK_HELD = (
    _BEGIN
    + """
base, times = 512 << 20, int(more[0])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
memory = os.memfd_create("scene")
os.ftruncate(memory, base)
place = libc.mmap(None, base * times, 0, 0x4022, -1, 0)
for index in range(times):
    libc.mmap(place + index * base, base, 3, 0x8011, memory, 0)
"""
    + _READY
    + """
told()
caused()
while True:
    for protection in (1, 3):
        libc.mprotect(place, base * times, protection)
"""
)

# 3: is in the middle of a checksum; its test kills it.
DEAD = (
    _BEGIN
    + _READY
    + """
told()
with telemetry.span(E.ChecksumBegun(key="ab" * 32, planned_bytes=1 << 30, files=1)) as span:
    span.progress(E.ChecksumProgress(done_bytes=1 << 20, planned_bytes=1 << 30))
    caused()
    sys.stdin.readline()
"""
)

# 4: waits for the lock of rank 0, as a builder does.
LOCK_WAIT = (
    _BEGIN
    + """
from hwr.store.locks import acquire
"""
    + _READY
    + """
told()
caused()
with acquire(Path(more[0]), LockKind.BUILD, exclusive=True, deadline=time.monotonic() + 600):
    sys.stdin.readline()
"""
)

# 5: registers a file in chunks of a megabyte, each a slow driver call.
PIN_ADVANCING = (
    _BEGIN
    + """
sys.path += more[2:]
from registration_aids import go
from hwr.registration.drivers.cuda import CudaDriver
"""
    + _READY
    + """
told()
caused()
go(CudaDriver(Path(more[0])), Path(more[1]), deadline_seconds=3600.0)
sys.stdin.readline()
"""
)

# 6 and 7: two ranks of a gloo group. Both do some collectives; then 6 enters one more, and 7 does not come.
COLLECTIVE = (
    _BEGIN
    + """
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist
torch.set_num_threads(1)
me, size, store = int(rank) - int(more[1]), 2, more[0]
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=me, world_size=size)
count = 0
def meet():
    global count
    count += 1
    with telemetry.span(E.CollectiveBegun(op=Collective.ALL_REDUCE, sequence=count, world_size=size)):
        dist.all_reduce(torch.ones(4))
for _ in range(3):
    meet()
"""
    + _READY
)
COLLECTIVE_WAIT = (
    COLLECTIVE
    + """
told()
caused()
meet()
sys.stdin.readline()
"""
)

# 7: serves: small operations that begin and end; as a rank of the group it is the one that is missed.
_SERVE = """
def serve():
    while True:
        with telemetry.span(E.LookupBegun(key="cd" * 32, validation=ValidationLevel.MANIFEST_AND_METADATA)):
            time.sleep(0.01)
        time.sleep(0.3)
threading.Thread(target=serve, daemon=True).start()
told()
caused()
while sys.stdin.readline().strip() == "meet":
    meet()
    caused()
"""
HEALTHY_IN_GROUP = COLLECTIVE + _SERVE
HEALTHY = _BEGIN + _READY + _SERVE
