"""`/metrics` of one process.

Owns a small threaded HTTP server that answers `/metrics` and nothing else, on loopback unless told otherwise.
Promises that a taken port never stops a load: the answer is `Unavailable`, an event and a warning.
Refuses to export anybody else's metrics: the registry holds this process's collector only.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from hwr.errors import Unavailable, errno_text
from hwr.telemetry.collector import worker_collector
from hwr.telemetry.events import EndpointFailed, EndpointOpened
from hwr.telemetry.process import emit, ensure_configured
from hwr.units import one_line

# A client that connects and says nothing holds a thread no longer than this.
CLIENT_SECONDS: Final = 10
_log = logging.getLogger("hwr.telemetry")


class MetricsServer:
    """A running `/metrics`; close it, or let it end with the process."""

    def __init__(self, server: WSGIServer, address: str) -> None:
        self._server = server
        self.address = address
        self.port = int(server.server_port)
        self._thread = threading.Thread(target=server.serve_forever, name="hwr-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(port: int, addr: str = "127.0.0.1") -> MetricsServer | Unavailable:
    """Serve this process's metrics at `http://addr:port/metrics`; port 0 takes a free one.

    A taken port or an unusable address is no error of the load: the result is falsy and says why.
    """
    ensure_configured()
    _asked.add(os.getpid())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(worker_collector())
    try:
        server = make_server(addr, port, _only_metrics(make_wsgi_app(registry)), _server_class(addr), handler_class=_Quiet)
    except (OSError, OverflowError, ValueError, TypeError) as error:  # the last two: an address that is no host name
        # getaddrinfo has numbers of its own, below 0, that are no errno.
        problem = errno_text(error) if isinstance(error, OSError) and (error.errno or 0) > 0 else one_line(str(error))
        emit(EndpointFailed(address=addr, port=port, problem=problem))
        return Unavailable(problem)
    running = MetricsServer(server, addr)
    emit(EndpointOpened(address=addr, port=running.port))
    return running


def asked_to_serve() -> bool:
    """Say whether somebody has called `serve_metrics` in this process, with success or not: a load then leaves it alone."""
    return os.getpid() in _asked


_asked: set[int] = set()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without asking a name server for our own name, which the standard library does and which can take a minute."""
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away or asked nonsense: the host's stderr is not ours."""
        _log.debug("request of %s broke off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log: the host's stderr is not ours."""


def _server_class(address: str) -> type[WSGIServer]:
    return _Server6 if ":" in address else _Server


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def wrapped(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"Only /metrics is served here.\n"]
        return app(environ, start_response)

    return wrapped
