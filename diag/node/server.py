"""The port: who may connect, and how many.

Owns the listening socket, the thread and the loop that serve it, and the count of clients and answers. Promises that a house full of idle
or dribbling clients lets a scraper in (the oldest of those that are only waited for goes), that running out of descriptors passes, and
that `close` ends in bounded time (N7). Refuses to share the port with another process, and to write a line per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from diag.node.server_bodies import Bodies
from diag.node.server_connection import HEAD_SECONDS, PIECE_BYTES, Connection, Doing
from diag.node.server_pages import Answers, Pages
from diag.node.web_guard import WebGuard
from diag.node.webconfig import WebConfig
from hwr.errors import OptionError, errno_text
from hwr.telemetry.clock import boot_ns
from hwr.units import one_line, printable

__all__ = ["Answers", "Server"]

# Scrapers, probes and people are a handful; half of the usual limit of 1024 descriptors, the rest is for reading.
MAX_CONNECTIONS: Final = 512
# Of passwords that wait for their turn: at some 60 ms each the last of them waits two seconds.
MAX_CHECKS: Final = 32
BACKOFF_SECONDS: Final = 0.2
REFRESH_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log: Final = logging.getLogger("hwr.node")


class _Client:
    """One accepted socket: since when it does what, and the task that serves it."""

    __slots__ = ("doing", "handed_over", "socket", "task", "transport")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.doing = Doing.HEAD
        self.handed_over = False  # the loop closes the socket from then on
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Cut it off without waiting for what it has not read."""
        if self.transport is None and self.handed_over:
            # In a handshake. Cancelled there, a transport that has not begun yet would never be closed: let it find the end by itself.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            return
        if self.transport is not None:
            self.transport.abort()
        else:
            self.socket.close()
        if self.task is not None:
            self.task.cancel()


