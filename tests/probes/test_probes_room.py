"""The probe takes no more than there is, and says what it lacks with the way to get it."""

from __future__ import annotations

import argparse
import errno
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from diag.probes import safetensors_retention as probe
from diag.probes.environment import ALLOCATOR


def asked(**more: Any) -> argparse.Namespace:
    """Return the arguments that the file depends on."""
    return argparse.Namespace(**{"tensor_elements": 64, "offset_bytes": 0, "header_bytes": None, **more})


@pytest.mark.parametrize(
    "more", [{"tensor_elements": 10**17}, {"offset_bytes": 10**17}, {"header_bytes": 10**17}, {"tensors": 10**16}], ids=str
)
def test_what_the_disk_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, more: dict[str, int]) -> None:
    tensors = more.pop("tensors", 1)
    case = probe.GetTensor(asked(**more))
    case.tensors = tensors
    with pytest.raises(probe.Unusable, match=r"the file of this tensor needs some [\d,]+ bytes of space in .*, and [\d,]+ are free"):
        case.prepare(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_what_the_memory_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(probe, "MEMINFO", str(tmp_path / "meminfo"))
    probe.insist_on_room(asked(tensor_elements=80_000), str(tmp_path), 1)
    with pytest.raises(probe.Unusable, match=r"needs some 1,08\d,\d{3} bytes of memory, and 1,024,000 are free: give a smaller tensor"):
        probe.insist_on_room(asked(tensor_elements=90_000), str(tmp_path), 1)


@pytest.mark.parametrize("text", ["", "MemTotal: 1 kB\n"])
def test_a_proc_that_does_not_say_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(probe, "MEMINFO", str(tmp_path / "meminfo"))
    probe.insist_on_room(asked(), str(tmp_path), 1)


@pytest.mark.parametrize("elements", [1, 8190, 8191, 8192, 20_000])
def test_the_payload_has_as_many_elements_as_asked_for_in_one_pattern(elements: int) -> None:
    payload = probe.payload_of(asked(tensor_elements=elements))
    assert payload.tolist() == [number % 8191 for number in range(elements)]


def test_a_filler_of_any_length_lies_before_the_tensor(tmp_path: Path) -> None:
    payload = probe.payload_of(asked())
    offset = probe.BLOCK_BYTES * 2 + 3
    told = probe.write_file(str(tmp_path / "x"), payload, offset, None, 1)
    assert told["file_bytes"] == told["end"] == 8 + 160 + offset + 256
    assert (tmp_path / "x").read_bytes()[168:] == bytes(offset) + payload.tobytes()


def test_a_full_disk_under_the_samples_is_no_broken_measurement() -> None:
    stream = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left on device") as full:
            probe.write_line(stream, {"sample": 1})
    finally:
        os.close(stream)
    assert full.value.errno == errno.ENOSPC


def test_without_the_file_that_records_it_is_the_file_that_is_missing(tmp_path: Path) -> None:
    copy = tmp_path / "probe.py"
    copy.write_bytes(Path(probe.__file__).read_bytes())
    alone = runpy.run_path(str(copy))
    wanted = re.escape(f"copy diag/probes/attribution.py of hwr-suite to {tmp_path}/attribution.py")
    with pytest.raises(alone["Unusable"], match=wanted):
        alone["recording"](str(tmp_path))


def test_without_memray_it_is_memray_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memray", None)
    wanted = re.escape(f"--attribute needs memray in {sys.executable}: pip install 'hwr-suite[attribute]'")
    with pytest.raises(probe.Unusable, match=wanted):
        probe.recording(str(tmp_path))


def test_the_probe_and_its_parent_know_the_same_variables_of_an_allocator() -> None:
    """The probe imports nothing of ours, so the pattern stands in both."""
    assert probe.ALLOCATOR_VARIABLES == ALLOCATOR
