"""Looking up: K1 (never a wrong hit), K2 (denied before the lock is let go), K3 (an I/O error is not corruption), Q1 (deny, then move)."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from store_artifacts import (
    FULL,
    META,
    Given,
    Zeros,
    artifact,
    find,
    flip,
    hits,
    identity,
    key_of,
    left_in,
    payload,
    put,
    run,
    when,
)

from hwr import telemetry
from hwr.errors import ArtifactDenied, ArtifactInvalid, ChecksumMismatch, MmapUnsupported, StoreIoError
from hwr.outcomes import FailureCode, LockKind, StoreStatus, ValidationLevel
from hwr.procfs.locks import holders
from hwr.store.domain import Domain
from hwr.store.lookup import _map_one, judge, lookup
from hwr.store.manifest import FileEntry, document_digest
from hwr.store.publish import publish
from hwr.telemetry import events as E
from hwr.units import MIB
from hwr.validation.metadata import OpenedArtifact

BOTH = pytest.mark.parametrize("level", [META, FULL])


def test_a_miss_waits_for_no_lock_and_makes_no_file(domain: Domain) -> None:
    assert find(domain).status is StoreStatus.MISS
    assert left_in(domain.layout.locks) == ["domain-init.lock"]


def test_an_orphan_deny_marker_is_a_miss(domain: Domain) -> None:
    domain.layout.deny_marker(key_of()).write_text("{}")
    assert find(domain).status is StoreStatus.MISS


def test_a_hit_says_what_was_not_looked_at(stored: Domain) -> None:
    for level, unchecked in ((META, "payload bytes"), (FULL, None)):
        with telemetry.record() as told:
            assert hits(stored, level=level)
        (ended,) = told.of(E.LookupEnded)
        assert (ended.status, ended.unchecked) == (StoreStatus.HIT, unchecked)


# What somebody may do to a tree, and which level must see it -------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(json.dumps(value).encode())


def header_byte(domain: Domain) -> None:
    flip(payload(domain), 20)


def ready_drift(domain: Domain) -> None:
    rewrite(artifact(domain) / "READY.json", lambda ready: ready.update(content_digest="0" * 64))


def manifest_drift(domain: Domain) -> None:
    rewrite(artifact(domain) / "manifest.json", lambda manifest: manifest.update(alignment={"data": 1}))


def manifest_garbage(domain: Domain) -> None:
    raw = b"\xff" * 100
    (artifact(domain) / "manifest.json").write_bytes(raw)
    rewrite(artifact(domain) / "READY.json", lambda ready: ready.update(manifest_digest=document_digest(raw)))


def ready_gone(domain: Domain) -> None:
    (artifact(domain) / "READY.json").unlink()


def ready_a_fifo(domain: Domain) -> None:
    ready_gone(domain)
    os.mkfifo(artifact(domain) / "READY.json", 0o444)


def extra_file(domain: Domain) -> None:
    (artifact(domain) / "extra").write_bytes(b"")


def missing_payload(domain: Domain) -> None:
    payload(domain).unlink()


def payload_a_link(domain: Domain) -> None:
    path = payload(domain)
    target = domain.root / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def payload_a_directory(domain: Domain) -> None:
    path = payload(domain)
    path.unlink()
    path.mkdir(0o555)


def hard_link(domain: Domain) -> None:
    os.link(payload(domain), domain.root / "second name")


def writable_payload(domain: Domain) -> None:
    payload(domain).chmod(0o644)


def writable_directory(domain: Domain) -> None:
    artifact(domain).chmod(0o755)


def other_owner_of_payload(domain: Domain) -> None:
    os.chown(payload(domain), 65534, -1)


def other_owner_of_directory(domain: Domain) -> None:
    os.chown(artifact(domain), 65534, -1)


def truncated(domain: Domain) -> None:
    os.truncate(payload(domain), payload(domain).stat().st_size - 1)


def longer(domain: Domain) -> None:
    os.truncate(payload(domain), payload(domain).stat().st_size + 1)


def another_key_s_tree(domain: Domain) -> None:
    put(domain, "b")
    shutil.rmtree(artifact(domain))
    os.rename(artifact(domain, "b"), artifact(domain))


SEEN_AT_ONCE = [
    header_byte,
    ready_drift,
    manifest_drift,
    manifest_garbage,
    ready_gone,
    ready_a_fifo,
    extra_file,
    missing_payload,
    payload_a_link,
    payload_a_directory,
    hard_link,
    writable_payload,
    writable_directory,
    other_owner_of_payload,
    other_owner_of_directory,
    truncated,
    longer,
    another_key_s_tree,
]


@BOTH
@pytest.mark.parametrize("damage", SEEN_AT_ONCE, ids=lambda damage: damage.__name__)
def test_a_damaged_tree_is_denied_quarantined_and_rebuilt(
    stored: Domain, damage: Callable[[Domain], None], level: ValidationLevel, as_root: None
) -> None:
    """K1, K2, Q1: both levels see it; then it is never served, and one republication makes it right."""
    damage(stored)
    found = find(stored, level=level)
    assert found.status is StoreStatus.INVALID
    assert isinstance(found.failure, ArtifactInvalid)
    assert found.failure.retryable
    assert left_in(stored.layout.deny) == [f"{key_of()}.json"]
    again = find(stored, level=META)
    assert isinstance(again.failure, ArtifactDenied)
    assert again.failure.reason == found.failure.code
    put(stored)
    assert not left_in(stored.layout.deny)
    (name,) = [name for name in left_in(stored.layout.quarantine) if name.startswith(key_of())]
    assert ".validation_failure." in name
    assert hits(stored, level=FULL)


def payload_byte(domain: Domain) -> None:
    flip(payload(domain), -1)


def swapped_payloads(domain: Domain) -> None:
    put(domain, "b", [Given("weight", b"\7" * 10240), Given("bias", b"\1\2\3\4" * 3, "F32", (3,))])
    one, two, aside = payload(domain), payload(domain, "b"), domain.root / "aside"
    assert one.stat().st_size == two.stat().st_size
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


@pytest.mark.parametrize("damage", [payload_byte, swapped_payloads], ids=lambda damage: damage.__name__)
def test_payload_corruption_is_seen_by_full_checksum_only(stored: Domain, damage: Callable[[Domain], None]) -> None:
    """The default level does not look at payload bytes (R7); R9: the stronger reader's denial ends the weaker one's hits."""
    damage(stored)
    assert hits(stored, level=META)
    with telemetry.record() as told:
        found = find(stored, level=FULL)
    assert isinstance(found.failure, ChecksumMismatch)
    assert found.failure.code is FailureCode.CHECKSUM_MISMATCH
    (ended,) = told.of(E.ValidationEnded)
    assert ended.file == payload(stored).name
    assert ended.expected != ended.actual
    assert ended.tensor in ("weight", "bias")
    assert not hits(stored, level=META)
    code = "print(find(store(sys.argv[1])).status)"
    assert run(code, stored.root).strip() == StoreStatus.INVALID  # nor in another process


def test_one_flipped_payload_byte_names_file_tensor_and_chunk(stored: Domain) -> None:
    put(stored, "large", [Zeros("first", 65 * MIB), Given("second", b"x")])
    flip(payload(stored, "large"), 4096 + 64 * MIB + 5)
    with telemetry.record() as told:
        found = find(stored, "large", FULL)
    assert found.failure is not None
    assert "'first'" in found.failure.cause
    assert f"bytes {4096 + 64 * MIB}..{4096 + 65 * MIB}" in found.failure.cause
    (ended,) = told.of(E.ValidationEnded)
    assert (ended.tensor, ended.chunk) == ("first", 2)  # chunk 0 is the header


def test_new_times_alone_change_nothing(stored: Domain) -> None:
    for entry in (*artifact(stored).iterdir(), artifact(stored)):
        os.utime(entry, (1, 1))
    assert hits(stored, level=META)
    assert hits(stored, level=FULL)


def test_an_identity_of_tuples_is_the_same_as_one_of_lists(domain: Domain) -> None:
    """What a factory says of a model is compared as JSON, which has no tuples."""
    put(domain)
    asked = identity().to_json()
    asked["component"] = {**asked["component"], "metadata": {}}
    assert lookup(domain, key_of(), asked, META).status is StoreStatus.HIT
    asked["component"]["metadata"] = {"other": (1,)}
    assert lookup(domain, key_of(), asked, META).status is StoreStatus.INVALID


# Races ------------------------------------------------------------------------------------------------------------


def test_a_weak_lookup_cannot_win_against_a_denial_that_overlaps_it(stored: Domain) -> None:
    """K1: the strong reader denies between the weak one's validation and its lease."""
    flip(payload(stored), -1)
    validated = []

    def deny(_: object) -> None:
        validated.append(find(stored, level=FULL).status)

    # The weak reader's validation is over, the strong one's begins here, inside the event.
    with when(E.ValidationEnded, deny):
        found = find(stored, level=META)
    assert validated == [StoreStatus.INVALID]
    assert isinstance(found.failure, ArtifactDenied)
    assert not mapped(payload(stored))


