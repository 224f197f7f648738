"""Whether it fits: limits, disks that are full of bytes or inodes, stores that are read-only, users without rights (R11, P1, Q1)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from store_artifacts import NOBODY, REPOSITORY, SMALL, Given, Zeros, artifact, find, hits, identity, key_of, left_in, put, run, store

from hwr import telemetry
from hwr.errors import ArtifactTooLarge, InsufficientCapacity, StoreLimitExceeded
from hwr.outcomes import FailureCode, PublicationOutcome, StoreStatus
from hwr.store.publish import publish
from hwr.telemetry import events as E
from hwr.units import MIB


def refusal(domain: object, **options: object) -> object:
    done = publish(domain, identity(), SMALL, **options)  # type: ignore[arg-type]
    assert done.outcome is PublicationOutcome.FAILED
    assert find(domain).status is StoreStatus.MISS  # type: ignore[arg-type]
    assert not left_in(domain.layout.temporary)  # type: ignore[attr-defined]
    return done.failure


def test_an_artifact_over_its_limit_is_refused(tmp_path: Path) -> None:
    size = put(store(tmp_path / "any")).payload_bytes
    failure = refusal(store(tmp_path / "root", max_artifact_bytes=size - 1))
    assert isinstance(failure, ArtifactTooLarge)
    assert failure.retryable
    assert f"needs {size} bytes" in failure.cause
    put(store(tmp_path / "fits", max_artifact_bytes=size))


def test_free_space_that_is_kept_free(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    failure = refusal(store(tmp_path / "root", min_free_bytes=facts.f_blocks * facts.f_frsize))
    assert isinstance(failure, InsufficientCapacity)
    assert failure.details["available"] <= facts.f_bfree * facts.f_frsize  # what is reserved for root is not for us


def test_the_tree_is_measured_only_if_a_limit_is_set_and_once_a_check(tmp_path: Path) -> None:
    """R11: the figure in the refusal is the one that was measured, quarantine and leftovers told apart."""
    with telemetry.record() as told:
        free = store(tmp_path / "free")
        put(free)
        publish(free, identity(), SMALL)
    assert not told.of(E.TreeMeasuring)
    limit = 200_000
    domain = store(tmp_path / "root", max_store_bytes=limit)
    with telemetry.record() as told:
        put(domain)
    assert len(told.of(E.TreeMeasuring)) == 1
    stray, aside = domain.layout.new_temporary(key_of("dead")), domain.layout.quarantine / "aside"
    for path, size in ((stray, 1000), (aside, 70_000)):
        path.mkdir()
        (path / "file").write_bytes(bytes(size))
    with telemetry.record() as told:
        done = publish(domain, identity("b"), [Zeros("zeros", 150_000)])
    assert isinstance(done.failure, StoreLimitExceeded)
    assert len(told.of(E.TreeMeasuring)) == 1
    held = sum(file.stat().st_size for file in domain.root.rglob("*") if file.is_file())
    (measured,) = told.of(E.TreeMeasured)
    assert done.failure.details["held"] == measured.bytes == held
    assert done.failure.details["needed"] == 150_000 + 4096
    assert f"holds {held} of {limit} (quarantine 70000, temporary 1000)" in done.failure.cause
    put(domain, "b", [Zeros("zeros", limit - held - 4096)])  # to the byte


# Full disks: a small tmpfs, in a mount namespace of its own --------------------------------------------------------

_ON_TMPFS = """
import os, subprocess, errno
mount, options = sys.argv[1:3]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", mount], check=True)
domain = store(mount + "/root")
put(domain, "other")

def attempt(tensors):
    done = publish(domain, identity(), tensors)
    print(done.outcome, *((done.failure.code, done.failure.reason) if done.failure else ()))
    print(find(domain).status, left_in(domain.layout.temporary), hits(domain, "other", FULL))
"""


def on_tmpfs(path: Path, options: str, code: str) -> list[str]:
    return run(_ON_TMPFS + code, path, options, prefix=("unshare", "-m")).splitlines()


def test_a_disk_without_room_is_refused_before_a_byte_is_written(tmp_path: Path, as_root: None) -> None:
    told = on_tmpfs(tmp_path, "size=4m", 'attempt([Zeros("zeros", 5 << 20)])')
    assert told == ["failed insufficient_capacity free_space", "miss [] True"]


def test_a_disk_without_inodes_is_told_apart(tmp_path: Path, as_root: None) -> None:
    told = on_tmpfs(tmp_path, "size=16m,nr_inodes=24", 'attempt(SMALL)\nattempt([Zeros("zeros", 5 << 20)])')
    assert told == ["failed no_inodes inodes", "miss [] True"] * 2


_FILLS = """
from store_artifacts import when
from hwr.outcomes import PublicationStage
from hwr.telemetry import events as E
def fill(_):
    try:
        with open(mount + "/other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError as error:
        assert error.errno == errno.ENOSPC
def inodes(_):
    try:
        for number in range(10**6):
            open(f"{mount}/{number}", "w").close()
    except OSError as error:
        assert error.errno == errno.ENOSPC
class Whole:
    name, dtype, kind, shape = "whole", "U8", SMALL[0].kind, (5 << 20,)
    def blocks(self):
        yield memoryview(bytes(5 << 20))
"""


@pytest.mark.parametrize("stage", ["allocate", "fsync"])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(tmp_path: Path, as_root: None, stage: str) -> None:
    """P1: before the allocation; and after the payload, when the manifest needs a page."""
    code = f'{_FILLS}\nwith when(E.PublicationStageBegun, fill, lambda event: event.stage == "{stage}"):\n    attempt([Whole()])'
    told = on_tmpfs(tmp_path, "size=16m", f'{code}\nos.unlink(mount + "/other")\nattempt([Whole()])')
    assert told == ["failed enospc disk_full", "miss [] True", "published", "hit [] True"]


def test_inodes_that_run_out_meanwhile_leave_nothing_behind(tmp_path: Path, as_root: None) -> None:
    code = f'{_FILLS}\nwith when(E.PublicationStageBegun, inodes, lambda event: event.stage == "write"):\n    attempt([Whole()])'
    told = on_tmpfs(tmp_path, "size=16m,nr_inodes=60", code)
    assert told == ["failed no_inodes inodes", "miss [] True"]


def test_a_store_that_cannot_be_made_says_what_is_missing(tmp_path: Path, as_root: None) -> None:
    code = f"""{_FILLS}
inodes(0)
try:
    store(mount + "/second")
except Exception as error:
    print(error.code)
import resource
soft, told = len(os.listdir("/proc/self/fd")) - 1, set()
for extra in range(8):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + extra, 4096))
    try:
        store(mount + "/root")
    except Exception as error:
        told.add((error.code.value, error.reason))
