"""The machine's counters: what verdicts use is there, and what this kernel does not tell is a note."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from node_agents import until

from diag.node.kernel import KernelCollector
from diag.node.snapshot import KernelFacts

VMSTAT = b"nr_foll_pin_acquired 30\nnr_foll_pin_released 10\nnr_mlock 5\npgfault 7\ncompact_stall 3\nallocstall_normal 2\nother 9\n"
PSI = b"some avg10=1.50 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n"


def facts(root: Path = Path("/proc")) -> KernelFacts:
    found = KernelCollector(root).collect().value
    assert isinstance(found, KernelFacts)
    return found


def test_this_machine_tells_what_verdicts_use() -> None:
    """Pinned, locked, faults, compaction and memory; a locked page shows at once."""
    before = facts()
    assert before.pinned_bytes is not None
    assert before.memory["total"] > before.memory["available"] > 0
    assert {"pgfault", "pgmajfault", "compact_stall", "pgscan_direct"} <= before.vmstat.keys()
    libc = ctypes.CDLL(None)
    with mmap.mmap(-1, 8 << 20) as held:
        address = ctypes.addressof(ctypes.c_char.from_buffer(held))
        assert libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(8 << 20)) == 0
        until(lambda: (facts().mlocked_bytes or 0) >= (before.mlocked_bytes or 0) + (4 << 20), "locked memory shows")
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(8 << 20))


def tree(root: Path, **files: bytes) -> Path:
    (root / "pressure").mkdir()
    for name, text in files.items():
        (root / name.replace("__", "/")).write_bytes(text)
    return root


def test_figures_are_bytes_and_seconds(tmp_path: Path) -> None:
    """Pages become bytes, microseconds seconds, per cent shares of one."""
    found = facts(tree(tmp_path, vmstat=VMSTAT, meminfo=b"MemTotal: 8 kB\nMemFree: 4 kB\n", pressure__memory=PSI))
    assert found.pinned_bytes == 20 * mmap.PAGESIZE
    assert found.mlocked_bytes == 5 * mmap.PAGESIZE
    assert found.memory == {"total": 8192, "free": 4096}
    assert found.vmstat["compact_stall"] == 3
    assert found.vmstat["allocstall_normal"] == 2
    assert "other" not in found.vmstat
    assert found.pressure["memory"]["some"].total_seconds == 2.5
    assert found.pressure["memory"]["some"].avg10 == 0.015


def test_what_is_not_told_is_absent_and_noted(tmp_path: Path) -> None:
    """Without PSI, vmstat and meminfo there are notes and a problem, no figure and no zero."""
    (tmp_path / "pressure").mkdir()
    own = KernelCollector(tmp_path)
    answer = own.collect()
    assert (answer.value.pinned_bytes, answer.value.memory, answer.value.vmstat, answer.value.pressure) == (None, {}, {}, {})
    assert answer.problem is not None
    assert len(answer.value.notes) == 3
    assert len(own.unreadable) == 1
