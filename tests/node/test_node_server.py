"""The port: whoever asks whatever, it answers or refuses, and goes on."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from node_port import DEADLINE_SECONDS, FakeAnswers, body, connect, everything, exchange, get, node, serving, status, until
from prometheus_client.parser import text_string_to_metric_families

from diag.node import server as port
from diag.node import server_connection
from diag.node.server import Server
from diag.node.server_pages import accepts_gzip, split_target, startup_query
from diag.node.snapshot import from_json
from hwr.errors import OptionError

PROMETHEUS = "Accept: application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture
def answers() -> FakeAnswers:
    return FakeAnswers(node())


def test_every_path_is_served(answers: FakeAnswers) -> None:
    """Metrics parse, the snapshot is one, startupz is JSON, the probes are 200, and the index names them all."""
    with serving(answers) as server:
        families = list(text_string_to_metric_families(body(get(server, "/metrics")).decode()))
        assert any(family.name == "hwr_worker_up" for family in families)
        assert from_json(body(get(server, "/snapshot"))).host == "node"
        assert json.loads(body(get(server, "/startupz")))["ranks"][1]["rank"] == 1
        assert status(get(server, "/livez")) == status(get(server, "/readyz")) == 200
        index = body(get(server, "/"))
        assert all(path in index for path in (b"/metrics", b"/startupz", b"/livez", b"/readyz", b"/snapshot"))
        assert server.requests == {200: 6}
        assert server.url == f"http://127.0.0.1:{server.port}"


def test_a_scraper_gets_the_format_that_it_asks_for(answers: FakeAnswers) -> None:
    """Text 0.0.4 without a wish, OpenMetrics with Prometheus's own header, and either short where gzip is taken."""
    with serving(answers) as server:
        assert b"Content-Type: text/plain; version=0.0.4" in get(server, "/metrics").replace(b"content-type", b"Content-Type")
        head, _, text = get(server, "/metrics", PROMETHEUS).partition(b"\r\n\r\n")
        assert b"application/openmetrics-text" in head
        assert text.endswith(b"# EOF\n")
        head, _, short = get(server, "/metrics", PROMETHEUS, "Accept-Encoding: br, gzip").partition(b"\r\n\r\n")
        assert b"Content-Encoding: gzip" in head
        assert gzip.decompress(short) == text
        assert b"Content-Encoding" not in get(server, "/metrics", "Accept-Encoding: gzip;q=0, identity").partition(b"\r\n\r\n")[0]
        assert answers.renderings == 2, "one a format, whatever the coding"
        for odd in ("application/openmetrics-text;version=junk", "text/plain;version=1e999;escaping=x", "\x80\xff,,;;==", "a" * 9000):
            assert status(get(server, "/metrics", f"Accept: {odd}")) in (200, 400)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET http://elsewhere:1/livez HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /%6Civez?x=%ff HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 200),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (bytes(range(256)) * 64, 400),
        (b"GET /livez\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /startupz?rank=abc HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET //metrics HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /%ff%00../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /startupz?rank=77 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n" + b"z" * 900_000, 413),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n", 417),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 65536 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 65536 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
    ids=lambda value: repr(value[:48]) if isinstance(value, bytes) else None,
)
def test_an_odd_request_is_served_or_refused_by_name(answers: FakeAnswers, sent: bytes, expected: int) -> None:
    """Each gets the status that says what was wrong, and the next client is served."""
    with serving(answers) as server:
        answer = exchange(server, sent)
        assert status(answer) == expected, answer[:300]
        if expected == 405:
            assert b"Allow: GET, HEAD" in answer
        if expected == 404:
            assert b"passwd" not in answer
        assert status(get(server, "/livez")) == 200


def test_a_head_says_what_a_get_would(answers: FakeAnswers) -> None:
    """The same headers, and no body."""
    with serving(answers) as server:
        head, asked = get(server, "/snapshot", method="HEAD"), get(server, "/snapshot")
        assert body(head) == b""
        length = f"Content-Length: {len(body(asked))}".encode()
        assert length in head
        assert length in asked


def test_requests_that_come_at_once_are_answered_in_order(answers: FakeAnswers) -> None:
    """A client that does not wait for the answer to its first request gets all of them, on the one connection."""
    with serving(answers) as server:
        found = exchange(server, b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"/livez", b"/none", b"/readyz")))
        assert [int(line.split()[1]) for line in found.splitlines() if line.startswith(b"HTTP/1.1 ")] == [200, 404, 200]


def test_before_the_first_look_the_probes_say_so(answers: FakeAnswers) -> None:
    """Without a snapshot nothing is made up: 503, and when to ask again."""
    with serving(FakeAnswers(None)) as server:
        for path in ("/metrics", "/snapshot", "/startupz", "/startupz?rank=0"):
            answer = get(server, path)
            assert status(answer) == 503
            assert b"Retry-After: 1" in answer
        assert status(get(server, "/readyz")) == 503
        assert status(get(server, "/livez")) == 200