def test_two_readers_that_find_the_same_corruption_deny_once(stored: Domain) -> None:
    """K2: whoever comes second finds the marker and has the same answer."""
    flip(payload(stored), -1)
    inner = []
    with telemetry.record() as told, when(E.ValidationEnded, lambda _: inner.append(find(stored, level=FULL))):
        outer = find(stored, level=FULL)
    assert [type(found.failure) for found in (*inner, outer)] == [ChecksumMismatch, ChecksumMismatch]
    assert [event.containment for event in told.of(E.ArtifactDenied)] == ["marker", "already_denied"]


def test_a_tree_replaced_during_its_lookup_is_not_served_and_the_new_one_not_denied(stored: Domain) -> None:
    """K1: what was validated is no longer what the name stands for."""
    for level, damaged, expected in ((META, False, StoreIoError), (FULL, True, StoreIoError)):
        if damaged:
            flip(payload(stored), -1)

        def replace(_: object) -> None:
            artifact(stored).rename(stored.root / f"aside-{os.urandom(4).hex()}")
            put(stored)

        with when(E.ValidationEnded, replace):
            found = find(stored, level=level)
        assert isinstance(found.failure, expected)
        assert found.failure.reason == "replaced"
        assert not left_in(stored.layout.deny)
        assert hits(stored, level=FULL)


