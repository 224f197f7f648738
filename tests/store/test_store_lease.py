"""Leases: E1 (shared, read-only, two descriptors a file), E2 (never unmapped under a view), E3 (a forked child may not use one)."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from pathlib import Path

import numpy
import pytest
import torch
from store_artifacts import FULL, Given, Zeros, artifact, find, key_of, left_in, payload, put, run, running, until

from hwr import telemetry
from hwr.errors import ActiveLease, LeaseClosed, LeaseInherited, LeaseLost
from hwr.loader.restore import tensor_of
from hwr.outcomes import LockKind
from hwr.procfs.file_id import FileId
from hwr.procfs.locks import holders
from hwr.procfs.smaps import file_use, read_smaps
from hwr.store.domain import Domain
from hwr.store.lease import HostWeightLease, HostWeightLeaseCarrier
from hwr.telemetry import events as E
from hwr.units import MIB

BYTES = bytes(range(256)) * 40


def leased(domain: Domain, name: str = "a") -> HostWeightLease:
    lease = find(domain, name).lease
    assert lease is not None
    return lease


def tensor(lease: HostWeightLease, name: str) -> torch.Tensor:
    return tensor_of(lease, next(entry for entry in lease.tensors() if entry.name == name))


def maps(path: Path) -> list[str]:
    return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return sorted(found)


def locked(domain: Domain, name: str = "a") -> bool:
    held = holders(domain.layout.lock(LockKind.ARTIFACT, key_of(name)))
    assert isinstance(held, tuple)
    return bool(held)


def test_one_shared_read_only_mapping_a_file_and_nothing_left_afterwards(domain: Domain) -> None:
    """E1."""
    put(domain, tensors=[Given("a", BYTES), Given("b", BYTES)], file_bytes=1)
    before = descriptors()
    lease = leased(domain)
    files = sorted(artifact(domain).glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        assert maps(file) == ["r--s"]
        assert 1 <= descriptors().count(str(file)) <= 2
    assert locked(domain)
    lease.close()
    lease.close()
    assert not any(maps(file) for file in files)
    assert descriptors() == before
    assert not locked(domain)


_WRITES = """
import torch
from hwr.loader.restore import tensor_of
domain = store(sys.argv[1])
lease = find(domain).lease
value = tensor_of(lease, next(lease.tensors()))
print(value[0].item(), flush=True)
value.add_(1)
print("diverged", flush=True)
"""


def test_a_write_to_a_leased_tensor_faults_and_changes_nothing(stored: Domain) -> None:
    """E1: it dies of SIGSEGV where a private mapping would copy pages silently."""
    before = payload(stored).read_bytes()
    told = run(_WRITES, stored.root, status=-signal.SIGSEGV)
    assert len(told.splitlines()) == 1
    assert payload(stored).read_bytes() == before


def test_closing_under_a_live_tensor_is_refused_and_the_tensor_reads_on(stored: Domain) -> None:
    """E2."""
    lease = leased(stored)
    value = tensor(lease, "weight")
    with telemetry.record() as told, pytest.raises(ActiveLease, match="weight") as refused:
        lease.close()
    assert refused.value.retryable
    assert told.of(E.LeaseCloseRefused)[0].live_tensors == 1
    assert not lease.closed
    assert locked(stored)
    assert bytes(value.tolist()) == BYTES
    assert bytes(lease.view("bias")) == b"\1\2\3\4" * 3  # it is as it was
    del value
    lease.close()
    assert not maps(payload(stored))
    with pytest.raises(LeaseClosed):
        lease.view("weight")
    with pytest.raises(LeaseClosed):
        lease.regions()


HOLDS = {
    "part of a view": lambda lease: lease.view("weight")[3:9],
    "another view of it": lambda lease: memoryview(lease.view("weight")),
    "a cast": lambda lease: lease.view("weight").cast("i"),
    "numpy": lambda lease: numpy.frombuffer(lease.view("weight"), dtype=numpy.uint8),
    "a slice in torch": lambda lease: tensor(lease, "weight")[7:9],
    "a view in torch": lambda lease: tensor(lease, "weight").view(-1, 2).t(),
    "torch over a region": lambda lease: torch.frombuffer(lease.regions()[0][1], dtype=torch.uint8),
    "numpy over a region": lambda lease: numpy.frombuffer(lease.regions()[0][1], dtype=numpy.uint8),
    "a region": lambda lease: lease.regions()[0][1],
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("make", HOLDS.values(), ids=HOLDS.keys())
def test_whatever_is_made_of_a_view_keeps_the_mapping(stored: Domain, make: object) -> None:
    """E2: a lease that closed here would leave a segmentation fault behind."""
    lease = leased(stored)
    held = make(lease)  # type: ignore[operator]
    with pytest.raises(ActiveLease):
        lease.close()
    assert maps(payload(stored)) == ["r--s"]
    assert len(repr(held)) > 0
    del held
    lease.close()
    assert not maps(payload(stored))


def test_a_dropped_lease_goes_with_its_last_view(domain: Domain) -> None:
    """E2: of two files too; the shared lock goes with the last mapping, not with the first."""
    put(domain, tensors=[Given("a", BYTES), Given("b", BYTES)], file_bytes=1)
    first, second = sorted(artifact(domain).glob("*.safetensors"))
    lease = leased(domain)
    kept, other = tensor(lease, "b"), tensor(lease, "a")
    with telemetry.record() as told:
        del lease
        assert maps(first)
        assert locked(domain)
        del other
        assert not maps(first)
        assert maps(second)
        assert locked(domain)
        assert bytes(kept.tolist()) == BYTES
        assert not told.of(E.LeaseClosed)
        del kept
        assert not maps(second)
        assert not locked(domain)
        assert len(told.of(E.LeaseClosed)) == 1


def test_closing_tells_once(stored: Domain) -> None:
    with telemetry.record() as told:
        lease = leased(stored)
        lease.close()
        lease.close()
        del lease
        gc.collect()
    assert len(told.of(E.LeaseOpened)) == len(told.of(E.LeaseClosed)) == 1


def test_an_autograd_graph_keeps_views_alive_and_the_refusal_says_what_to_do(domain: Domain) -> None:
    put(domain, tensors=[Given("w", bytes(64), "F32", (4, 4))])
    lease = leased(domain)
    weight = torch.nn.Parameter(tensor(lease, "w"))
    output = (torch.ones(1, 4, requires_grad=True) @ weight).sum()
    del weight
    with pytest.raises(ActiveLease, match=r"autograd graphs: use torch.no_grad"):
        lease.close()
    del output
    lease.close()


def test_a_lease_and_its_carrier_stay_in_their_process(stored: Domain) -> None:
    lease = leased(stored)
    carrier = HostWeightLeaseCarrier(lease)
    for thing in (lease, carrier):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(thing)
    carrier.close()


def test_a_carrier_gives_its_lease_once_whoever_asks(stored: Domain) -> None:
    carrier = HostWeightLeaseCarrier(leased(stored))
    taken: list[object] = []
    barrier = threading.Barrier(8)

    def take() -> None:
        barrier.wait()
        try:
            taken.append(carrier.take())
        except LeaseClosed as error:
            taken.append(error.reason)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken.count("taken") == 7
    assert carrier.taken
    carrier.close()  # it has nothing any more
    (lease,) = (item for item in taken if isinstance(item, HostWeightLease))
    assert not lease.closed
    taken.clear()
    lease.close()


def test_an_untaken_carrier_closes_its_lease_and_may_be_refused(stored: Domain) -> None:
    lease = leased(stored)
    carrier = HostWeightLeaseCarrier(lease)
    view = lease.view("weight")
    with pytest.raises(ActiveLease):
        carrier.close()
    assert not carrier.taken
    del view
    carrier.close()
    assert lease.closed


def test_a_forked_child_is_refused_and_leaves_the_parent_s_lock_alone(stored: Domain) -> None:
    """E3, L2: the child uses, closes and drops what it inherited."""
    lease = leased(stored)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        told = ""
        try:
            lease.view("weight")
        except LeaseInherited as error:
            told = f"{error.details['creator_pid']}"
        lease.close()
        del lease
        os.write(write, told.encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 100).decode() == str(os.getpid())
    os.close(read)
    os.close(write)
    assert locked(stored)
    assert bytes(lease.view("weight")) == BYTES
    lease.close()


def test_threads_may_use_and_close_it_at_once(stored: Domain) -> None:
    """E2: whoever loses gets a typed refusal, nobody a fault."""
    for _ in range(30):
        lease = leased(stored)
        barrier = threading.Barrier(4)

        def read(lease: HostWeightLease = lease, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:  # anything else that is raised here fails the test, as an unhandled exception of a thread
                for _ in range(50):
                    assert lease.view("weight")[255] == 255
            except LeaseClosed:
                return

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()

        def closed(lease: HostWeightLease = lease) -> bool:
            try:
                lease.close()
            except ActiveLease:
                return False
            return True

        until(closed)
        for thread in threads:
            thread.join()


def test_a_file_that_shrinks_under_a_lease_is_noticed_when_asked(stored: Domain, as_root: None) -> None:
    lease = leased(stored)
    lease.recheck()
    os.truncate(payload(stored), 4096)
    with telemetry.record() as told, pytest.raises(LeaseLost, match="4096 bytes"):
        lease.recheck()
    assert told.of(E.LeaseLost)[0].cause == "size_changed"
    lease.close()


_READS = """
domain = store(sys.argv[1])
lease = find(domain).lease
total = sum(sum(bytes(data)) for _, data in lease.regions())
"""


def test_two_processes_pay_for_one_artifact_once(domain: Domain) -> None:
    """E1: the sum of PSS over its mappings is its size; no page of it is anybody's own."""
    put(domain, tensors=[Zeros("zeros", 24 * MIB), Given("tail", BYTES)])
    file = FileId.in_tables(payload(domain))
    assert isinstance(file, FileId)
    with running(_READS, domain.root) as one, running(_READS, domain.root) as two:
        uses = []
        for pid in (one.pid, two.pid):
            vmas = read_smaps(pid, wanted={file})
            assert isinstance(vmas, tuple)
            uses.append(file_use(vmas, file))
        assert [use.amounts.anonymous for use in uses] == [0, 0]
        assert all(use.amounts.rss == use.size for use in uses)
        size = payload(domain).stat().st_size
        assert 0.95 * size <= sum(use.amounts.pss or 0 for use in uses) <= 1.05 * size


def test_the_highest_level_that_was_checked_stands_on_the_lease(stored: Domain) -> None:
    found = find(stored, level=FULL)
    assert found.lease is not None
    assert found.lease.validation is FULL
    assert left_in(stored.layout.deny) == []
    found.lease.close()