print(sorted(told))
"""
    lines = on_tmpfs(tmp_path, "size=16m,nr_inodes=60", code)
    assert lines == ["no_inodes", "[('domain_unavailable', 'filesystem_unknown'), ('fd_limit', 'open')]"]


def test_hits_need_no_room(tmp_path: Path, as_root: None) -> None:
    """Also the first hit, by a store that was opened when the disk was full already."""
    code = f'{_FILLS}\nfill(0)\ninodes(0)\ndomain = store(mount + "/root")\nprint(domain.writable, hits(domain, "other", FULL))'
    assert on_tmpfs(tmp_path, "size=16m,nr_inodes=60", code) == ["True True"]


def test_a_store_that_becomes_read_only_serves_and_refuses_builds(tmp_path: Path, as_root: None) -> None:
    code = """
subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
attempt(SMALL)
domain = store(mount + "/root")
print(domain.writable)
attempt(SMALL)
flipped = 0
"""
    told = on_tmpfs(tmp_path, "size=16m", code)
    # First as a process that opened it when it was writable, then as a new one.
    assert told == ["failed read_only_store lock_file", "miss [] True", "False", "failed read_only_store read_only", "miss [] True"]


def test_corruption_in_a_read_only_store_is_found_and_nothing_is_denied(tmp_path: Path, as_root: None) -> None:
    code = """
flip(payload(domain, "other"), -1)
subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
with telemetry.record() as told:
    print(find(domain, "other", FULL).failure.code)
print(*[event.containment.partition(":")[0] for event in told.of(telemetry.events.ArtifactDenied)], left_in(domain.layout.deny))
"""
    assert on_tmpfs(tmp_path, "size=16m", code) == ["checksum_mismatch", "failed []"]


# Without root's rights ---------------------------------------------------------------------------------------------

_AS_NOBODY = """
import os
domain = store(sys.argv[1])
put(domain)
print(hits(domain, level=FULL))
path = payload(domain)
os.chmod(path, 0o644)
flip(path, -1)
os.chmod(path, 0o444)
print(find(domain, level=FULL).failure.code, find(domain).failure.code)
put(domain)
print(hits(domain, level=FULL), len(left_in(domain.layout.quarantine)), left_in(domain.layout.deny), left_in(domain.layout.temporary))
found = find(domain)
os.chmod(path.parent, 0o755)
print(find(domain).failure.code)
put(domain)
print(hits(domain, level=FULL))
"""


def test_an_unprivileged_user_publishes_quarantines_and_publishes_again(tmp_path: Path, as_root: None) -> None:
    """Q1: a directory that changes its parent must be writable, for anybody but root."""
    if not os.access(REPOSITORY, os.R_OK) or not REPOSITORY.stat().st_mode & stat.S_IXOTH:
        pytest.skip("the repository is not readable for others")
    home = Path("/tmp") / f"hwr-nobody-{os.getpid()}"
    home.mkdir()
    try:
        os.chown(home, 65534, 65534)
        told = run(_AS_NOBODY, home / "root", prefix=NOBODY).splitlines()
        assert told == ["True", "checksum_mismatch artifact_denied", "True 1 [] []", "manifest_corrupt", "True"]
        # Root may read it, and does not trust it: it is another user's.
        code = "try:\n    store(sys.argv[1])\nexcept Exception as error:\n    print(error.code, error.retryable)"
        assert run(code, home / "root").split() == [FailureCode.UNTRUSTED_PERMISSIONS, "False"]
    finally:
        run("import os, shutil\nos.chmod(sys.argv[1], 0o700)\nshutil.rmtree(sys.argv[1])", home)


def test_a_root_that_this_user_may_not_write_is_read_only_or_refused(tmp_path: Path, as_root: None) -> None:
    domain = store(tmp_path / "root")
    put(domain, "a", [Given("x", bytes(MIB))])
    code = "try:\n    store(sys.argv[1])\nexcept Exception as error:\n    print(error.code)"
    home = Path("/tmp") / f"hwr-other-{os.getpid()}"
    home.mkdir(mode=0o755)
    try:
        assert run(code, home, prefix=NOBODY).strip() == FailureCode.UNTRUSTED_PERMISSIONS
        assert run(code, home / "new", prefix=NOBODY).strip() == FailureCode.DOMAIN_UNAVAILABLE
        assert not left_in(home)
    finally:
        home.rmdir()
    assert artifact(domain).is_dir()
    assert hits(domain)
