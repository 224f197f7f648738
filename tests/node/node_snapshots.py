"""Snapshots made by hand: workers whose states real hubs folded, and every other part filled in."""

from __future__ import annotations

from typing import Any

from diag.analysis.stall import Verdict
from diag.node.snapshot import (
    Artifact,
    ArtifactUse,
    CgroupFacts,
    CollectorHealth,
    KernelFacts,
    LockFacts,
    LockParty,
    Mapper,
    MemoryFigure,
    NodeSnapshot,
    Pressure,
    ProcessFacts,
    RunDirectory,
    Store,
    ThreadFacts,
    Worker,
)
from hwr.outcomes import CollectorName, InventoryState, Liveness, LockKind, MemorySource, Role, Stall, View
from hwr.telemetry import events as E
from hwr.telemetry.hub import Hub

SECOND = 1_000_000_000
OFFSET_NS = 1_700_000_000 * SECOND
MIB = 1 << 20
DOMAIN = "d" * 64


def key(number: int) -> str:
    return f"{number:012x}" + "0" * 52


def hub(rank: int = 0, *, engine: str = "default", start_ns: int = 10, pid: int = 4000, run: str = "run") -> Hub:
    """Return a hub as a worker's process has one, without files."""
    res = {
        "service.name": "hwr",
        "service.version": "0.1.0",
        "process.pid": pid + rank,
        "process.start_ns": start_ns,
        "clock.realtime_offset_ns": OFFSET_NS,
        "hwr.run_id": run,
        "hwr.engine": engine,
        "hwr.rank": rank,
        "hwr.role": "worker",
        "versions": {"torch": "2.9.0"},
    }
    return Hub(res, realtime_offset_ns=OFFSET_NS)


def busy(one: Hub) -> Hub:
    """Let it say a bit of everything: a memory sample, an artifact, a stage that ended, a wait that goes on."""
    one.emit(E.WorkerStarted())
    one.emit(E.StageEnded(stage="lookup", seconds=1.0), op="s")
    sizes = {"rss_anon_bytes": 10 * MIB, "rss_file_bytes": 20 * MIB, "rss_shmem_bytes": 0, "pss_bytes": 15 * MIB}
    one.emit(E.MemorySampled(moment="after_map", source="status", cost_seconds=0.001, **sizes))
    told = {"moment": "after_map", "source": "smaps", "cost_seconds": 0.001}
    one.emit(E.ArtifactMemorySampled(key=key(1), mapped_bytes=100 * MIB, anonymous_bytes=0, **told))
    one.emit(E.AllocatorSampled(python_blocks=5, gc_collections=(7, 2, 1), in_use_bytes=MIB))
    one.emit(E.LeaseOpened(key=key(1), lease="l", bytes=100 * MIB, files=1, tensors=3, validation="full_checksum"))
    one.emit(E.CollectiveBegun(op="all_reduce", sequence=17, world_size=8), op="c")
    one.emit(E.LockWaiting(lock="build", file="f", exclusive=True, deadline_seconds=60.0), op="w")
    return one


def worker(one: Hub, *, at_ns: int, liveness: Liveness = Liveness.ALIVE, **more: Any) -> Worker:
    """Return the worker of a hub, with a process and memory read at `at_ns`."""
    res = one.res
    rank, pid = res["hwr.rank"], res["process.pid"]
    facts: dict[str, Any] = {
        "engine": res["hwr.engine"],
        "rank": rank,
        "role": Role.WORKER,
        "run_id": res["hwr.run_id"],
        "directory": f"/run/hwr/{res['hwr.run_id']}/r{rank}.{pid}.{res['process.start_ns']}",
        "ns_pid": pid,
        "pid": pid if liveness is Liveness.ALIVE else None,
        "uid": 1000,
        "start_ns": res["process.start_ns"],
        "liveness": liveness,
        "heartbeat_ns": at_ns,
        "state": one.snapshot(),
        "verdict": Verdict(),
    }
    if liveness is Liveness.ALIVE:
        source, rollup = MemorySource.STATUS, MemorySource.SMAPS_ROLLUP
        facts["process"] = ProcessFacts(
            pid=pid,
            state="S",
            sampled_ns=at_ns,
            name="python3",
            utime_s=1.5,
            majflt=3,
            threads=(ThreadFacts(tid=pid, name="python3", state="S", wchan="futex_wait"),),
        )
        facts["memory"] = {
            "rss_anon": MemoryFigure(bytes=30 * MIB, source=source, sampled_ns=at_ns),
            "pss": MemoryFigure(bytes=40 * MIB, source=rollup, sampled_ns=at_ns, cost_seconds=0.002),
        }
        facts["artifacts"] = (
            ArtifactUse(key=key(1), source=MemorySource.SMAPS, sampled_ns=at_ns, mapped_bytes=100 * MIB, anonymous_bytes=5),
        )
    return Worker(**{**facts, **more})