def test_a_renderer_that_raises_is_an_answer(answers: FakeAnswers) -> None:
    """500 names it on one line; the other paths are served, and so is the next exposition."""
    answers.failure = ValueError("no\x1b[31m such\nthing")
    with serving(answers) as server:
        answer = get(server, "/metrics")
        assert status(answer) == 500
        assert b"ValueError: no\\x1b[31m such thing" in answer
        assert status(get(server, "/snapshot")) == 200
        answers.failure = None
        assert status(get(server, "/metrics")) == 200


def test_back_to_back_scrapes_never_wait_for_a_rendering(answers: FakeAnswers) -> None:
    """While the next exposition is held up, the last one is served; it is made once, and served when done."""
    with serving(answers) as server:
        first = body(get(server, "/metrics"))
        gate = threading.Event()
        rendered = answers.exposition

        def slow(accept: str) -> tuple[bytes, str] | None:
            assert gate.wait(DEADLINE_SECONDS)
            return rendered(accept)

        answers.exposition = slow  # type: ignore[method-assign]
        with serving(answers) as slow_server:
            with ThreadPoolExecutor(8) as pool:  # nobody has anything yet: all wait for one rendering
                waiting = [pool.submit(get, slow_server, "/metrics") for _ in range(8)]
                until(lambda: slow_server.connections == 8, "eight clients wait")
                gate.set()
                assert {status(one.result()) for one in waiting} == {200}
            assert answers.renderings == 2
            gate.clear()
            answers.renew()
            begun = time.monotonic()
            assert body(get(slow_server, "/metrics")).startswith(first[:20])
            assert time.monotonic() - begun < 1.0
            gate.set()
            until(lambda: answers.renderings == 3, "the next one is made behind it")


