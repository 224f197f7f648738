"""/proc/PID/limits, and the capability that lifts one of them."""

from __future__ import annotations

import os
import resource
import subprocess

import pytest

from hwr.errors import Unavailable
from hwr.procfs.capabilities import CAP_IPC_LOCK, parse_effective, read_capable
from hwr.procfs.limits import Limit, Limits, parse_limits, read_limits

HEAD = b"Limit                     Soft Limit           Hard Limit           Units     \n"
SHOW = "from hwr.procfs.limits import read_limits; print(read_limits().locked_memory)"
CAPABLE = "from hwr.procfs.capabilities import CAP_IPC_LOCK, read_capable; print(read_capable(CAP_IPC_LOCK))"


def own() -> Limits:
    found = read_limits()
    assert isinstance(found, Limits), found
    return found


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Max locked memory", resource.RLIMIT_MEMLOCK),
        ("Max open files", resource.RLIMIT_NOFILE),
        ("Max core file size", resource.RLIMIT_CORE),
        ("Max nice priority", resource.RLIMIT_NICE),
        ("Max realtime timeout", resource.RLIMIT_RTTIME),
    ],
)
def test_rows_are_what_getrlimit_says(name: str, key: int):
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(key))
    assert own().rows[name] == Limit(soft, hard)


def test_every_row_of_this_kernel_is_read():
    assert len(own().rows) == 16


@pytest.mark.parametrize("soft", [0, 65536, 65537])
def test_soft_and_hard_limit_of_locked_memory(python_as, soft: int):
    assert python_as(["prlimit", f"--memlock={soft}:131072"], SHOW) == f"Limit(soft={soft}, hard=131072)\n"


def test_unlimited_is_none():
    found = parse_limits(HEAD + b"Max locked memory         unlimited            unlimited            bytes     \n")
    assert isinstance(found, Limits)
    assert found.locked_memory == Limit(None, None)


def test_limit_that_is_not_whole_is_absent():
    cut = HEAD + b"Max open files   20000      20000    files     \nMax locked memory     8388608        838"
    found = parse_limits(cut)
    assert isinstance(found, Limits)
    assert found.locked_memory is None
    assert found.rows == {"Max open files": Limit(20000, 20000)}


def test_number_that_no_kernel_writes_is_absent():
    assert isinstance(parse_limits(HEAD + b"Max locked memory         " + b"9" * 25 + b"  8388608  bytes\n"), Unavailable)


def test_text_without_a_row_is_unavailable():
    assert isinstance(parse_limits(HEAD), Unavailable)
    assert isinstance(parse_limits(b""), Unavailable)


def test_ended_process_is_unavailable(start):
    child = start("")
    child.kill()
    child.wait()
    found = read_limits(child.pid)
    assert isinstance(found, Unavailable)
    assert "ENOENT" in found.reason


def test_root_is_capable_and_nobody_is_not(python_as, nobody):
    assert python_as([], CAPABLE) == "True\n"
    assert python_as(nobody, CAPABLE) == "False\n"


def test_a_dropped_capability_is_gone(python_as, as_root):
    assert python_as(["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"], CAPABLE) == "False\n"


def test_root_of_a_user_namespace_is_not_capable_over_the_machine(python_as):
    # Its mask has every bit, and mlock asks the first user namespace (capable(), not ns_capable()).
    if subprocess.run(["unshare", "-U", "-r", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    map_it = "import ctypes, mmap\nm = mmap.mmap(-1, 1 << 20)\n"
    locked = map_it + "print(ctypes.CDLL(None).mlock(ctypes.byref(ctypes.c_char.from_buffer(m)), 1 << 20))"
    below = ["prlimit", "--memlock=65536:65536", "unshare", "-U", "-r"]
    assert python_as(below, CAPABLE) == "False\n"
    assert python_as(below, locked) == "-1\n"


def test_mask_that_is_not_whole_is_unavailable(tree):
    assert parse_effective(b"Name:\tx\nCapEff:\t0000000000004000\n") == 1 << CAP_IPC_LOCK
    assert isinstance(parse_effective(b"CapEff:\t00000000\n"), Unavailable)
    assert isinstance(parse_effective(b"CapEff:\t0000000000004000"), Unavailable)
    assert isinstance(read_capable(CAP_IPC_LOCK, "self", tree("self/status", b"Name:\tx\n")), Unavailable)


def test_kernel_without_user_namespaces_has_the_first_only(tree):
    assert read_capable(CAP_IPC_LOCK, "self", tree("self/status", b"CapEff:\t0000000000004000\n")) is True
    assert read_capable(CAP_IPC_LOCK, "self", tree("self/status", b"CapEff:\t00000000ffffbfff\n")) is False


def test_this_process_reads_itself_by_number_too():
    assert read_limits(os.getpid()) == read_limits("self")