class Server:
    """Serves `answers` at `addr:port` from a thread of its own; port 0 takes a free one."""

    def __init__(self, answers: Answers, addr: str = "127.0.0.1", port: int = 0, web: WebConfig | None = None) -> None:
        self._answers, self._addr, self._asked_port = answers, addr.strip().removeprefix("[").removesuffix("]"), port
        self._guard = None if web is None else WebGuard(web)
        self._requests: Counter[int] = Counter()
        self._clients: dict[_Client, None] = {}  # by how long each has been doing what it does: the first does it longest
        self._render = ThreadPoolExecutor(1, "hwr-render")
        self._checks = ThreadPoolExecutor(1, "hwr-passwords")
        self._checking = 0
        self._starved = 0
        self._refreshed_at: float | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._main: asyncio.Task[None] | None = None
        self.port = port

    @property
    def url(self) -> str:
        """Where it is, without a path."""
        host = f"[{self._addr}]" if ":" in self._addr else self._addr
        scheme = "http" if self._guard is None or self._guard.context is None else "https"
        return f"{scheme}://{host}:{self.port}"

    @property
    def requests(self) -> Mapping[int, int]:
        """How many answers had which status."""
        return dict(self._requests)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    @property
    def starved(self) -> int:
        """How often there was no descriptor to accept with."""
        return self._starved

    @property
    def web_problem(self) -> str | None:
        """Why the web configuration's files, which changed, are not in force."""
        return None if self._guard is None else self._guard.problem

    def start(self) -> None:
        """Listen and serve.

        Raises:
            OptionError: the port is taken, or the address is none of this machine's.
        """
        self._listener = listen(self._addr, self._asked_port)
        self.port = int(self._listener.getsockname()[1])
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="hwr-port", daemon=True)
        self._thread.start()
        started.wait()
        if self._failure is not None:
            self._listener.close()
            raise self._failure

    def close(self) -> None:
        """Stop answering, cut off who is connected, and free the port; idempotent."""
        if self._loop is not None and self._main is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._main.cancel)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._listener is not None:
            self._listener.close()
        for executor in (self._render, self._checks):
            executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, started: threading.Event) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._loop.set_exception_handler(_unheard)
                with contextlib.suppress(asyncio.CancelledError):
                    runner.run(self._serve(started))
        except OSError as error:  # no descriptors for a loop
            self._failure = error
        finally:
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        self._main = asyncio.current_task()
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        bodies = Bodies(self._answers.exposition, self._answers.snapshot, self._render)
        pages = Pages(self._answers, bodies, boot_ns)
        started.set()
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listener)
                except OSError as error:
                    # Out of descriptors: whoever is only waited for has one to give. Anything else was that client's own end.
                    if error.errno in _FULL:
                        self._starved += 1
                        self._make_room()
                        await asyncio.sleep(BACKOFF_SECONDS)
                    continue
                while len(self._clients) >= MAX_CONNECTIONS:
                    self._make_room()
                client = _Client(accepted)
                self._clients[client] = None
                client.task = loop.create_task(self._client(client, pages))
                await asyncio.sleep(0)  # accepting never waits while somebody is in the queue, and the others want to be served
        finally:
            ending = [client.task for client in self._clients if client.task is not None]
            for client in list(self._clients):
                client.end()
            if ending:
                await asyncio.wait(ending, timeout=CLOSE_SECONDS / 2)

    def _make_room(self) -> None:
        """End the client that has been waited for longest; if every one is being answered, the one that has been longest."""
        waited_for = (client for client in self._clients if client.doing is not Doing.ANSWER)
        client = next(waited_for, next(iter(self._clients), None))
        if client is not None:
            del self._clients[client]
            client.end()

    async def _client(self, client: _Client, pages: Pages) -> None:
        loop, guard = asyncio.get_running_loop(), self._guard
        try:
            client.socket.setblocking(False)
            with contextlib.suppress(OSError):
                client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if guard is not None:
                await self._refresh(guard)
            reader = asyncio.StreamReader(limit=PIECE_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            context = None if guard is None else guard.context
            handshake: dict[str, Any] = (
                {} if context is None else {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": HEAD_SECONDS}
            )
            client.handed_over = True
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, client.socket, ssl=context, **handshake)
            client.transport = transport
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            connection = Connection(
                reader,
                writer,
                pages.page,
                guard,
                self._check,
                lambda status: self._requests.update((status,)),
                functools.partial(self._doing, client),
            )
            await connection.serve()
            await self._goodbye(client, writer)
        except (OSError, EOFError):  # gone, or no handshake
            pass
        except asyncio.CancelledError:
            pass  # to make room, or at the end
        except Exception:  # noqa: BLE001 - one client's, whatever it is
            _log.debug("a client's connection broke off", exc_info=True)
        finally:
            self._clients.pop(client, None)
            if client.transport is not None:
                client.transport.abort()
            elif not client.handed_over:
                client.socket.close()

    async def _goodbye(self, client: _Client, writer: asyncio.StreamWriter) -> None:
        """Close in order, if the client takes part in it in time; one that has not taken its answer never would."""
        if writer.transport.get_write_buffer_size():
            return
        self._doing(client, Doing.IDLE)
        writer.close()
        async with asyncio.timeout(HEAD_SECONDS):
            await writer.wait_closed()

    def _doing(self, client: _Client, doing: Doing) -> None:
        if client in self._clients and client.doing is not doing:
            client.doing = doing
            del self._clients[client]  # to the end of the queue
            self._clients[client] = None

    async def _refresh(self, guard: WebGuard) -> None:
        """Let changed files count, without waiting for a disk that does not answer."""
        loop = asyncio.get_running_loop()
        if self._refreshing is not None and not self._refreshing.done():
            return  # somebody waits already, or the disk hangs
        if self._refreshed_at is not None and loop.time() - self._refreshed_at < REFRESH_SECONDS:
            return
        self._refreshed_at, self._refreshing = loop.time(), (done := loop.create_future())

        def refresh() -> None:
            try:
                guard.refresh()
            except Exception:  # noqa: BLE001 - the next change has its own chance
                _log.warning("the web configuration could not be read again", exc_info=True)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set_result, None)

        threading.Thread(target=refresh, name="hwr-web-config", daemon=True).start()
        await asyncio.wait({done}, timeout=REFRESH_SECONDS)

    async def _check(self, authorization: bytes | None) -> bool | None:
        """Say whether these credentials are good; None if too many wait to be checked."""
        guard = self._guard
        if guard is None:
            return True
        await self._refresh(guard)  # a password that was taken away does not live on in a connection that is kept
        users = guard.users
        if users is None:
            return True
        known = users.remembered(authorization)
        if known is not None:
            return known
        if self._checking >= MAX_CHECKS:
            return None
        self._checking += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._checks, users.check, authorization)
        finally:
            self._checking -= 1


def listen(addr: str, port: int) -> socket.socket:
    """Return a socket that listens there, IPv4 first where a name has both.

    Raises:
        OptionError: it cannot.
    """
    try:
        found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:  # the others: no host name, no port
        raise OptionError(
            option="--addr",
            problem=f"{printable(addr, 200)} is no address: {one_line(str(error))}",
            remedy="Give an address of this machine.",
        ) from error
    family, kind, protocol, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            everything = ipaddress.ip_address(str(where[0]).partition("%")[0]).is_unspecified
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if everything else 1)
        listener.bind(where)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _no_port(addr, port, error) from error
    return listener


def _no_port(addr: str, port: int, error: OSError) -> OptionError:
    where = f"{printable(addr, 200)}:{port}"
    if error.errno == errno.EADDRINUSE:
        return OptionError(
            option="--port",
            problem=f"{where} is taken",
            remedy="Another agent may run (agent.json in the run directory says where); or give another --port; 0 takes a free one.",
        )
    if error.errno == errno.EACCES:
        return OptionError(
            option="--port",
            problem=f"{where} is reserved: {errno_text(error)}",
            remedy="Give a --port of 1024 or above; 9478 is the usual one.",
        )
    return OptionError(option="--addr", problem=f"cannot listen on {where}: {errno_text(error)}", remedy="Give an address of this machine.")


def _unheard(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say nothing of a handshake that failed: standard error is the operator's."""
    _log.debug("the port: %s", context.get("message"), exc_info=context.get("exception"))
