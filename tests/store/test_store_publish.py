"""Publishing: P1 (the order that makes it durable), P2 (killed at any step, never a wrong hit), P3 (two builders of one key)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from store_artifacts import (
    FULL,
    META,
    SMALL,
    Given,
    Zeros,
    artifact,
    environment,
    find,
    hits,
    identity,
    key_of,
    left_in,
    payload,
    put,
    running,
    store,
    until,
    when,
)

from hwr import telemetry
from hwr.errors import IdentityCollision, SourceChanged
from hwr.outcomes import LockKind, PublicationOutcome, PublicationStage, StoreStatus
from hwr.procfs.stat import read_stat
from hwr.store.domain import Domain
from hwr.store.publish import publish
from hwr.telemetry import events as E
from hwr.units import MIB


def test_a_publication_is_read_only_and_belongs_to_its_key(domain: Domain) -> None:
    done = put(domain)
    path = artifact(domain)
    assert left_in(path) == ["READY.json", "manifest.json", "model-00001-of-00001.safetensors"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o555
    for entry in path.iterdir():
        assert stat.S_IMODE(entry.stat().st_mode) == 0o444
        assert entry.stat().st_nlink == 1
    assert not left_in(domain.layout.temporary)
    found = find(domain, level=FULL)
    assert found.lease is not None
    assert found.lease.manifest.content_digest == done.content_digest
    found.lease.close()
    assert publish(domain, identity(), SMALL).outcome is PublicationOutcome.ALREADY_PRESENT


def test_the_mode_of_files_is_ours_and_not_the_umask_s(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        domain = store(tmp_path / "root")
        put(domain)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in artifact(domain).iterdir()} == {0o444}


def test_what_makes_it_durable_comes_in_this_order(tmp_path: Path) -> None:
    """P1, as the kernel saw it: every file written and flushed before its directory, one rename, then both parents."""
    trace = tmp_path / "trace"
    code = "import sys\nfrom store_artifacts import *\nput(store(sys.argv[1]), tensors=[Zeros('zeros', 1 << 20)])"
    calls = "trace=pwrite64,write,fallocate,fsync,rename,chmod,fchmod,openat"
    command = ["strace", "-f", "-y", "-e", calls, "-o", str(trace), sys.executable, "-c", code, str(tmp_path / "root")]
    if shutil.which("strace") is None or subprocess.run(["strace", "-o", "/dev/null", "true"], check=False).returncode:
        pytest.skip("strace cannot trace here")
    subprocess.run(command, env=environment(), cwd="/", check=True, timeout=120)
    lines = completed(trace.read_text())
    assert not [line for line in lines if "O_WRONLY" in line and "/artifacts/" in line]  # nothing is written where it is visible

    def first(pattern: str, after: int = -1) -> int:
        return next(at for at, line in enumerate(lines) if at > after and re.search(pattern, line))

    def last(pattern: str) -> int:
        return max(at for at, line in enumerate(lines) if re.search(pattern, line))

    staging, final = rf"/tmp/{key_of()}\.\d+\.[0-9a-f]+", rf"/artifacts/{key_of()}"
    rename = first(rf'rename\(".*{staging}", ".*{final}"\)')
    ready = first(rf"fsync\(\d+<.*{staging}/READY.json>\)")
    previous = -1
    for name in (r"model-00001-of-00001\.safetensors", r"manifest\.json", r"READY\.json"):
        wrote, hardened = last(rf"write(64)?\(\d+<.*{staging}/{name}>"), first(rf"fchmod\(\d+<.*{staging}/{name}>, 0444\)")
        flushed = first(rf"fsync\(\d+<.*{staging}/{name}>\)")
        assert previous < wrote < hardened < flushed <= ready, name
        previous = flushed
    assert first(r"fallocate\(\d+<.*safetensors>") < first(r"pwrite64\(\d+<.*safetensors>")
    directory = first(rf"fsync\(\d+<.*{staging}>\)", ready)
    assert ready < directory < rename
    hardened = first(rf'chmod\(".*{final}", 0555\)', rename)
    own = first(rf"fsync\(\d+<.*{final}>\)", hardened)
    assert first(r"fsync\(\d+<.*/root/tmp>\)", own) > own
    assert first(r"fsync\(\d+<.*/root/artifacts>\)", own) > own


def completed(trace: str) -> list[str]:
    """One line a system call, at its end: strace cuts one in two where another thread's came between."""
    begun: dict[str, str] = {}
    lines = []
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>").rstrip()
        elif " resumed>" in call:
            lines.append(begun.pop(thread, "") + call.partition(" resumed>")[2])
        else:
            lines.append(call)
    return lines