def test_two_hundred_scrapes_at_once_are_all_whole(answers: FakeAnswers) -> None:
    """Every client gets the same complete exposition, rendered once."""
    with serving(answers) as server:
        whole = body(get(server, "/metrics"))
        clients = [connect(server) for _ in range(200)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert {body(everything(client)) for client in clients} == {whole}
        for client in clients:
            client.close()
        assert answers.renderings == 1
        until(lambda: server.connections == 0, "all are gone")


def test_a_full_house_of_dribblers_lets_a_scraper_in(answers: FakeAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every place taken by clients that send a byte now and then, a scrape is answered soon, each time."""
    monkeypatch.setattr(port, "MAX_CONNECTIONS", 200)
    with serving(answers) as server:
        dribblers = [connect(server) for _ in range(230)]
        for client in dribblers:
            try:
                client.sendall(b"GET /metrics HTTP/1.1\r\nX-")
            except ConnectionError:
                continue
        until(lambda: server.connections == 200, "the house is full")
        for _ in range(5):
            begun = time.monotonic()
            assert status(get(server, "/metrics")) == 200
            assert time.monotonic() - begun < server_connection.HEAD_SECONDS / 2, "long before a dribbler's own time is over"
            for client in dribblers:
                try:
                    client.sendall(b"x")
                except OSError:
                    continue
        assert server.connections <= 200
        for client in dribblers:
            client.close()


def test_a_head_that_does_not_end_is_ended(answers: FakeAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it dribbles, its time counts from its first byte; one that says nothing at all is let go without a word."""
    monkeypatch.setattr(server_connection, "HEAD_SECONDS", 0.4)
    with serving(answers) as server:
        with connect(server) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert status(everything(client)) == 408
        with connect(server) as silent:
            assert everything(silent) == b""


def test_an_idle_connection_is_kept_and_then_let_go(answers: FakeAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scraper's second request comes on the first one's connection; one that never comes costs nothing for long."""
    monkeypatch.setattr(server_connection, "IDLE_SECONDS", 0.5)
    with serving(answers) as server, connect(server) as client:
        for _ in range(2):
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        assert everything(client) == b""
        assert server.requests == {200: 2}


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is not taken in time ends the connection, and the port holds no more than a piece of it."""
    monkeypatch.setattr(server_connection, "WRITE_SECONDS", 0.5)
    with serving(FakeAnswers(node(artifacts=10_000))) as server:
        clients = [connect(server) for _ in range(4)]
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /snapshot HTTP/1.1\r\nHost: x\r\n\r\n" * 8)
        until(lambda: server.requests.get(200, 0) >= 4, "all are being answered")
        until(lambda: server.connections == 0, "all are cut off")
        assert status(get(server, "/livez")) == 200
        for client in clients:
            client.close()


def test_running_out_of_descriptors_passes(answers: FakeAnswers) -> None:
    """With no descriptor left to accept with, the port waits; when there are some again it answers whoever came meanwhile."""
    with serving(answers) as server:
        until(lambda: status(get(server, "/livez")) == 200, "it serves")
        clients = [socket.socket() for _ in range(3)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        taken = []
        try:
            while True:
                try:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            for client in clients:
                client.settimeout(DEADLINE_SECONDS)
                client.connect(("127.0.0.1", server.port))
                client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            until(lambda: server.starved > 0, "it has tried to accept")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)
        assert [status(everything(client)) for client in clients] == [200] * 3
        for client in clients:
            client.close()


def test_a_taken_port_is_two_lines(answers: FakeAnswers) -> None:
    """It names address and port, and the way out; the port is free again the moment its server is closed."""
    with serving(answers) as server:
        with pytest.raises(OptionError, match=rf"--port: 127\.0\.0\.1:{server.port} is taken\n.*--port"):
            Server(answers, "127.0.0.1", server.port).start()
        with connect(server) as client:  # leaves a connection in TIME_WAIT behind
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).endswith(b"well\n")
            server.close()
            server.close()
            assert client.recv(1) == b""
        again = Server(answers, "127.0.0.1", server.port)
        again.start()
        again.close()


@pytest.mark.parametrize("addr", ["", "[]", "no.such.host.invalid", "192.0.2.1", "a" * 300, "\u00fc" * 70])
def test_an_address_that_is_not_ours_is_two_lines(addr: str) -> None:
    """And none of them, not even an empty one, is taken for every address there is."""
    with pytest.raises(OptionError, match=r"--addr: .*\n.*"):
        Server(FakeAnswers(None), addr, 0).start()


@pytest.mark.parametrize("addr", ["localhost", "::1", "[::1]", "0.0.0.0", "::"])
def test_any_spelling_of_an_address_will_do(answers: FakeAnswers, addr: str) -> None:
    """A name, IPv6 with and without brackets, and everything; the URL can be asked."""
    server = Server(answers, addr, 0)
    server.start()
    try:
        reached = "::1" if addr in ("::1", "[::1]") else "127.0.0.1"
        with socket.create_connection((reached, server.port), DEADLINE_SECONDS) as client:
            client.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert status(everything(client)) == 200
    finally:
        server.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
def test_curl_is_served(answers: FakeAnswers) -> None:
    """A client that nobody here wrote: compressed, kept alive over two requests."""
    with serving(answers) as server:
        url = f"{server.url}/metrics"
        done = subprocess.run(["curl", "-sSf", "--compressed", url, url], capture_output=True, timeout=20, check=True)
        assert done.stdout.count(b"# HELP hwr_worker_up ") == 2


def test_nothing_is_written_to_standard_error() -> None:
    """Not for nonsense, not for a client that resets, not at the end."""
    script = """
import socket, struct, sys
sys.path.insert(0, sys.argv[1])
from node_port import FakeAnswers, connect, exchange, node, serving
with serving(FakeAnswers(node())) as server:
    exchange(server, b"nonsense\\r\\n\\r\\n")
    client = connect(server)
    client.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * 3)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    left = connect(server)
    exchange(server, b"GET /livez HTTP/1.0\\r\\n\\r\\n")
left.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(Path(__file__).parent)],
        capture_output=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_target_is_its_path() -> None:
    """Whole URLs count by their path, percent-encoding is undone once, a query is not part of it."""
    assert split_target("/metrics?a=b?c") == ("/metrics", "a=b?c")
    assert split_target("HTTP://x/%6detrics") == ("/metrics", "")
    assert split_target("http://x?a=1") == ("/", "a=1")
    assert split_target("/%256detrics") == ("/%6detrics", "")
    assert split_target("ftp://x/metrics")[0] == "ftp://x/metrics"
    assert split_target("") == ("", "")


def test_a_misspelt_probe_is_refused() -> None:
    """What would always be 200 by mistake is 400: another name, a rank that is no number or comes twice, an engine without a rank."""
    assert startup_query("") == (None, None)
    assert startup_query("rank=3&engine=a%20b") == (3, "a b")
    for wrong in (
        "rnak=1",
        "rank=",
        "rank=-1",
        "rank=+1",
        "rank=1e3",
        "rank=1&rank=2",
        "engine=x",
        "rank=" + "9" * 20,
        "rank=٣",
        "&".join("abcdefghij"),
    ):
        assert isinstance(startup_query(wrong), str), wrong


def test_gzip_is_used_where_it_is_taken() -> None:
    """Named or by a star, and not with weight 0."""
    for taken in ("gzip", "GZIP", "br;q=1, gzip;q=0.5", "*", "identity, *;q=0.1"):
        assert accepts_gzip(taken), taken
    for other in ("", "br", "gzip;q=0", "gzip;q=0.000, *", "*;q=0", "gzip;q=x", "xgzip"):
        assert not accepts_gzip(other), other


def test_the_snapshot_is_one_json_object(answers: FakeAnswers) -> None:
    """Short or long, it is what the agent has."""
    with serving(answers) as server:
        short = gzip.decompress(body(get(server, "/snapshot", "Accept-Encoding: gzip")))
        assert short == body(get(server, "/snapshot")) == msgspec.json.encode(answers.now)
