"""A real Prometheus that scrapes what a test serves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

STARTED_SECONDS = 60.0


def tool(name: str) -> str:
    """Find a tool; where services are required it must be there."""
    path = shutil.which(name)
    if path is None:
        if os.environ.get("HWR_REQUIRE_SERVICES") == "1":
            pytest.fail(f"{name} is not on PATH and HWR_REQUIRE_SERVICES is 1")
        pytest.skip(f"{name} is not on PATH")
    return path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Prometheus:
    """A server of its own, which scrapes its targets every second."""

    def __init__(self, place: Path, targets: Sequence[str]) -> None:
        self._log = place / "prometheus.log"
        jobs = [{"job_name": "hwr", "static_configs": [{"targets": list(targets)}]}]
        (place / "prometheus.yml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        self._port = free_port()
        command = [tool("prometheus"), f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
        command += [f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place)
        until = time.monotonic() + STARTED_SECONDS
        while not self._scraped():
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)  # a poll, with the deadline above

    def api(self, path: str) -> Any:
        """Return the data of an API call, `targets` for example."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", timeout=20) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query."""
        result: list[dict[str, Any]] = self.api(f"query?query={urllib.parse.quote(expression)}")["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the one value of a query; None if it has no result."""
        result = self.query(expression)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def _scraped(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(OSError):
            return all(one["health"] == "up" for one in self.api("targets")["activeTargets"])
        return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
