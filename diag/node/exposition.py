"""From a snapshot to an exposition: text and OpenMetrics.

Owns the figures of the node's metrics, and what a worker looks like to whoever watches from outside: memory is the watcher's newer reading,
a dead process has no gauges of what it held, and has still counted what it had counted. Promises no duplicate series (N2), label values
that are bounded, no figure that is stale without its time, and sums that go on where the last agent's ended. Refuses to look at anything,
and the global registry.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from diag.node.run_listing import ABSENT
from diag.node.snapshot import Artifact, NodeSnapshot, RunDirectory, Store, Worker
from hwr.outcomes import CollectorName, Liveness, Role
from hwr.telemetry import HwrCollector
from hwr.telemetry.catalogue import Observed, Values
from hwr.telemetry.collector import TOP_ARTIFACTS
from hwr.telemetry.node_metrics import MEMORY_KINDS, OTHER, PRESSURE_KINDS, RESOURCES, TOP_DOMAINS
from hwr.telemetry.state import WorkerState
from hwr.units import short_key

_KEY: Final = re.compile(r"[0-9a-f]{12,128}")
_SHOWN_ROLES: Final = frozenset({Role.WORKER, Role.TOOL})
_UP: Final[dict[Liveness, bool]] = {Liveness.ALIVE: True, Liveness.EXITED: False, Liveness.DEAD: False}
_NONE: Final = "none"


class Exposition:
    """Renders snapshots; keeps the sums over workers, which `base` (the last agent's `totals()`) begins."""

    def __init__(self, base: Mapping[str, float] | None = None) -> None:
        self._workers: Sequence[Observed] = ()
        self._figures: dict[str, Values] = {}
        self._collector = HwrCollector(lambda: self._workers, lambda: self._figures, base)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        self._lock = threading.Lock()

    def render(self, snapshot: NodeSnapshot, accept: str) -> tuple[bytes, str]:
        """Return the exposition in the format that a client accepts, and its content type."""
        encoder, content_type = _encoder(accept)
        workers, made = observed(snapshot), figures(snapshot)
        with self._lock:
            self._workers, self._figures = workers, made
            return encoder(self._registry), content_type

    def totals(self) -> dict[str, float]:
        """Return what the sums over workers consist of, as of the last rendering."""
        return self._collector.totals()


def _encoder(accept: str) -> tuple[Any, str]:
    try:
        return choose_encoder(accept)
    except Exception:  # noqa: BLE001 - the library parses versions that a client made up, and raises what it likes
        return choose_encoder("")


def observed(snapshot: NodeSnapshot) -> list[Observed]:
    """Return the workers that have series, and those that only count in the sums."""
    return [
        Observed(
            state=_seen_from_outside(worker) if worker.shown else worker.state,
            up=_UP.get(worker.liveness),
            heartbeat_ns=worker.heartbeat_ns,
            engine=worker.engine,
            stall=worker.verdict.stall.value,
            shown=worker.shown,
        )
        for worker in snapshot.workers
        if worker.role in _SHOWN_ROLES
    ]


def _seen_from_outside(worker: Worker) -> WorkerState:
    """Return the worker's state with the watcher's memory figures; what a journal shares is never changed."""
    if _UP.get(worker.liveness) is False:
        return _of_the_dead(worker.state)
    if not worker.memory and not worker.artifacts:
        return worker.state
    state = worker.state
    memory, times, artifacts = dict(state.memory), dict(state.memory_sample_ns), dict(state.artifacts)
    for name, figure in worker.memory.items():
        source = figure.source.value
        if figure.sampled_ns >= state.memory_sample_ns.get(source, 0):
            memory[f"{name}_bytes"] = figure.bytes
            times[source] = max(times.get(source, 0), figure.sampled_ns)
    for use in worker.artifacts:
        told = {
            "mapped_bytes": use.mapped_bytes,
            "rss_bytes": use.rss_bytes,
            "pss_bytes": use.pss_bytes,
            "anonymous_bytes": use.anonymous_bytes,
        }
        artifacts[use.key] = {**artifacts.get(use.key, {}), **{name: size for name, size in told.items() if size is not None}}
        times[use.source.value] = max(times.get(use.source.value, 0), use.sampled_ns)
    return replace(state, memory=memory, memory_sample_ns=times, artifacts=artifacts)


def _of_the_dead(state: WorkerState) -> WorkerState:
    """Return what is left of a process: its counters and its last word. It holds, waits for and has registered nothing any more."""
    collections = state.allocator.get("gc_collections")
    return replace(
        state,
        base_phase=state.phase().value,
        ops={},
        leases={},
        registered_bytes=None,
        memory={},
        memory_sample_ns={},
        artifacts={},
        allocator={} if collections is None else {"gc_collections": collections},
        collectives={name: {**entry, "begun_ns": None} for name, entry in state.collectives.items()},
    )


def figures(snapshot: NodeSnapshot) -> dict[str, Values]:
    """Return the figures of the node's metrics, by metric."""
    return {**_of_the_agent(snapshot), **_of_the_kernel(snapshot), **_of_stores(snapshot.stores), **_of_artifacts(snapshot.artifacts)}


def _of_the_agent(snapshot: NodeSnapshot) -> dict[str, Values]:
    directories = snapshot.run_directories
    liveness: dict[str, float] = {each.value: 0.0 for each in Liveness}
    for worker in snapshot.workers:
        if worker.role in _SHOWN_ROLES:
            liveness[worker.liveness.value] += 1
    success: dict[str, float] = {}
    seconds: dict[str, float] = {}
    sampled: dict[str, float] = {}
    for collector in snapshot.collectors:
        name = collector.name.value
        success[name] = min(success.get(name, 1.0), float(collector.ok))
        if collector.seconds is not None:
            seconds[name] = max(seconds.get(name, 0.0), collector.seconds)
        if collector.sampled_ns is not None:
            at = snapshot.wall_ns(collector.sampled_ns) / 1e9
            sampled[name] = min(sampled.get(name, at), at)
    for collector in snapshot.collectors:
        if collector.sampled_ns is None:  # one of the name never brought anything: no time holds for all
            sampled.pop(collector.name.value, None)
    return {
        "hwr_runs_discovered": {"": float(sum(directory.runs for directory in directories))},
        "hwr_run_dir_readable": {"": float(_readable(directories))} if directories else {},
        "hwr_workers": liveness,
        "hwr_agent_start_timestamp_seconds": {"": snapshot.wall_ns(snapshot.started_ns) / 1e9} if snapshot.started_ns else {},
        "hwr_snapshot_timestamp_seconds": {"": snapshot.wall_ns(snapshot.taken_ns) / 1e9},
        "hwr_unreadable": _unreadable(snapshot.unreadable),
        "hwr_collector_success": success,
        "hwr_collector_duration_seconds": seconds,
        "hwr_collector_timestamp_seconds": sampled,
    }


def _readable(directories: Sequence[RunDirectory]) -> bool:
    """Say whether nothing is in the way: one of several places may not exist yet, but not all."""
    return any(one.readable for one in directories) and all(one.problem in (None, ABSENT) for one in directories)


def _unreadable(texts: Iterable[str]) -> Values:
    """Count the texts by the collector whose name they begin with: `memory: smaps of uid 0: ...`."""
    counts: dict[str, float] = {**dict.fromkeys(map(str, CollectorName), 0.0), OTHER: 0.0}
    for text in texts:
        name = text.partition(":")[0]
        counts[name if name in counts else OTHER] += 1
    return counts


def _of_the_kernel(snapshot: NodeSnapshot) -> dict[str, Values]:
    kernel = snapshot.kernel
    if kernel is None:
        return {}
    return {
        "hwr_node_pinned_bytes": _one(kernel.pinned_bytes),
        "hwr_node_mlocked_bytes": _one(kernel.mlocked_bytes),
        "hwr_node_memory_bytes": {kind: float(size) for kind, size in kernel.memory.items() if kind in MEMORY_KINDS},
        "hwr_node_pressure_stalled_seconds_total": {
            f"{resource}|{kind}": line.total_seconds
            for resource, lines in kernel.pressure.items()
            for kind, line in lines.items()
            if resource in RESOURCES and kind in PRESSURE_KINDS
        },
    }


def _of_stores(stores: Iterable[Store]) -> dict[str, Values]:
    reporting = [store for store in stores if store.reporting and _KEY.fullmatch(store.domain)]
    shown = {store.domain[:12]: store for store in sorted(reporting, key=lambda store: store.domain)[:TOP_DOMAINS]}
    return {
        "hwr_store_bytes": {f"{domain}|{state}": float(size) for domain, store in shown.items() for state, size in store.bytes.items()},
        "hwr_store_entries": {
            f"{domain}|{state}": float(count) for domain, store in shown.items() for state, count in store.entries.items()
        },
        "hwr_store_limit_bytes": _known({domain: store.limit_bytes for domain, store in shown.items()}),
        "hwr_store_free_bytes": _known({domain: store.free_bytes for domain, store in shown.items()}),
        "hwr_store_free_inodes": _known({domain: store.free_inodes for domain, store in shown.items()}),
    }


def _of_artifacts(artifacts: Sequence[Artifact]) -> dict[str, Values]:
    listed = [artifact for artifact in artifacts if _KEY.fullmatch(artifact.key)]
    listed.sort(key=lambda artifact: (not artifact.mappers, -(artifact.bytes or 0), artifact.key))
    shown: dict[str, Artifact] = {}
    for artifact in listed:
        shown.setdefault(short_key(artifact.key), artifact)
        if len(shown) == TOP_ARTIFACTS:
            break
    return {
        "hwr_artifact_info": {
            key: {
                "artifact": key,
                "domain": artifact.domain[:12] if artifact.domain is not None and _KEY.fullmatch(artifact.domain) else _NONE,
                "state": "unlisted" if artifact.state is None else artifact.state.value,
            }
            for key, artifact in shown.items()
        },
        "hwr_artifact_page_cache_bytes": _known({key: artifact.page_cache_bytes for key, artifact in shown.items()}),
        "hwr_artifact_mappers": {
            key: float(len({user.pid for user in artifact.mappers})) for key, artifact in shown.items() if artifact.mappers
        },
        "hwr_artifact_orphans": {"": float(len({user.pid for artifact in artifacts for user in artifact.mappers if user.orphan}))},
    }


def _one(value: float | None) -> Values:
    return {} if value is None else {"": float(value)}


def _known(pairs: Mapping[str, float | None]) -> Values:
    return {key: float(value) for key, value in pairs.items() if value is not None}
