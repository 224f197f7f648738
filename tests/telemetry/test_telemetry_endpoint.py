"""`/metrics` over real sockets, and what promtool and a real Prometheus make of it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import random
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_server import Prometheus, tool
from telemetry_samples import KEY, play

from hwr import telemetry
from hwr.errors import Unavailable
from hwr.telemetry import events as E
from hwr.telemetry.endpoint import MetricsServer, serve_metrics
from hwr.telemetry.process import current_hub

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[MetricsServer]:
    """Serve a worker that did a little of everything."""
    telemetry.configure(run_dir=tmp_path / "run", engine='in "quotes"\\')
    hub = current_hub()
    assert hub is not None
    play(hub, 500, random.Random(5))
    server = serve_metrics(0)
    assert isinstance(server, MetricsServer)
    yield server
    server.close()


def get(url: str, **headers: str) -> tuple[str, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
        body = response.read()
        if response.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return response.headers["Content-Type"], body


def test_the_accept_header_chooses_the_format(served: MetricsServer) -> None:
    """Plain text unless OpenMetrics is asked for; both parse, and both are what they say."""
    kind, text = get(served.url)
    assert kind.startswith("text/plain; version=0.0.4")
    assert list(parse_text(text.decode()))
    assert b"# EOF" not in text
    for accept in ("application/openmetrics-text", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"):
        kind, text = get(served.url, Accept=accept)
        assert kind.startswith("application/openmetrics-text; version=1.0.0")
        assert list(parse_openmetrics(text.decode()))
        assert text.endswith(b"# EOF\n")
    assert get(served.url, **{"Accept-Encoding": "gzip"})[1].startswith(b"# HELP")


def test_only_metrics_is_served(served: MetricsServer) -> None:
    """Every other path is 404, another method 405."""
    for path in ("/", "/metrics/", "/favicon.ico", "/metrics%00", "/../metrics"):
        connection = http.client.HTTPConnection(served.address, served.port, timeout=20)
        connection.request("GET", path)
        assert connection.getresponse().status == 404
        connection.close()
    connection = http.client.HTTPConnection(served.address, served.port, timeout=20)
    connection.request("POST", "/metrics", body=b"x")
    assert connection.getresponse().status == 405
    connection.close()


def test_a_client_that_says_nonsense_or_nothing_harms_nobody(served: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    """A connection that is silent, one that breaks off, one that is no HTTP: others are served, nothing is printed."""
    silent = socket.create_connection((served.address, served.port))
    for text in (b"", b"\xff\xfe\r\n\r\n", b"GET /metrics HTTP/1.0\r\nX: " + b"y" * 70_000):
        with contextlib.suppress(OSError), socket.create_connection((served.address, served.port)) as one:
            one.sendall(text)
    assert get(served.url)[1]
    silent.close()
    assert capfd.readouterr().err == ""


def test_it_listens_on_loopback_only(served: MetricsServer) -> None:
    """The default is 127.0.0.1, as the kernel's table shows."""
    assert served.address == "127.0.0.1"
    listening = [row.split()[1] for row in Path("/proc/net/tcp").read_text().splitlines()[1:] if row.split()[3] == "0A"]
    assert f"0100007F:{served.port:04X}" in listening


def test_a_taken_port_stops_nobody(served: MetricsServer) -> None:
    """A second server on the port: the answer is falsy with the reason, an event says so, nothing raises."""
    with telemetry.record() as recording:
        answer = serve_metrics(served.port)
    assert answer == Unavailable("EADDRINUSE (Address already in use)")
    assert not answer
    (event,) = recording.of(E.EndpointFailed)
    assert (event.address, event.port, event.problem) == ("127.0.0.1", served.port, "EADDRINUSE (Address already in use)")
    assert get(served.url)[1]


@pytest.mark.parametrize(
    ("port", "address"), [(70000, "127.0.0.1"), (-1, "127.0.0.1"), (0, "192.0.2.1"), (0, "a..b"), (0, "\udc80"), (0, "x" * 70)]
)
def test_an_address_that_cannot_be_stops_nobody(port: int, address: str, tmp_path: Path) -> None:
    """A port or an address that cannot be: the same."""
    telemetry.configure(run_dir=tmp_path)
    with telemetry.record() as recording:
        answer = serve_metrics(port, address)
    assert isinstance(answer, Unavailable)
    assert answer.reason
    assert len(recording.of(E.EndpointFailed)) == 1


def test_ipv6(tmp_path: Path) -> None:
    """`::1` works, and its URL has the brackets."""
    telemetry.configure(run_dir=tmp_path)
    server = serve_metrics(0, "::1")
    if isinstance(server, Unavailable):
        pytest.skip(f"no IPv6 here: {server.reason}")
    assert server.url == f"http://[::1]:{server.port}/metrics"
    assert b"hwr_worker_up" in get(server.url)[1]
    state = telemetry.snapshot()
    assert state is not None
    assert state.endpoint == f"[::1]:{server.port}"
    server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("::1", server.port), timeout=5)


def test_telemetry_off_serves_no_worker(tmp_path: Path) -> None:
    """Disabled telemetry has an endpoint without workers, not an error."""
    telemetry.configure(False)
    server = serve_metrics(0)
    assert isinstance(server, MetricsServer)
    text = get(server.url)[1].decode()
    server.close()
    samples = [sample for family in parse_text(text) for sample in family.samples]
    assert not any("rank" in sample.labels for sample in samples)
    assert all(sample.value == 0 for sample in samples)


def test_promtool_is_silent(served: MetricsServer) -> None:
    """`promtool check metrics` has nothing to say about the exposition."""
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=get(served.url)[1], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_promtool_would_say_something(served: MetricsServer) -> None:
    """The check can fail: a series twice, or a counter without its suffix, is reported."""
    text = get(served.url)[1]
    for bad in (b"# HELP x_count x\n# TYPE x_count counter\nx_count 1\n", text.replace(b"# HELP hwr_leases ", b"# HELP hwr_leased ")):
        done = subprocess.run([tool("promtool"), "check", "metrics"], input=bad, capture_output=True, timeout=60, check=False)
        assert done.returncode != 0


@pytest.fixture
def prometheus(served: MetricsServer, tmp_path: Path) -> Iterator[Prometheus]:
    """A real Prometheus that scrapes the endpoint each second."""
    server = Prometheus(tmp_path, [f"{served.address}:{served.port}"])
    yield server
    server.close()


def test_a_real_prometheus_has_every_series(prometheus: Prometheus, served: MetricsServer, until: Until) -> None:
    """One scrape: each series of the exposition can be queried with its value, labels and all; the target has no error."""
    telemetry.emit(E.LeaseOpened(key=KEY, lease="l", bytes=1, files=1, tensors=1, validation="full_checksum"))
    names = {sample.name for family in parse_text(get(served.url)[1].decode()) for sample in family.samples}
    until(lambda: names <= set(prometheus.api("label/__name__/values")))
    (target,) = prometheus.api("targets")["activeTargets"]
    assert target["lastError"] == ""
    (result,) = prometheus.query("hwr_worker_up")
    assert result["value"][1] == "1"
    assert result["metric"]["engine"] == 'in "quotes"\\'
    assert result["metric"]["rank"] == "0"
    (phase,) = prometheus.query("hwr_worker_phase == 1")
    assert phase["metric"]["hwr_worker_phase"]
    assert prometheus.query("histogram_quantile(0.5,hwr_resolution_seconds_bucket)")
