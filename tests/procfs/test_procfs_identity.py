"""What makes a PID mean one process."""

from __future__ import annotations

import os
import time
import uuid

import pytest

from hwr.errors import Unavailable
from hwr.procfs.identity import parse_boot_id, parse_namespace, read_boot_id, read_pid_namespace, start_ns


def test_boot_id_is_a_uuid_that_stays():
    found = read_boot_id()
    assert isinstance(found, str)
    assert str(uuid.UUID(found)) == found == read_boot_id()


def test_namespace_is_the_inode_of_its_file(start):
    assert read_pid_namespace() == os.stat("/proc/self/ns/pid").st_ino == read_pid_namespace(start("").pid)


def test_child_in_a_namespace_of_its_own(as_root, python_as):
    code = "from hwr.procfs.identity import read_pid_namespace; print(read_pid_namespace())"
    assert int(python_as(["unshare", "--pid", "--fork", "--mount-proc"], code)) != read_pid_namespace()


def test_namespace_of_another_user_names_the_capability(nobody, python_as):
    code = "import sys; from hwr.procfs.identity import read_pid_namespace; print(read_pid_namespace(int(sys.argv[1])).reason)"
    reason = python_as(nobody, code, os.getpid())
    assert "CAP_SYS_PTRACE" in reason


def test_start_tells_processes_apart(start):
    child = start("")
    found, own = start_ns(child.pid), start_ns(os.getpid())
    assert isinstance(found, int)
    assert isinstance(own, int)
    assert own < found <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert start_ns("self") == own


def test_ended_process_has_no_start(start):
    child = start("")
    child.kill()
    child.wait()
    assert isinstance(start_ns(child.pid), Unavailable)


def test_injected_tree(tree):
    root = tree("sys/kernel/random/boot_id", b"b5234fba-a410-40c4-b074-5b1cc308c285\n")
    (root / "7" / "ns").mkdir(parents=True)
    (root / "7" / "ns" / "pid").symlink_to("pid:[4026531836]")
    assert read_boot_id(root) == "b5234fba-a410-40c4-b074-5b1cc308c285"
    assert read_pid_namespace(7, root) == 4026531836
    assert isinstance(read_pid_namespace(8, root), Unavailable)


@pytest.mark.parametrize("text", [b"", b"b5234fba-a410-40c4-b074-5b1cc308c28", b"B5234FBA-a410-40c4-b074-5b1cc308c285\n", b"\xff" * 37])
def test_boot_id_that_is_not_whole(text):
    assert isinstance(parse_boot_id(text), Unavailable)


@pytest.mark.parametrize("link", ["", "pid:[]", "mnt:[1]", "pid:[1", "pid:[-1]", "pid:[٣]", "/pid:[1]", "pid:[1]\n"])
def test_link_that_is_no_namespace(link):
    assert isinstance(parse_namespace(link), Unavailable)