def snapshot(workers: tuple[Worker, ...], *, at_ns: int, artifacts: int = 3, view: View = View.AGENT) -> NodeSnapshot:
    """Return a snapshot in which no part is empty."""
    first = workers[0].name if workers else None
    return NodeSnapshot(
        view=view,
        taken_ns=at_ns,
        realtime_offset_ns=OFFSET_NS,
        host="node",
        boot_id="b",
        kernel_release="6.1",
        program_version="0.1.0",
        pid=77,
        started_ns=at_ns - 5 * SECOND,
        run_directories=(RunDirectory(path="/run/hwr", readable=True, runs=2, workers=len(workers), strangers=1),),
        workers=workers,
        artifacts=tuple(
            Artifact(
                key=key(number),
                domain=DOMAIN,
                state=InventoryState.READY,
                bytes=(number + 1) * MIB,
                files=2,
                page_cache_bytes=number * 4096,
                page_cache_source=MemorySource.CACHESTAT,
                page_cache_ns=at_ns,
                mappers=(Mapper(pid=4000, how="lease", worker=first), Mapper(pid=9, how="mapping", orphan=True)) if number == 1 else (),
            )
            for number in range(artifacts)
        ),
        stores=(
            Store(
                domain=DOMAIN,
                root="/store",
                reporting=True,
                sampled_ns=at_ns,
                fstype="ext4",
                entries={InventoryState.READY: artifacts, InventoryState.DENIED: 0},
                bytes={InventoryState.READY: artifacts * MIB},
                free_bytes=1 << 40,
                free_inodes=1 << 20,
            ),
            Store(domain="e" * 64, root="/elsewhere", reporting=False),
        ),
        locks=(
            LockFacts(
                kind=LockKind.BUILD,
                file="build.lock",
                domain=DOMAIN,
                key=key(1),
                holders=(LockParty(pid=4000, exclusive=True, state="T", worker=first),),
                waiters=(LockParty(pid=4001, exclusive=True, since_ns=at_ns - SECOND),),
            ),
        ),
        kernel=KernelFacts(
            sampled_ns=at_ns,
            pinned_bytes=MIB,
            memory={"total": 1 << 36, "free": 1 << 35},
            vmstat={"compact_stall": 3},
            pressure={"memory": {"some": Pressure(total_seconds=1.5, avg10=0.25), "full": Pressure(total_seconds=0.5)}},
        ),
        cgroups=(CgroupFacts(path="/a/b", version=2, sampled_ns=at_ns, usage_bytes=MIB, workers=(first,) if first else ()),),
        collectors=tuple(
            CollectorHealth(
                name=name, target=target, ok=name is not CollectorName.STORE or not target, sampled_ns=at_ns - index, seconds=0.01 * index
            )
            for index, (name, target) in enumerate((*((name, "") for name in CollectorName), (CollectorName.STORE, "/dead")))
        ),
        unreadable=("memory: smaps of uid 0: needs CAP_SYS_PTRACE",),
    )


STOPPED = Verdict(stall=Stall.STOPPED, evidence=("the kernel says T",), since_ns=5, blames=("default/0",), runbook="stall.md#stopped")
