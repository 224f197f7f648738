"""The stand-in for libcudart, payload files, and telemetry off before and after each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for _room in ("cuda", "store"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / _room))

from cuda_standin import foundry, standin  # noqa: E402, F401 (fixtures)
from registration_aids import MIB, payload_file  # noqa: E402

from hwr import telemetry  # noqa: E402


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end with telemetry off and nothing of it in the environment."""
    for name in ("HWR_RUN_ID", "HWR_RUN_DIR", "HWR_RANK", "HWR_ENGINE", "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what a test exports is undone
        monkeypatch.delenv(name)
    telemetry.close()
    yield
    telemetry.close()


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    """A file of 4 MiB: four chunks."""
    return payload_file(tmp_path / "payload-00001.safetensors", 4 * MIB)


@pytest.fixture
def as_root() -> None:
    """Skip where other users and capabilities are out of reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
