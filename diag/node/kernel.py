"""The machine's own counters.

Owns what verdicts and screens use of vmstat, meminfo and PSI. Promises a note, and no figure, for what this kernel does not tell.
Refuses rates: two samples are the judge's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Final

from diag.node.collecting import Collected
from diag.node.snapshot import KernelFacts, Pressure
from hwr.errors import Unavailable
from hwr.procfs.meminfo import MemInfo, read_meminfo
from hwr.procfs.pressure import RESOURCES, read_pressure
from hwr.procfs.reading import PROC_ROOT
from hwr.procfs.vmstat import read_vmstat
from hwr.telemetry.clock import boot_ns

VMSTAT: Final = (
    *("nr_foll_pin_acquired", "nr_foll_pin_released", "nr_mlock", "pgfault", "pgmajfault"),
    *("compact_stall", "compact_fail", "compact_success", "compact_migrate_scanned", "compact_free_scanned"),
    *("allocstall_dma", "allocstall_dma32", "allocstall_normal", "allocstall_movable", "allocstall_device"),
    *("pgscan_direct", "pgsteal_direct", "pgscan_kswapd", "pswpin", "pswpout"),
)


class KernelCollector:
    """Reads them."""

    def __init__(self, proc_root: Path = PROC_ROOT, clock: Callable[[], int] = boot_ns) -> None:
        self._proc_root, self._clock = proc_root, clock
        self.unreadable: tuple[str, ...] = ()

    def collect(self) -> Collected[KernelFacts]:
        """Read once."""
        notes: list[str] = []
        now = self._clock()
        counters = read_vmstat(self._proc_root)
        memory = read_meminfo(self._proc_root)
        pressure: dict[str, dict[str, Pressure]] = {}
        for resource in RESOURCES:
            told = read_pressure(resource, self._proc_root)
            if isinstance(told, Unavailable):
                notes.append(f"pressure of {resource}: {told.reason}")
            else:
                pressure[resource] = {
                    kind: Pressure(total_seconds=line.total_s, avg10=line.avg10, avg60=line.avg60) for kind, line in told.items()
                }
        problem = None
        if isinstance(counters, Unavailable):
            problem = counters.reason
        if isinstance(memory, Unavailable):
            problem = memory.reason
        self.unreadable = () if len(pressure) else ("pressure: this kernel tells none (PSI is off)",)
        known = {} if isinstance(counters, Unavailable) else counters.counters
        facts = KernelFacts(
            sampled_ns=now,
            pinned_bytes=None if isinstance(counters, Unavailable) else counters.pinned,
            mlocked_bytes=None if isinstance(counters, Unavailable) else counters.mlocked,
            memory={} if isinstance(memory, Unavailable) else _amounts(memory),
            vmstat={name: known[name] for name in VMSTAT if name in known},
            pressure=pressure,
            notes=tuple(notes),
        )
        return Collected(facts, problem)


def _amounts(memory: MemInfo) -> dict[str, int]:
    told = ((item.name, getattr(memory, item.name)) for item in fields(memory))
    return {name: value for name, value in told if value is not None}
