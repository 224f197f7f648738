"""/proc/pressure: this kernel's, and those of others."""

from __future__ import annotations

import errno
import math
import time
from pathlib import Path

import pytest

from hwr.errors import Unavailable
from hwr.procfs.pressure import RESOURCES, PressureLine, parse_pressure, read_pressure

FILE = b"some avg10=1.50 avg60=0.25 avg300=100.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
PRESSURE = Path("/proc/pressure/cpu")


@pytest.fixture
def kernel_tells() -> None:
    """Skip where the kernel was built or started without pressure accounting."""
    try:
        PRESSURE.read_bytes()
    except OSError as error:
        pytest.skip(f"no pressure here: {errno.errorcode[error.errno or 0]}")


@pytest.mark.usefixtures("kernel_tells")
@pytest.mark.parametrize("resource", RESOURCES)
def test_every_resource_of_this_kernel_is_read(resource):
    found = read_pressure(resource)
    assert not isinstance(found, Unavailable), found
    assert found["some"].total_s >= 0
    assert found["some"].avg10 is not None
    assert 0 <= found["some"].avg10 <= 1


@pytest.mark.usefixtures("kernel_tells")
def test_waiting_for_a_processor_counts(start, until):
    def waited() -> float:
        found = read_pressure("cpu")
        assert not isinstance(found, Unavailable)
        return found["some"].total_s

    before, begun = waited(), time.monotonic()
    code = "import threading\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nif os.fork() == 0:\n while os.getppid() != 1: pass"
    children = [start(code), start(code)]
    until(lambda: waited() > before)
    for child in children:
        child.kill()
    assert waited() - before <= (time.monotonic() - begun) * 1.5 + 2  # microseconds taken for seconds would be far off


def test_totals_are_seconds_and_averages_are_shares():
    assert parse_pressure(FILE) == {
        "some": PressureLine(2.5, 0.015, 0.0025, 1.0),
        "full": PressureLine(7e-6, 0.0, 0.0, 0.0),
    }


@pytest.mark.parametrize("average", [b"", b"1", b"1.5", b"1.500", b"x.50", b"-1.50", b"1.x0", b"1e5"])
def test_average_that_is_none_is_unknown_and_the_total_stays(average):
    found = parse_pressure(FILE.replace(b"avg10=1.50", b"avg10=" + average))
    assert not isinstance(found, Unavailable)
    assert found["some"].avg10 is None
    assert math.isclose(found["some"].total_s, 2.5)


def test_lines_of_another_kernel_are_skipped():
    found = parse_pressure(
        b"\n \nnone avg10=0.00 total=1\nsome total=3000000 novelty=4\nfull avg10=0.00 avg60=0.00 avg300=0.00\n\xff \xff\n"
    )
    assert found == {"some": PressureLine(3.0)}


@pytest.mark.parametrize("text", [b"", b"some", FILE[:40], b"some avg10=0.00 total=12"])
def test_what_is_not_whole_is_unavailable(text):
    assert isinstance(parse_pressure(text), Unavailable)


def test_kernel_without_accounting_is_not_a_quiet_one(tmp_path, tree):
    missing = read_pressure("cpu", tmp_path)
    assert isinstance(missing, Unavailable)
    assert "this kernel has no such file" in missing.reason
    assert isinstance(read_pressure("io", tree("pressure/io", b"")), Unavailable)
