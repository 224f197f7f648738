"""The programs of the eight workers: each configures its telemetry, says `ready`, and waits for the word that causes its state.

They are real: the store's own lock, the registrar with a stand-in for the driver, gloo. A program is text for `python -c`; its arguments
are the run directory, the rank, and what it needs besides. Each answers `caused` once it is in its state, `undone` once it is out of it,
and ends with the thread that started it, even where its interpreter runs no more.
"""

from __future__ import annotations

_BEGIN = """
import ctypes, math, os, signal, sys, threading, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody is left to end it once the scene was killed
from pathlib import Path
from hwr import telemetry
from hwr.outcomes import *
from hwr.telemetry import events as E
run_dir, rank, *more = sys.argv[1:]
telemetry.configure(run_dir=run_dir, engine="default", rank=int(rank))
"""
_READY = """
telemetry.emit(E.PhaseChanged(phase=Phase.SERVING))
def say(word):
    print(word, flush=True)
def heard():
    line = sys.stdin.readline()
    return line.strip() if line else sys.exit(0)
def told():
    say("ready")
    return heard()
def caused():
    say("caused")
"""

# For those that hear nothing while they are in their state: a signal ends a call of libc at once, a call of the kernel when it is through.
_SIGNALLED = """
class Undone(Exception): pass
def undo(*_):
    raise Undone
signal.signal(signal.SIGUSR1, undo)
"""

# 0: holds a build lock of the store; its test stops it. It lets go when it is told, if it runs.
STOPPED = (
    _BEGIN
    + """
from hwr.store.locks import acquire
held = acquire(Path(more[0]), LockKind.BUILD, exclusive=True, deadline=time.monotonic() + 30)
"""
    + _READY
    + """
word = told()
while word == "go":
    caused()
    word = heard()
held.release()
say("undone")
heard()
"""
)

# 1: holds its interpreter's lock in a C call: PyDLL does not give it up. It sleeps there, or spins in a regular expression of no end.
GIL_HELD = (
    _BEGIN
    + _READY
    + _SIGNALLED
    + """
import re
libc = ctypes.PyDLL(None)
word = told()
while True:
    try:
        caused()
        while True:
            re.match(r"(a*)*b", "a" * 60) if word == "spin" else libc.usleep(600_000_000)
    except Undone:
        say("undone")
    word = heard()
"""
)

# 2: holds its mmap lock: one mprotect over a memfd that is mapped many times; again and again. CDLL lets the interpreter run on.
# How many times is measured, in processor time of the first few: a machine that is slow at it needs no more page tables than it must.
MMAP_LOCK_HELD = (
    _BEGIN
    + """
base, most, seconds, few = 512 << 20, int(more[0]), float(more[1]), 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
memory = os.memfd_create("scene")
os.ftruncate(memory, base)
place = libc.mmap(None, base * most, 0, 0x4022, -1, 0)
def populate(begin, end):
    for index in range(begin, end):
        libc.mmap(place + index * base, base, 3, 0x8011, memory, 0)
def protect(times):
    for protection in (1, 3):
        libc.mprotect(place, base * times, protection)
populate(0, few)
begun = time.thread_time()
protect(few)
times = min(most, math.ceil(seconds * 2 * few / (time.thread_time() - begun)))
populate(few, times)
"""
    + _READY
    + _SIGNALLED
    + """
told()
while True:
    try:
        caused()
        while True:
            protect(times)
    except Undone:
        say("undone")
    heard()
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
    heard()
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
with acquire(Path(more[0]), LockKind.BUILD, exclusive=True, deadline=time.monotonic() + 86400):
    say("undone")
    heard()
"""
)

# 5: registers a file in chunks of a megabyte, each a slow driver call, again and again until it is told to let it be.
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
enough = threading.Event()
def listen():
    sys.stdin.readline()
    enough.set()
threading.Thread(target=listen, daemon=True).start()
while not enough.is_set():
    go(CudaDriver(Path(more[0])), Path(more[1]), deadline_seconds=86400.0).close()
say("undone")
threading.Event().wait()
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
say("undone")
heard()
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
while heard() == "meet":
    meet()
    caused()
"""
HEALTHY_IN_GROUP = COLLECTIVE + _SERVE
HEALTHY = _BEGIN + _READY + _SERVE
