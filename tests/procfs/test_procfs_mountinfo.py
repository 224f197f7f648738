"""/proc/PID/mountinfo: which filesystem a path lies on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.mountinfo import Mount, mount_of, parse_mountinfo, read_mountinfo

ROOT = b"27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"


def table(*lines: bytes) -> tuple[Mount, ...]:
    return parse_mountinfo(ROOT + b"".join(line + b"\n" for line in lines))


def fstype(path: str, mounts: tuple[Mount, ...]) -> str:
    found = mount_of(path, mounts)
    assert isinstance(found, Mount), found
    return found.fstype


def own() -> tuple[Mount, ...]:
    found = read_mountinfo()
    assert isinstance(found, tuple), found
    return found


def test_this_machine():
    assert fstype("/proc/self", own()) == "proc"
    assert fstype("/", own()) == fstype("/..//", own())


@pytest.mark.parametrize("path", ["/", "/proc", "/sys", "/dev"])
def test_device_is_what_stat_says_of_the_mount_point(path):
    found = mount_of(path, own())
    assert isinstance(found, Mount)
    assert found.mount_point == path
    if found.fstype not in ("btrfs", "overlay"):
        assert os.makedev(found.major, found.minor) == os.stat(path).st_dev


@pytest.mark.parametrize("name", ["a b", "tab\there", "new\nline", "back\\slash", "#hash", "\\040", "\u00e9"])
def test_odd_mount_points_are_unescaped(as_root, python_as, tmp_path, name):
    point = tmp_path / name
    point.mkdir()
    code = """
import sys
from hwr.procfs.mountinfo import mount_of, read_mountinfo
found = mount_of(sys.argv[1] + "/below", read_mountinfo())
print(ascii(found.mount_point), found.fstype, found.read_only)
"""
    script = 'mount -t tmpfs -o ro,size=1m none "$0" && exec "$@"'
    assert python_as(["unshare", "-m", "sh", "-c", script, str(point)], code, point) == f"{str(point)!a} tmpfs True\n"


def test_mounts_over_one_another_are_seen_as_the_kernel_sees_them(as_root, python_as, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    code = """
import os, sys
from hwr.procfs.mountinfo import mount_of, read_mountinfo
found = mount_of(sys.argv[1], read_mountinfo())
print(found.source, os.makedev(found.major, found.minor) == os.stat(sys.argv[1]).st_dev)
"""
    script = "mount -t tmpfs hidden $0/a/b && mount -t tmpfs first $0/a && mount -t tmpfs last $0/a && mkdir $0/a/b"
    prefix = ["unshare", "-m", "sh", "-c", script + ' && exec "$@"', str(tmp_path)]
    assert python_as(prefix, code, tmp_path / "a" / "b") == "last True\n"


def test_longest_mount_point_wins_by_whole_names():
    mounts = table(b"30 27 0:5 / /a rw - tmpfs t rw", b"31 30 0:6 / /a/b rw - nfs4 host:/x rw")
    assert [fstype(path, mounts) for path in ("/", "/a", "/ab", "/a/c", "/a/b", "/a/b/c", "/a/bc")] == [
        "ext4", "tmpfs", "ext4", "tmpfs", "nfs4", "nfs4", "tmpfs",
    ]  # fmt: skip


def test_last_of_equal_mount_points_wins():
    assert fstype("/a/x", table(b"30 27 0:5 / /a rw - tmpfs t rw", b"31 30 0:6 / /a rw - xfs d rw")) == "xfs"
    assert fstype("/a/x", table(b"30 27 0:5 / /a rw - tmpfs t rw", b"31 27 0:6 / /a rw - xfs d rw")) == "xfs"


def test_chroot_without_a_root_mount():
    mounts = parse_mountinfo(b"30 9 0:5 / /a rw - tmpfs t rw\n31 9 0:6 / /a/b rw - xfs d rw\n32 9 0:7 / /a/b rw - nfs h rw\n")
    assert fstype("/a/b/c", mounts) == "nfs"
    assert isinstance(mount_of("/elsewhere", mounts), Unavailable)


def test_table_that_goes_round_in_circles_ends():
    assert fstype("/a/b", table(b"30 27 0:5 / /a rw - tmpfs t rw", b"31 30 0:5 / /a rw - xfs t rw", b"30 31 0:5 / /a rw - nfs t rw"))


def test_relative_path_is_refused():
    assert isinstance(mount_of("a/b", table()), Unavailable)


def test_two_leading_slashes_are_one():
    assert fstype("//a/b", table(b"30 27 0:5 / /a rw - tmpfs t rw")) == "tmpfs"


def test_all_columns(tree):
    root = tree(
        "self/mountinfo", rb"36 35 98:0 /mnt\0401 /mnt2 ro,noatime master:1 propagate_from:2 - fuse.x\134y a\040b rw,k=v\012" + b"\n"
    )
    (mount,) = read_mountinfo(proc_root=root) or ()
    assert mount == Mount(36, 35, 98, 0, "/mnt 1", "/mnt2", ("ro", "noatime"), "fuse.x\\y", "a b", ("rw", "k=v\n"))
    assert mount.read_only


def test_read_only_filesystem_under_a_writable_mount():
    (mount,) = parse_mountinfo(b"1 0 8:1 / / rw - ext4 d ro\n")
    assert mount.read_only
    (mount,) = parse_mountinfo(b"1 0 8:1 / / rw - ext4 d rw,errors=remount-ro\n")
    assert not mount.read_only


def test_empty_source_keeps_the_columns_in_place():
    (mount,) = parse_mountinfo(b"1 0 0:9 / / rw - tmpfs  rw\n")
    assert (mount.source, mount.super_options) == ("", ("rw",))


@pytest.mark.parametrize(
    "line", [b"", b"1 0 8:1 / / rw ext4 d rw", b"1 0 8 / / rw - ext4 d rw", b"x 0 8:1 / / rw - ext4 d rw", b"1 0 8:1 / / rw - ext4"]
)
def test_strange_line_is_skipped(line):
    assert len(table(line)) == 1


def test_no_whole_line_is_unavailable(tree, tmp_path: Path):
    assert isinstance(read_mountinfo(5, tree("5/mountinfo", ROOT[:-1])), Unavailable)
    assert isinstance(read_mountinfo(6, tmp_path), Unavailable)
