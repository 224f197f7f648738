"""Full checksum: V3 (a payload that is truncated meanwhile, a child that dies: typed, and we live)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from store_artifacts import FULL, META, Given, Zeros, find, hits, key_of, left_in, payload, put, run, until, when

from hwr import telemetry
from hwr.errors import ArtifactInvalid, ChecksumMismatch, StoreIoError
from hwr.outcomes import StoreStatus
from hwr.store.domain import Domain
from hwr.telemetry import events as E
from hwr.units import MIB


def children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return found


def maps(pid: int, path: Path) -> bool:
    try:
        return str(path) in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Interrupt(threading.Thread):
    """Stop the hashing child as soon as it has mapped the payload, do something, let it go on."""

    def __init__(self, path: Path, act: object) -> None:
        super().__init__()
        self.path, self.act = path, act

    def run(self) -> None:
        pid = until(lambda: next((pid for pid in children() if maps(pid, self.path)), None), "a hashing child")
        os.kill(pid, signal.SIGSTOP)
        self.act(pid)  # type: ignore[operator]
        with contextlib.suppress(ProcessLookupError):  # what was done may have ended it
            os.kill(pid, signal.SIGCONT)


def test_progress_ends_at_the_planned_bytes(stored: Domain) -> None:
    put(stored, "large", [Zeros("zeros", 300 * MIB)])
    with telemetry.record() as told:
        assert hits(stored, "large", FULL)
    (begun,), (ended,) = told.of(E.ChecksumBegun), told.of(E.ChecksumEnded)
    assert ended.bytes == begun.planned_bytes == payload(stored, "large").stat().st_size
    done = [event.done_bytes for event in told.of(E.ChecksumProgress)]
    assert done == sorted(done)


def test_a_payload_truncated_while_it_is_hashed_is_typed_and_denied(stored: Domain, as_root: None) -> None:
    """V3: the child dies of SIGBUS over its own mapping; this process goes on."""
    put(stored, "large", [Zeros("zeros", 256 * MIB)])
    path = payload(stored, "large")
    cut = Interrupt(path, lambda pid: os.truncate(path, 8192))
    cut.start()
    found = find(stored, "large", FULL)
    cut.join()
    assert isinstance(found.failure, ArtifactInvalid)
    assert found.failure.reason == "truncated_while_read"
    assert left_in(stored.layout.deny) == [f"{key_of('large')}.json"]
    put(stored, "large")
    assert hits(stored, "large", FULL)


@pytest.mark.parametrize("level", [META, FULL])
def test_a_payload_truncated_before_it_is_mapped_is_typed_and_denied(stored: Domain, as_root: None, level: object) -> None:
    """V3: between the size check and the mapping, ours or the child's."""
    kind = E.ChecksumBegun if level is FULL else E.ValidationEnded
    with when(kind, lambda _: os.truncate(payload(stored), 4096)):
        found = find(stored, level=level)  # type: ignore[arg-type]
    assert found.status is StoreStatus.INVALID
    assert isinstance(found.failure, ArtifactInvalid)
    assert found.failure.reason.startswith("truncated")
    assert len(left_in(stored.layout.deny)) == 1


def test_a_child_that_is_killed_says_nothing_about_the_artifact(stored: Domain) -> None:
    """V3: the memory killer, for one; nothing is denied, and the next start may succeed."""
    put(stored, "large", [Zeros("zeros", 256 * MIB)])
    kill = Interrupt(payload(stored, "large"), lambda pid: os.kill(pid, signal.SIGKILL))
    kill.start()
    found = find(stored, "large", FULL)
    kill.join()
    assert isinstance(found.failure, StoreIoError)
    assert "killed by signal 9" in found.failure.cause
    assert not left_in(stored.layout.deny)
    assert hits(stored, "large", FULL)


def test_an_interpreter_that_cannot_hash_says_nothing_about_the_artifact(stored: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    """V3: a child that ends before it reads its order, of more bytes than a pipe holds."""
    put(stored, "many", [Given(f"tensor {number:04}", bytes([number % 256])) for number in range(2000)])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = find(stored, "many", FULL)
    assert isinstance(found.failure, StoreIoError)
    assert found.failure.reason == "hasher_ended"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = find(stored, "many", FULL)
    assert isinstance(found.failure, StoreIoError)
    assert found.failure.reason == "no_process"
    assert not left_in(stored.layout.deny)


def test_fillers_and_headers_are_hashed_too(stored: Domain, as_root: None) -> None:
    """Every byte of a file belongs to a unit."""
    from store_artifacts import flip

    put(stored, "odd", [Given("a", bytes(4097)), Given("b", bytes(4097))])
    flip(payload(stored, "odd"), 4096 + 4097 + 3)
    assert hits(stored, "odd", META)
    found = find(stored, "odd", FULL)
    assert isinstance(found.failure, ChecksumMismatch)
    assert found.failure.reason == "header_or_filler"


_IGNORES_CHILDREN = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
domain = store(sys.argv[1])
put(domain)
print(hits(domain, level=FULL))
flip(payload(domain), -1)
print(find(domain, level=FULL).failure.code)
"""


def test_a_server_that_ignores_its_children_gets_the_same_answers(tmp_path: Path) -> None:
    """Then the kernel reaps them and no exit status can be asked for."""
    assert run(_IGNORES_CHILDREN, tmp_path / "root").split() == ["True", "checksum_mismatch"]


def test_nothing_of_the_hashing_process_stays(stored: Domain) -> None:
    before = set(children()), left_in(Path("/proc/self/fd"))
    assert hits(stored, level=FULL)
    assert (set(children()), left_in(Path("/proc/self/fd"))) == before