_STOPS = """
import os, signal
from hwr.telemetry import events as E
step, name = int(sys.argv[2]), sys.argv[3]
seen = 0
def listen(event, record):
    global seen
    if isinstance(event, E.PublicationStageBegun if step > 0 else E.PublicationEnded):
        seen += 1
        if seen == abs(step):
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
with telemetry.process.recording_hub() as hub:
    hub.listen(listen)
    put(store(sys.argv[1]), name)
print("published", flush=True)
"""


def stages_of_a_publication(root: Path) -> list[PublicationStage]:
    with telemetry.record() as told:
        put(store(root))
    return [event.stage for event in told.of(E.PublicationStageBegun)]


def test_a_builder_killed_at_any_step_leaves_a_hit_or_a_rebuild(tmp_path: Path) -> None:
    """P2: SIGKILL at the begin of each stage; never a wrong hit, and the next builder cleans up."""
    steps = stages_of_a_publication(tmp_path / "count")
    assert set(steps) == set(PublicationStage)
    domain = store(tmp_path / "root")
    put(domain, "other")
    for number, stage in enumerate(steps, 1):
        name = f"killed at {number}"
        with running(_STOPS, domain.root, number, name) as child:
            until(lambda child=child: state(child.pid) == "T", "the child stops")
            child.kill()
            assert child.wait() == -signal.SIGKILL
        found = find(domain, name, FULL)
        assert found.status is StoreStatus.MISS, (stage, found)  # the last step begins before the commit
        assert left_in(domain.layout.temporary) or stage is PublicationStage.COMMIT
        with telemetry.record() as told:
            put(domain, name)
        assert stage is PublicationStage.COMMIT or len(told.of(E.LeftoversRemoved)) == 1
        assert not left_in(domain.layout.temporary)
        assert hits(domain, name, FULL)
        assert hits(domain, "other", FULL)


def test_a_builder_killed_after_the_commit_leaves_a_hit(domain: Domain) -> None:
    """P2."""
    with running(_STOPS, domain.root, -1, "a") as child:
        until(lambda: state(child.pid) == "T", "the child stops")
        child.kill()
        child.wait()
    assert hits(domain, level=FULL)
    assert publish(domain, identity(), SMALL).outcome is PublicationOutcome.ALREADY_PRESENT


def state(pid: int) -> str | None:
    told = read_stat(pid)
    return getattr(told, "state", None)


_BUILDS = """
print("ready", flush=True)
sys.stdin.readline()
done = publish(store(sys.argv[1]), identity("shared"), [Zeros("zeros", 64 << 20)])
print(done.outcome, done.content_digest, flush=True)
"""


def test_of_two_builders_of_one_key_one_builds_and_one_joins(tmp_path: Path) -> None:
    """P3, two processes. The first is held up by a lock on its way until the second waits for it."""
    domain = store(tmp_path / "root")
    with running(_STOPS, domain.root, 4, "shared") as first:
        until(lambda: state(first.pid) == "T", "the builder stops")
        with running(_BUILDS, domain.root) as second:
            assert second.stdin is not None
            assert second.stdout is not None
            second.stdin.write("go\n")
            second.stdin.flush()
            until(lambda: str(domain.layout.lock(LockKind.BUILD, key_of("shared"))) in open_files(second.pid), "the second one waits")
            os.kill(first.pid, signal.SIGCONT)
            outcome, content = second.stdout.readline().split()
        assert first.stdout is not None
        assert first.stdout.readline() == "published\n"
    assert outcome == PublicationOutcome.JOINED
    found = find(domain, "shared", FULL)
    assert found.lease is not None
    assert found.lease.manifest.content_digest == content
    found.lease.close()