def test_the_denial_is_durable_before_the_lock_is_let_go(stored: Domain) -> None:
    """K2: at the moment of the event the marker is there and the lock still ours."""
    flip(payload(stored), 20)
    seen: list[object] = []

    def look(_: object) -> None:
        held = holders(stored.layout.lock(LockKind.ARTIFACT, key_of()))
        seen.append([lock.pid for lock in held] if isinstance(held, tuple) else held)
        seen.append(json.loads(stored.layout.deny_marker(key_of()).read_bytes())["reason"])

    with when(E.ArtifactDenied, look):
        find(stored)
    assert seen == [[os.getpid()], FailureCode.MANIFEST_CORRUPT]


def mapped(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


@BOTH
def test_a_failed_lookup_leaves_no_descriptor_mapping_or_lock(stored: Domain, level: ValidationLevel) -> None:
    find(stored)
    before = left_in(Path("/proc/self/fd"))
    flip(payload(stored), 20)
    found = find(stored, level=level)
    assert found.failure is not None  # it lives, and its traceback with it
    assert left_in(Path("/proc/self/fd")) == before
    assert not mapped(payload(stored))
    assert holders(stored.layout.lock(LockKind.ARTIFACT, key_of())) == ()


# Q1 ---------------------------------------------------------------------------------------------------------------


def test_without_room_for_a_marker_the_directory_itself_is_marked(tmp_path: Path, as_root: None) -> None:
    """Q1: on a disk without inodes or bytes a denial still ends later hits, in every process (R9)."""
    code = """
import os, subprocess
mount = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=40", "none", mount], check=True)
domain = store(mount + "/root")
put(domain)
flip(payload(domain), -1)
try:
    for number in range(100):
        open(f"{mount}/{number}", "w").close()
except OSError as error:
    print(error.errno)
with telemetry.record() as told:
    print(find(domain, level=FULL).status)
print([event.containment for event in told.of(telemetry.events.ArtifactDenied)])
again = find(domain)
print(again.status, again.failure.code, again.failure.reason)
from hwr.store import inventory
print([(entry.state.value, entry.reason) for entry in inventory.entries(domain.root)])
for number in range(100):
    if os.path.exists(f"{mount}/{number}"):
        os.unlink(f"{mount}/{number}")
put(domain)
print(hits(domain, level=FULL), left_in(domain.layout.deny))
"""
    assert run(code, tmp_path, prefix=("unshare", "-m")).splitlines() == [
        "28",
        "invalid",
        "['sticky']",
        "invalid artifact_denied sticky",
        "[('denied', 'sticky')]",
        "True []",
    ]


def test_a_quarantine_that_cannot_be_moved_stays_denied(stored: Domain, as_root: None) -> None:
    """Q1: here the quarantine directory is gone."""
    flip(payload(stored), 20)
    assert find(stored).status is StoreStatus.INVALID
    stored.layout.quarantine.rmdir()
    stored.layout.quarantine.write_bytes(b"")
    done = publish(stored, identity(), [Given("x", b"y")])
    assert done.failure is not None
    assert done.failure.code is FailureCode.QUARANTINE_FAILED
    assert done.failure.retryable
    assert isinstance(find(stored).failure, ArtifactDenied)
    assert stat.S_IMODE(artifact(stored).stat().st_mode) == 0o555
    stored.layout.quarantine.unlink()
    stored.layout.quarantine.mkdir(0o700)
    put(stored)
    assert hits(stored, level=FULL)


def test_a_broken_deny_marker_denies(stored: Domain) -> None:
    stored.layout.deny_marker(key_of()).write_bytes(b"")
    found = find(stored)
    assert isinstance(found.failure, ArtifactDenied)
    assert found.failure.reason == "unreadable"
    put(stored)
    assert hits(stored)


# Limits and I/O ---------------------------------------------------------------------------------------------------

_FD_LIMIT = """
import os, resource
domain = store(sys.argv[1])
put(domain)
assert hits(domain, level=FULL)
soft = len(os.listdir("/proc/self/fd")) - 1  # listdir's own
results = set()
for extra in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + extra, 4096))
    for level in (META, FULL):
        found = find(domain, level=level)
        results.add(found.failure.code.value if found.failure else found.status.value)
        if found.lease is not None:
            found.lease.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
print(sorted(results), left_in(domain.layout.deny), hits(domain, level=FULL))
"""


def test_no_descriptor_left_is_a_limit_and_no_corruption(tmp_path: Path) -> None:
    """K3: wherever on its way the lookup meets EMFILE."""
    assert run(_FD_LIMIT, tmp_path / "root").strip() == "['fd_limit', 'hit'] [] True"


_MAP_LIMIT = """
import resource
from hwr.procfs.status import read_status
import os
domain = store(sys.argv[1])
put(domain, tensors=[Zeros("zeros", 600 << 20)])
assert hits(domain)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (300 << 20), -1))
found = find(domain)
print(found.status, found.failure.code, found.failure.retryable, left_in(domain.layout.deny))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(hits(domain))
"""


def test_no_address_space_left_is_a_limit_and_no_corruption(tmp_path: Path) -> None:
    """K3."""
    assert run(_MAP_LIMIT, tmp_path / "root").splitlines() == ["failed map_limit True []", "True"]


def test_a_file_that_cannot_be_mapped_is_unsupported(stored: Domain) -> None:
    """K3: sysfs has files without mmap (ENODEV), as some union filesystems do."""
    odd = Path("/sys/kernel/uevent_seqnum")
    if not odd.exists():
        pytest.skip("no such file in sysfs here")
    opened = judge(artifact(stored), key_of(), None, META)
    opened.close()
    fd = os.open(odd, os.O_RDONLY)
    try:
        entry = FileEntry("model.safetensors", 4096, 4096, "0" * 64)
        with pytest.raises(MmapUnsupported, match="shared"):
            _map_one(OpenedArtifact(opened.manifest, opened.ready, {entry.name: fd}), entry, "root", "sysfs")
    finally:
        os.close(fd)


_IO_ERROR = """
import os, subprocess
from pathlib import Path
image, mount = sys.argv[1:]
os.truncate(os.open(image, os.O_RDWR | os.O_CREAT), 64 << 20)
subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], check=True)
loop = subprocess.run(["losetup", "-f", "--show", image], check=True, capture_output=True, text=True).stdout.strip()
try:
    subprocess.run(["mount", loop, mount], check=True)
    domain = store(mount + "/root")
    put(domain, tensors=[Zeros("zeros", 30 << 20), Given("tail", b"x" * 5000)])
    assert hits(domain, level=FULL)
    file = payload(domain)
    fd = os.open(file, os.O_RDONLY)
    os.sync()
    # The medium fails under the last third of the disk: the image ends there, and the page cache is dropped.
    blocks = subprocess.run(["debugfs", "-R", f"blocks /root/artifacts/{key_of()}/{file.name}", loop], capture_output=True, text=True)
    numbers = [int(word) for word in blocks.stdout.split() if word.isdigit()]
    middle = numbers[len(numbers) // 2]
    size = int(subprocess.run(["stat", "-f", "-c", "%S", mount], capture_output=True, text=True).stdout)
    os.truncate(image, middle * size)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    image_fd = os.open(image, os.O_RDONLY)
    os.posix_fadvise(image_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.pread(fd, 4096, file.stat().st_size - 4096)
        print("no error can be made here")
    except OSError as error:
        print(error.errno)
    found = find(domain, level=FULL)
    print(found.status, found.failure.code, found.failure.retryable, left_in(domain.layout.deny))
    os.close(fd)
finally:
    subprocess.run(["umount", "-l", mount], check=False)
    subprocess.run(["losetup", "-d", loop], check=False)
"""


def test_a_failing_disk_is_no_corruption_and_takes_nobody_down(tmp_path: Path, as_root: None) -> None:
    """K3, V3: a loop device whose image lost its end gives EIO; the mapping of the hashing child dies of SIGBUS."""
    if shutil.which("debugfs") is None or not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices here")
    mount = tmp_path / "mount"
    mount.mkdir()
    lines = run(_IO_ERROR, tmp_path / "image", mount, prefix=("unshare", "-m")).splitlines()
    if lines[0] != "5":
        pytest.skip(lines[0])
    assert lines[1] == "failed store_io True []"
