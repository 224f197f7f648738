"""Every parser, whatever the bytes: no exception, and no wrong value from a text that was cut."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwr.errors import Unavailable
from hwr.procfs.buddyinfo import parse_buddyinfo
from hwr.procfs.capabilities import parse_effective
from hwr.procfs.cgroup import parse_cgroup, parse_memory_stat
from hwr.procfs.identity import parse_boot_id, parse_namespace
from hwr.procfs.io import parse_io
from hwr.procfs.limits import parse_limits
from hwr.procfs.locks import parse_locks
from hwr.procfs.maps import Mapping, iter_maps
from hwr.procfs.meminfo import parse_meminfo
from hwr.procfs.mountinfo import mount_of, parse_mountinfo
from hwr.procfs.pressure import parse_pressure
from hwr.procfs.smaps import Vma, parse_smaps
from hwr.procfs.smaps_rollup import Amounts, SmapsRollup, parse_smaps_rollup
from hwr.procfs.stat import parse_stat
from hwr.procfs.statm import parse_statm
from hwr.procfs.status import parse_status
from hwr.procfs.threads import parse_syscall, parse_wchan
from hwr.procfs.vmstat import parse_vmstat

LOCKS = (
    b"1: FLOCK  ADVISORY  WRITE 71 08:1f:13 0 EOF\n1: -> FLOCK  ADVISORY  READ 72 08:1f:13 0 EOF\n2: POSIX  ADVISORY  READ 3 fe:00:9 5 14\n"
)
CGROUP = b"4:memory:/kubepods/pod7\n3:cpu,cpuacct:/kubepods\n1:name=systemd:/a:b\n0::/kubepods\n"
MEMORY_STAT = b"cache 204800\ninactive_file 77824\nactive_file 126976\nhierarchical_memory_limit 9223372036854771712\ntotal_cache 204800\n"
BUDDYINFO = b"Node 0, zone      DMA      0      0      1      3 \nNode 1, zone   Normal   6884   7374   2487   3150 \n"
PRESSURE = b"some avg10=55.18 avg60=27.80 avg300=37.15 total=2647758045\nfull avg10=0.00 avg60=0.02 avg300=0.00 total=174917421\n"
SYSCALL = b"202 0x7f0000000010 0x80 0x0 0x0 0x0 0xffffffffffffffff 0x7ffd00000000 0x7f0000000020\n"


def parse_maps(text: bytes) -> tuple[Mapping, ...]:
    return tuple(iter_maps(io.BytesIO(text)))


SAMPLES = {
    parse_status: Path("/proc/self/status").read_bytes(),
    parse_stat: Path("/proc/self/stat").read_bytes(),
    parse_statm: Path("/proc/self/statm").read_bytes(),
    parse_smaps_rollup: Path("/proc/self/smaps_rollup").read_bytes(),
    parse_smaps: Path("/proc/self/smaps").read_bytes()[:2500],
    parse_locks: LOCKS,
    parse_vmstat: Path("/proc/vmstat").read_bytes()[:1500],
    parse_meminfo: Path("/proc/meminfo").read_bytes(),
    parse_limits: Path("/proc/self/limits").read_bytes(),
    parse_effective: Path("/proc/self/status").read_bytes(),
    parse_cgroup: CGROUP,
    parse_memory_stat: MEMORY_STAT,
    parse_buddyinfo: BUDDYINFO,
    parse_mountinfo: Path("/proc/self/mountinfo").read_bytes()[:1500],
    parse_pressure: PRESSURE,
    parse_io: Path("/proc/self/io").read_bytes(),
    parse_wchan: b"poll_schedule_timeout.constprop.0",
    parse_syscall: SYSCALL,
    parse_maps: Path("/proc/self/maps").read_bytes()[:1500],
    parse_boot_id: Path("/proc/sys/kernel/random/boot_id").read_bytes(),
}
PARSERS = pytest.mark.parametrize("parse", SAMPLES, ids=lambda parse: parse.__name__)

# A busy machine is no failure, and no example is kept from run to run.
QUIET = settings(deadline=None, database=None)


@PARSERS
@QUIET
@given(text=st.binary(max_size=300))
def test_no_bytes_raise(parse: Callable[[bytes], object], text: bytes):
    assert parse(text) is not None


@PARSERS
@QUIET
@given(data=st.data())
def test_no_damage_raises(parse: Callable[[bytes], object], data: st.DataObject):
    sample = SAMPLES[parse]
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(sample))] * 2)))
    damaged = (
        sample[:begin]
        + data.draw(st.binary(max_size=20) | st.sampled_from([b" ", b"\n", b":", b"-", b"(", b")", b"\\", b"0"]))
        + sample[end:]
    )
    assert parse(damaged) is not None


@PARSERS
@QUIET
@given(lines=st.lists(st.integers(0, 60), max_size=30))
def test_no_order_of_lines_raises(parse: Callable[[bytes], object], lines: list[int]):
    sample = SAMPLES[parse].splitlines(keepends=True)
    assert parse(b"".join(sample[at % len(sample)] for at in lines)) is not None


@QUIET
@given(text=st.text(max_size=40), path=st.text(max_size=20))
def test_no_name_raises(text: str, path: str):
    assert parse_namespace(text) is not None
    assert mount_of("/" + path, parse_mountinfo(SAMPLES[parse_mountinfo])) is not None


@pytest.mark.parametrize(
    "parse",
    [
        *(
            parse_status,
            parse_stat,
            parse_statm,
            parse_smaps_rollup,
            parse_vmstat,
            parse_boot_id,
            parse_meminfo,
            parse_limits,
            parse_effective,
        ),
        *(parse_pressure, parse_io),
    ],
    ids=lambda p: p.__name__,
)
def test_cut_text_gives_what_is_true_or_nothing(parse: Callable[[bytes], object]):
    sample = SAMPLES[parse]
    whole = parse(sample)
    assert not isinstance(whole, Unavailable)
    for end in range(len(sample)):
        cut = parse(sample[:end])
        assert isinstance(cut, Unavailable) or agrees(cut, whole), sample[:end]


def test_cut_smaps_gives_what_is_true_or_nothing():
    sample = SAMPLES[parse_smaps]
    whole = parse_smaps(sample)
    assert len(whole) >= 3
    for end in range(len(sample)):
        cut = parse_smaps(sample[:end])
        assert cut[:-1] == whole[: len(cut) - 1] if cut else True
        assert all(agrees(a, b) for a, b in zip(cut, whole, strict=False)), sample[:end]


@pytest.mark.parametrize(
    "parse", [parse_locks, parse_mountinfo, parse_cgroup, parse_buddyinfo, parse_maps], ids=lambda parse: parse.__name__
)
def test_cut_table_gives_its_whole_lines(parse: Callable[[bytes], tuple[object, ...]]):
    sample = SAMPLES[parse]
    whole = parse(sample)
    assert len(whole) >= 2
    for end in range(len(sample)):
        assert all(agrees(a, b) for a, b in zip(parse(sample[:end]), whole, strict=False))


def agrees(cut: object, whole: object) -> bool:
    """Whether each value of `cut` is absent or the one in `whole`."""
    if isinstance(cut, Vma | Amounts | SmapsRollup) or dataclasses.is_dataclass(cut):
        return all(agrees(getattr(cut, field.name), getattr(whole, field.name)) for field in dataclasses.fields(cut))  # type: ignore[arg-type]
    if isinstance(cut, dict) and isinstance(whole, dict):
        return cut.items() <= whole.items()
    return cut is None or cut == () or cut == whole
