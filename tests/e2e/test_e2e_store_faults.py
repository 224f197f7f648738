"""Stores that fail: in preferred they never prevent a load that stock loading could do; in required the failure has a name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_processes import NOBODY, Done, Forge, Programs, Running
from e2e_stores import Store

from hwr.procfs.status import read_status

pytestmark = pytest.mark.usefixtures("as_root")

# Takes a lock as another start would and stops there, as a process under a debugger or in a frozen cgroup.
STOPPED_HOLDER = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
ONE_SECOND = ("--hwr-coordination-timeout-seconds", "1")


def holder_of(programs: Programs, path: Path) -> Running:
    running = programs.start_python(STOPPED_HOLDER, path)
    assert running.line() == "held\n"
    while (told := read_status(running.process.pid)) and told.state != "T":
        os.sched_yield()
    return running


def read_only(root: Path) -> str:
    return f"mount('--bind', {str(root)!r}, {str(root)!r}); mount('-o', 'remount,bind,ro', {str(root)!r})"


def tmpfs(mount: Path, options: str) -> str:
    mount.mkdir()
    return f"mount('-t', 'tmpfs', '-o', 'mode=0700,{options}', 'tmpfs', {str(mount)!r})"


def codes(done: Done) -> list[str]:
    return [attempt["failure"]["code"] for attempt in done.report["attempts"] if attempt["failure"]]


# locks -----------------------------------------------------------------------------------------------------------


def test_a_stopped_holder_of_the_domain_lock(
    forge: Forge, programs: Programs, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    store = copied(tiny_published)
    holder = holder_of(programs, store.root / "locks" / "domain-init.lock")
    arguments = ("--root", store.root, "--quiet", "--json", *ONE_SECOND)
    preferred = forge.hwr("run", tiny, "--mode", "preferred", *arguments)
    assert preferred.rc == 0, preferred.err
    assert preferred.report["outcome"] == "canonical_fallback"
    assert preferred.report["publication"] is None
    assert codes(preferred) == ["domain_unavailable"]
    assert [attempt["result"] for attempt in preferred.report["attempts"]] == ["timeout", "success"]
    required = forge.hwr("run", tiny, "--mode", "required", *arguments)
    assert required.rc == 4
    cause, way_out = required.lines()
    # Whom to look at, and in which state it is.
    assert f"pid {holder.process.pid} (state T)" in cause
    assert "stopped" in way_out
    assert required.journal.failures() == ["domain_unavailable"]
    (wait,) = required.journal.of("hwr.store.lock.begin")
    assert (wait["lock"], wait["holder_pid"], wait["holder_state"]) == ("domain_init", holder.process.pid, "T")
    assert required.state.lock_wait_seconds["domain_init"] > 0.9  # the deadline began a little earlier
    # The owner and its file were left alone; once it is gone, a start is warm.
    assert store.names("locks") == Store(tiny_published.root).names("locks")
    holder.stop(signal.SIGKILL)
    again = forge.hwr("run", tiny, "--mode", "required", *arguments)
    assert again.report["outcome"] == "local_hit"


def test_a_stopped_builder(forge: Forge, programs: Programs, tiny: Path, tiny_published: Store, tmp_path: Path) -> None:
    """The build lock of the key is held: the model is served, and why it was not published is told."""
    store = Store(tmp_path / "store")
    assert forge.hwr("publish", tiny, "--root", store.root, "--dtype", "float16", "--quiet").rc == 0
    holder = holder_of(programs, store.root / "locks" / f"{tiny_published.key}.build.lock")
    preferred = forge.hwr("run", tiny, "--mode", "preferred", "--root", store.root, "--json", "--quiet", *ONE_SECOND)
    assert preferred.rc == 0, preferred.err
    assert preferred.report["outcome"] == "canonical_fallback"
    assert preferred.report["publication"] == "failed"
    assert preferred.report["publication_failure"]["code"] == "active_build_timeout"
    assert str(holder.process.pid) in preferred.report["publication_failure"]["message"]
    assert preferred.state.publications == {}
    publish = forge.hwr("publish", tiny, "--root", store.root, "--quiet", *ONE_SECOND)
    assert (publish.rc, len(publish.lines()), publish.journal.failures()) == (4, 2, ["active_build_timeout"])
    assert store.temporary == []
    store.remove()


# filesystems -----------------------------------------------------------------------------------------------------


def test_a_read_only_store_serves_and_does_not_build(
    forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    store = copied(tiny_published)
    prepare = read_only(store.root)
    warm = forge.hwr("run", tiny, "--mode", "required", "--root", store.root, "--json", "--quiet", prepare=prepare)
    assert warm.rc == 0, warm.err
    assert warm.report["outcome"] == "local_hit"
    (opened,) = warm.journal.of("hwr.store.domain.end")
    assert opened["writable"] is False
    cold = forge.hwr("run", tiny, "--dtype", "float16", "--mode", "preferred", "--root", store.root, "--json", "--quiet", prepare=prepare)
    assert cold.rc == 0, cold.err
    assert cold.report["outcome"] == "canonical_fallback"
    assert cold.report["publication"] == "failed"
    assert cold.report["publication_failure"]["code"] == "read_only_store"
    assert "publication failure" not in cold.err


def test_corruption_in_a_read_only_store_is_still_refused(
    forge: Forge, tiny: Path, tiny_published: Store, copied: Callable[[Store], Store]
) -> None:
    """The deny marker cannot be written; what is wrong is not served for that."""
    store = copied(tiny_published)
    store.flip("model.layers.0.mlp.up_proj.weight")
    arguments = ("--root", store.root, "--validation", "full_checksum", "--quiet")
    prepare = read_only(store.root)
    required = forge.hwr("run", tiny, "--mode", "required", *arguments, prepare=prepare)
    assert (required.rc, len(required.lines()), required.journal.failures()) == (1, 2, ["checksum_mismatch"])
    (denied,) = required.journal.of("hwr.store.deny.write")
    assert denied["containment"].startswith("failed")
    preferred = forge.hwr("run", tiny, "--mode", "preferred", "--json", *arguments, prepare=prepare)
    assert preferred.rc == 0, preferred.err
    assert preferred.report["outcome"] == "canonical_fallback"
    assert codes(preferred) == ["checksum_mismatch"]
    assert preferred.report["publication_failure"]["code"] == "read_only_store"


@pytest.mark.parametrize(
    ("size", "code"),
    [
        ("size=250k,nr_inodes=200", "insufficient_capacity"),
        ("size=4m,nr_inodes=14", "no_inodes"),
        ("size=4m,nr_inodes=5", "no_inodes"),
    ],
    ids=["bytes", "inodes", "no inode for the store itself"],
)
def test_a_full_filesystem(forge: Forge, tiny: Path, tmp_path: Path, size: str, code: str) -> None:
    mount = tmp_path / "mount"
    prepare = tmpfs(mount, size)
    arguments = ("--root", mount / "store", "--host-weight-runtime-min-free-gib", "0", "--quiet")
    preferred = forge.hwr("run", tiny, "--mode", "preferred", "--json", *arguments, prepare=prepare)
    assert preferred.rc == 0, preferred.err
    assert preferred.report["outcome"] == "canonical_fallback"
    failure = preferred.report["publication_failure"] or preferred.report["attempts"][0]["failure"]
    assert failure["code"] == code
    assert preferred.journal.failures() == [code]


def test_a_disk_that_fills_up_while_it_is_written(forge: Forge, tiny: Path, tmp_path: Path) -> None:
    """The check before saw space that another writer then took."""
    mount = tmp_path / "mount"
    prepare = tmpfs(mount, "size=1m")
    done = forge.python(FILLING, tiny, mount, prepare=prepare)
    assert done.rc == 0, done.err
    assert done.report["outcome"] == "canonical_fallback"
    assert done.report["publication_failure"]["code"] == "enospc"
    assert done.report["left"] == []
    assert done.report["artifacts"] == []
    assert done.journal.failures() == ["enospc"]


FILLING = """
import json, os, sys
import hwr
from hwr import telemetry
from hwr.loader.factory import PretrainedFactory
from hwr.telemetry.events import PublicationStageBegun
from hwr.telemetry.process import current_hub
model, mount = sys.argv[1:3]
telemetry.configure()

