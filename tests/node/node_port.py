"""An agent that is nothing but its answers, and clients that are nothing but sockets."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import node_snapshots as made

from diag.node.exposition import Exposition
from diag.node.health import Health
from diag.node.server import Server
from diag.node.snapshot import NodeSnapshot
from diag.node.webconfig import WebConfig
from hwr.telemetry.clock import boot_ns

DEADLINE_SECONDS = 30.0


def node(workers: int = 2, artifacts: int = 3) -> NodeSnapshot:
    now = boot_ns()
    return made.snapshot(
        tuple(made.worker(made.busy(made.hub(rank)), at_ns=now) for rank in range(workers)), at_ns=now, artifacts=artifacts
    )


class FakeAnswers:
    """Answers from one snapshot, which `renew` replaces; counts renderings."""

    def __init__(self, snapshot: NodeSnapshot | None = None) -> None:
        self.now = snapshot
        self.renderings = 0
        self.failure: Exception | None = None
        self.rendering = Exposition()

    def renew(self) -> None:
        assert self.now is not None
        self.now = replace(self.now, taken_ns=boot_ns())

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        self.renderings += 1
        if self.failure is not None:
            raise self.failure
        return None if self.now is None else self.rendering.render(self.now, accept)

    def snapshot(self) -> NodeSnapshot | None:
        return self.now

    def alive(self) -> Health:
        return Health(True, "well")

    def ready(self) -> Health:
        return Health(self.now is not None, "ready" if self.now else "not yet")


@contextmanager
def serving(answers: FakeAnswers, web: WebConfig | None = None) -> Iterator[Server]:
    server = Server(answers, "127.0.0.1", 0, web)
    server.start()
    try:
        yield server
    finally:
        server.close()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_SECONDS)


def everything(client: socket.socket) -> bytes:
    """Read until the other side ends it, cleanly or not."""
    found = b""
    try:
        while data := client.recv(1 << 16):
            found += data
    except (ConnectionError, ssl.SSLError):
        pass
    return found


def exchange(server: Server, sent: bytes) -> bytes:
    """Send these bytes, say that no more come, and return all that comes back."""
    with connect(server) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        except ConnectionError:  # it had read enough
            pass
        return everything(client)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def get(server: Server, target: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: node", "Connection: close", *headers, "", ""]
    return exchange(server, "\r\n".join(lines).encode())


def body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def until(condition: object, what: str) -> None:
    """Wait for a condition, with a deadline."""
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
