"""/proc/buddyinfo."""

from __future__ import annotations

from pathlib import Path

from hwr.errors import Unavailable
from hwr.procfs.buddyinfo import Zone, parse_buddyinfo, read_buddyinfo
from hwr.procfs.meminfo import MemInfo, read_meminfo

TWO_NODES = b"Node 0, zone    DMA32     90     77    103 \nNode 1, zone   Normal   6884      0      1 \n"


def test_every_zone_of_this_machine_is_read():
    zones, memory = read_buddyinfo(), read_meminfo()
    assert isinstance(zones, tuple)
    assert isinstance(memory, MemInfo)
    assert len(zones) == len(Path("/proc/buddyinfo").read_text().splitlines())
    assert {zone.name for zone in zones} & {"Normal", "DMA32", "DMA", "Movable"}
    assert 0 < sum(zone.free_bytes() for zone in zones) <= memory.total


def test_blocks_are_by_order():
    assert parse_buddyinfo(TWO_NODES, page_size=4096) == (Zone(0, "DMA32", (90, 77, 103), 4096), Zone(1, "Normal", (6884, 0, 1), 4096))


def test_free_memory_that_lies_together():
    _, normal = parse_buddyinfo(TWO_NODES, page_size=4096)
    assert [normal.free_bytes(order) // 4096 for order in range(4)] == [6888, 4, 4, 0]


def test_strange_lines_are_skipped():
    assert parse_buddyinfo(b"Node x, zone Normal 1\nNode 0, zone Normal\nNode 0, zone Normal 1 -2\n" + TWO_NODES) == parse_buddyinfo(
        TWO_NODES
    )


def test_nothing_whole_is_unavailable(tree):
    assert isinstance(read_buddyinfo(tree("buddyinfo", TWO_NODES[:30])), Unavailable)
    assert isinstance(read_buddyinfo(Path("/nowhere")), Unavailable)