def fill(event, record):
    if isinstance(event, PublicationStageBegun) and event.stage == "allocate":
        with open(f"{mount}/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

current_hub().listen(fill)
options = hwr.Options.of(
    host_weight_runtime_mode="preferred", host_weight_runtime_root=f"{mount}/store", host_weight_runtime_min_free_gib=0
)
with hwr.load(PretrainedFactory(model), model, options) as loaded:
    told = loaded.report.to_json()
told |= {"left": os.listdir(f"{mount}/store/tmp"), "artifacts": os.listdir(f"{mount}/store/artifacts")}
print(json.dumps(told))
"""


# users and limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "mode", "rc", "code"),
    [
        ("closed/store", "preferred", 0, "domain_unavailable"),
        ("closed/store", "required", 1, "domain_unavailable"),
        ("of-root", "preferred", 1, "untrusted_permissions"),
        ("of-root", "required", 1, "untrusted_permissions"),
    ],
)
def test_a_root_that_this_user_may_not_use(forge: Forge, open_place: Path, where: str, mode: str, rc: int, code: str) -> None:
    (open_place / "closed").mkdir(mode=0o700)
    (open_place / "of-root").mkdir(mode=0o755)
    arguments = ("run", open_place / "model", "--mode", mode, "--root", open_place / where, "--quiet", "--json")
    done = forge.hwr(*arguments, prepare=NOBODY, run_dir=open_place / "run")
    assert done.rc == rc, done.err
    assert done.journal.failures() == [code]
    if rc == 0:
        assert done.report["outcome"] == "canonical_fallback"
    else:
        assert len(done.lines()) == 2


def test_a_user_without_privileges_is_cold_then_warm_then_heals(forge: Forge, open_place: Path) -> None:
    """Hardened directories are not writable for anybody but root: publication, quarantine and republication work all the same."""
    (open_place / "mine").mkdir(mode=0o700)
    os.chown(open_place / "mine", 65534, 65534)
    store = Store(open_place / "mine" / "store")
    outcomes = []
    for step in range(3):
        if step == 2:
            store.flip("model.layers.0.mlp.up_proj.weight")
        arguments = ("run", open_place / "model", "--mode", "preferred", "--root", store.root, "--validation", "full_checksum")
        done = forge.hwr(*arguments, "--quiet", "--json", prepare=NOBODY, run_dir=open_place / "run")
        assert done.rc == 0, done.err
        outcomes.append((done.report["outcome"], done.report["publication"]))
    assert outcomes == [("canonical_fallback", "published"), ("local_hit", None), ("canonical_fallback", "published")]
    assert len(store.quarantined) == 1
    assert store.denied == store.temporary == []


def test_few_descriptors_never_prevent_a_load(forge: Forge, tiny: Path, tiny_published: Store) -> None:
    """Whatever number of files stock loading can live with, preferred can: it hits, or it falls back and says why."""
    seen = set()
    for files in range(2, 14):
        stock = forge.hwr("run", tiny, "--json", "--quiet", files=files)
        if stock.rc != 0:
            continue
        arguments = ("--mode", "preferred", "--root", tiny_published.root, "--validation", "full_checksum", "--json", "--quiet")
        done = forge.hwr("run", tiny, *arguments, files=files)
        assert done.rc == 0, (files, done.err)
        assert done.report["output_sha256"] == stock.report["output_sha256"]
        seen.add(done.report["outcome"])
        if done.report["outcome"] != "local_hit":
            assert codes(done), files
    assert seen == {"canonical_fallback", "local_hit"}


def test_a_run_directory_that_cannot_be_written_costs_the_journal_only(
    forge: Forge, tiny: Path, tiny_published: Store, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = forge.hwr(
        "run", tiny, "--mode", "required", "--root", tiny_published.root, "--json", "--quiet", env={"HWR_RUN_DIR": str(tmp_path / "file")}
    )
    assert done.rc == 0, done.err
    assert done.report["outcome"] == "local_hit"
    assert done.report["journal"] is None
    (warning,) = done.lines()
    assert warning.startswith("hwr: no journal is written: ")


def test_the_helpers_namespace_is_private(forge: Forge, tmp_path: Path) -> None:
    """What these tests mount is seen by nobody else."""
    prepare = tmpfs(tmp_path / "mount", "size=1m")
    done = forge.python("import sys; open(sys.argv[1], 'w')", tmp_path / "mount" / "inside", prepare=prepare)
    assert done.rc == 0, done.err
    assert list((tmp_path / "mount").iterdir()) == []
