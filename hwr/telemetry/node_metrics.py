"""The metrics of a node, declared as data: what its agent adds to those of the workers.

Owns names, help and labels of everything that is said of the node as a whole, and of the stores and artifacts on it. Promises series
without `engine` and `rank`, absent while unknown. Refuses to compute: whoever has looked at a node prepares the figures, by metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hwr.outcomes import CollectorName, InventoryState, Liveness
from hwr.telemetry.catalogue import Kind, Label, Metric, Scope, Values

# Domains that are shown; a node has one or two.
TOP_DOMAINS: Final = 8
# What belongs to no collector.
OTHER: Final = "other"
RESOURCES: Final = ("cpu", "memory", "io")
PRESSURE_KINDS: Final = ("some", "full")
MEMORY_KINDS: Final = ("total", "free", "available", "cached", "shmem", "unevictable")

Figures = Mapping[str, Values]

_ARTIFACT: Final = Label("artifact", None)
_DOMAIN: Final = Label("domain", None)
_STATE: Final = Label("state", tuple(InventoryState))
_COLLECTOR: Final = Label("collector", tuple(CollectorName))


def _node(name: str, kind: Kind, text: str, labels: tuple[Label, ...] = (), unit: str = "") -> Metric:
    def prepared(figures: Any) -> Values:
        told: Values = figures.get(name, {})
        return told

    return Metric(name, kind, text, prepared, labels, unit, Scope.NODE)


NODE_METRICS: Final[tuple[Metric, ...]] = (
    # artifacts and stores
    _node(
        "hwr_artifact_info",
        Kind.INFO,
        "An artifact of this node: the domain that it lies in, and its state; a mapped one that no store has is `unlisted`.",
        (_ARTIFACT, _DOMAIN, Label("state", (*InventoryState, "unlisted"))),
    ),
    _node(
        "hwr_artifact_page_cache_bytes",
        Kind.GAUGE,
        "Bytes of an artifact's files that the page cache holds.",
        (_ARTIFACT,),
        "bytes",
    ),
    _node(
        "hwr_artifact_mappers",
        Kind.GAUGE,
        "Processes that use an artifact, orphans included; absent when nobody does.",
        (_ARTIFACT,),
    ),
    _node("hwr_artifact_orphans", Kind.GAUGE, "Processes that use an artifact and that no journal of a living worker accounts for."),
    _node("hwr_store_bytes", Kind.GAUGE, "Bytes of a store's entries, by state.", (_DOMAIN, _STATE), "bytes"),
    _node("hwr_store_entries", Kind.GAUGE, "Entries of a store, by state.", (_DOMAIN, _STATE)),
    _node("hwr_store_limit_bytes", Kind.GAUGE, "What the whole store may take; absent when nothing limits it.", (_DOMAIN,), "bytes"),
    _node("hwr_store_free_bytes", Kind.GAUGE, "Bytes that the store's filesystem has free for its owner.", (_DOMAIN,), "bytes"),
    _node("hwr_store_free_inodes", Kind.GAUGE, "Inodes that the store's filesystem has free.", (_DOMAIN,)),
    # the node
    _node("hwr_runs_discovered", Kind.GAUGE, "Runs found in the run directories."),
    _node("hwr_run_dir_readable", Kind.GAUGE, "1 if every run directory could be read; `/startupz` names the one that could not."),
    _node(
        "hwr_workers",
        Kind.GAUGE,
        "Processes that write a journal, those included that are not shown.",
        (Label("liveness", tuple(Liveness)),),
    ),
    _node("hwr_node_pinned_bytes", Kind.GAUGE, "Memory that drivers have pinned, all processes together (vmstat).", (), "bytes"),
    _node("hwr_node_mlocked_bytes", Kind.GAUGE, "Memory that is locked, all processes together (vmstat).", (), "bytes"),
    _node(
        "hwr_node_memory_bytes",
        Kind.GAUGE,
        "Memory of the node by kind; the kinds overlap (meminfo).",
        (Label("kind", MEMORY_KINDS),),
        "bytes",
    ),
    _node(
        "hwr_node_pressure_stalled_seconds_total",
        Kind.COUNTER,
        "Seconds since boot in which some or all tasks waited for a resource (PSI some and full).",
        (Label("resource", RESOURCES), Label("kind", PRESSURE_KINDS)),
        "seconds",
    ),
    # the agent itself
    _node("hwr_agent_start_timestamp_seconds", Kind.GAUGE, "When the agent began.", (), "seconds"),
    _node("hwr_snapshot_timestamp_seconds", Kind.GAUGE, "When what is shown was put together.", (), "seconds"),
    _node(
        "hwr_unreadable",
        Kind.GAUGE,
        "Facts that a collector may not read; `/startupz` names each, and what would open it.",
        (Label("collector", (*CollectorName, OTHER)),),
    ),
    _node("hwr_collector_success", Kind.GAUGE, "1 if the last run of every collector of this name read all that it should.", (_COLLECTOR,)),
    _node(
        "hwr_collector_duration_seconds",
        Kind.GAUGE,
        "Seconds of the last run that ended; the slowest of this name.",
        (_COLLECTOR,),
        "seconds",
    ),
    _node(
        "hwr_collector_timestamp_seconds",
        Kind.GAUGE,
        "When data was last brought; the oldest of this name.",
        (_COLLECTOR,),
        "seconds",
    ),
)