def open_files(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return found


def copy_in(domain: Domain, source: Path, name: str = "a") -> None:
    """Put a tree into `artifacts/` as somebody who does not take the build lock."""
    shutil.copytree(source, artifact(domain, name))
    artifact(domain, name).chmod(0o555)


def is_rename(event: E.PublicationStageBegun) -> bool:
    return event.stage is PublicationStage.RENAME


def test_a_competitor_without_our_lock_and_with_the_same_content_is_joined(tmp_path: Path, domain: Domain) -> None:
    other = store(tmp_path / "other")
    put(other)
    with when(E.PublicationStageBegun, lambda _: copy_in(domain, artifact(other)), is_rename):
        done = publish(domain, identity(), SMALL)
    assert done.outcome is PublicationOutcome.JOINED
    assert not left_in(domain.layout.temporary)
    assert not left_in(domain.layout.quarantine)
    assert hits(domain, level=FULL)


def test_a_competitor_with_other_content_is_a_collision_and_ours_is_set_aside(tmp_path: Path, domain: Domain) -> None:
    other = store(tmp_path / "other")
    put(other, tensors=[Given("weight", b"other")])
    with when(E.PublicationStageBegun, lambda _: copy_in(domain, artifact(other)), is_rename):
        done = publish(domain, identity(), SMALL)
    assert isinstance(done.failure, IdentityCollision)
    assert not done.failure.retryable
    (name,) = left_in(domain.layout.quarantine)
    assert name.startswith(f"{key_of()}.identity-collision.")
    assert hits(domain, level=FULL)
    assert not left_in(domain.layout.temporary)


def test_a_source_that_changed_meanwhile_publishes_nothing(domain: Domain) -> None:
    def changed() -> None:
        raise SourceChanged(reason="facts", file="model.safetensors")

    done = publish(domain, identity(), SMALL, unchanged=changed)
    assert isinstance(done.failure, SourceChanged)
    assert find(domain).status is StoreStatus.MISS
    assert not left_in(domain.layout.temporary)


def test_an_interrupt_cleans_up_and_travels_on(domain: Domain) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(domain, identity(), SMALL, unchanged=interrupted)
    assert not left_in(domain.layout.temporary)
    put(domain)


def test_progress_reaches_the_planned_bytes(domain: Domain) -> None:
    with telemetry.record() as told:
        done = put(domain, tensors=[Zeros("a", 80 * MIB), Zeros("b", 80 * MIB)], file_bytes=80 * MIB)
    last = told.of(E.PublicationProgress)[-1]
    assert last.done_bytes == last.planned_bytes == done.payload_bytes
    assert told.of(E.PublicationEnded)[0].bytes == done.payload_bytes


def test_a_readers_lock_file_is_there_before_any_reader(domain: Domain) -> None:
    """A store that becomes read-only after its publication must still be locked by readers."""
    put(domain)
    assert domain.layout.lock(LockKind.ARTIFACT, key_of()).is_file()


def test_a_tree_renamed_and_not_hardened_is_a_miss_and_is_rebuilt(stored: Domain) -> None:
    """P2: between rename and commit; and the lookup denies nothing."""
    artifact(stored).chmod(0o700)
    for level in (META, FULL):
        assert find(stored, level=level).status is StoreStatus.MISS
    assert not left_in(stored.layout.deny)
    put(stored)
    assert hits(stored, level=FULL)
    assert len(left_in(stored.layout.quarantine)) == 1


def test_a_link_in_the_place_of_an_artifact_is_set_aside(tmp_path: Path, stored: Domain) -> None:
    elsewhere = tmp_path / "elsewhere"
    os.rename(artifact(stored), elsewhere)
    artifact(stored).symlink_to(elsewhere)
    found = find(stored)
    assert found.status is StoreStatus.INVALID
    assert left_in(stored.layout.deny) == [f"{key_of()}.json"]  # K2
    put(stored)
    assert hits(stored, level=FULL)
    assert not left_in(stored.layout.deny)
    assert payload(stored).is_file()


def test_leftovers_of_another_key_are_not_ours_to_remove(domain: Domain) -> None:
    mine, other = domain.layout.new_temporary(key_of()), domain.layout.new_temporary(key_of("other"))
    for path in (mine, other):
        path.mkdir(mode=0o700)
        (path / "model.safetensors").write_bytes(b"half")
        (path / "model.safetensors").chmod(0o444)
    (domain.layout.temporary / f"{key_of()}.1.{'0' * 32}").symlink_to(other)
    put(domain)
    assert left_in(domain.layout.temporary) == sorted([other.name, f"{key_of()}.1.{'0' * 32}"])
    assert left_in(other) == ["model.safetensors"]
