"""One client of the port.

Owns a connection from its first byte to its last: the deadlines, the bounds of a request, the order of its answers. Promises that a client
which says too little, too much, too slowly or nonsense costs itself its connection and nobody else anything, and that it is told why while
it may still listen. Refuses to read on while an answer is under way, and to hold more of an answer than a piece of it in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ssl
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Final

import h11

from diag.node.server_pages import Asked, Page, refused
from diag.node.web_guard import WebGuard
from hwr.units import KIB

# A scraper sends its head in one packet; a node that pages may need a moment. Also for a TLS handshake and the body that nobody asked for.
HEAD_SECONDS: Final = 5.0
# Longer than the common interval of 15 s, so that a scraper keeps its connection.
IDLE_SECONDS: Final = 30.0
# For a whole answer of a few hundred KiB; a scraper's own time-out is 10 s.
WRITE_SECONDS: Final = 30.0
# Prometheus sends some 500 bytes; cookies and bearer tokens of a proxy stay below 16 KiB.
HEAD_BYTES: Final = 16 * KIB
BODY_BYTES: Final = 64 * KIB
# What is given to the kernel at once: beyond its own buffers no client makes us hold more than this.
PIECE_BYTES: Final = 64 * KIB
# After a refusal: what a client still sends is thrown away for so long, or the kernel would cut off the answer with a reset.
LINGER_SECONDS: Final = 1.0
LINGER_BYTES: Final = 256 * KIB

_BASE_HEADERS: Final = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))
_CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="hwr agent", charset="UTF-8"')


class Doing(StrEnum):
    """What a connection does; one that is only waited for is the first to go in a full house."""

    HEAD = "head"
    IDLE = "idle"
    ANSWER = "answer"


class Connection:
    """One client; `serve` is its whole life. `counted` is told the status of each answer, `check` hashes passwords."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        page: Callable[[Asked], Awaitable[Page]],
        guard: WebGuard | None,
        check: Callable[[bytes | None], Awaitable[bool | None]],
        counted: Callable[[int], None],
        doing: Callable[[Doing], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._page, self._guard, self._check, self._counted, self._doing = page, guard, check, counted, doing
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._fresh = True  # nothing came yet
        # Nothing of what was written stays with us once `drain` returns: the deadline of an answer is that of all its bytes.
        # (With 0, a TLS transport of Python 3.11 takes an empty buffer for a full one and waits for ever.)
        writer.transport.set_write_buffer_limits(high=1, low=0)

    async def serve(self) -> None:
        """Answer until either side has enough."""
        with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError, h11.LocalProtocolError):
            while await self._one():
                self._http.start_next_cycle()

    async def _one(self) -> bool:
        """Answer one request; return whether another may follow."""
        try:
            request = await self._head()
            if request is None:
                return False
            self._doing(Doing.ANSWER)
            problem = await self._body(request)
        except h11.RemoteProtocolError as error:
            await self._refuse(_page_of(error), "GET")
            return False
        except TimeoutError:
            await self._refuse(refused(HTTPStatus.REQUEST_TIMEOUT, "The request did not come in time."), "GET")
            return False
        method = request.method.decode("ascii")
        if problem is not None:
            await self._refuse(problem, method)
            return False
        page = await self._answer(request, method)
        await self._send(page, method)
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _head(self) -> h11.Request | None:
        """Return the next request's head; None if the client left, or said nothing for as long as a connection may be kept."""
        event = self._http.next_event()
        if event is h11.NEED_DATA and not self._http.trailing_data[0]:
            self._doing(Doing.IDLE)
            first = HEAD_SECONDS if self._fresh else IDLE_SECONDS
            try:
                async with asyncio.timeout(first):
                    await self._feed()
            except TimeoutError:
                return None
            event = self._http.next_event()
        self._fresh = False
        self._doing(Doing.HEAD)
        async with asyncio.timeout(HEAD_SECONDS):
            while event is h11.NEED_DATA:
                await self._feed()
                event = self._http.next_event()
        return event if isinstance(event, h11.Request) else None

    async def _feed(self) -> None:
        self._http.receive_data(await self._reader.read(HEAD_BYTES))

    async def _body(self, request: h11.Request) -> Page | None:
        """Throw a request's body away, or say why the request is refused."""
        headers = request.headers
        if not request.http_version.startswith(b"1."):
            return refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.0 and HTTP/1.1 are spoken here.")
        names = [name for name, _ in headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            return refused(HTTPStatus.BAD_REQUEST, "The body has two lengths.")
        if self._http.they_are_waiting_for_100_continue:
            return refused(HTTPStatus.EXPECTATION_FAILED, "No body is taken here.")
        received = 0
        async with asyncio.timeout(HEAD_SECONDS):
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    await self._feed()
                elif isinstance(event, h11.Data):
                    received += len(event.data)
                    if received > BODY_BYTES:
                        return refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "No body is taken here.")
                else:  # the end, or a CONNECT that waits for an answer
                    return None

    async def _answer(self, request: h11.Request, method: str) -> Page:
        headers = dict(request.headers)
        guard = self._guard
        if guard is not None:
            if not guard.admits(self._writer.get_extra_info("peercert")):
                return refused(HTTPStatus.FORBIDDEN, "The certificate has none of the names that may come in.")
            known = await self._check(headers.get(b"authorization"))
            if known is None:
                return refused(HTTPStatus.SERVICE_UNAVAILABLE, "Too many passwords are being checked.", ("Retry-After", "1"))
            if not known:
                return refused(HTTPStatus.UNAUTHORIZED, "A name and a password are needed.", _CHALLENGE)
        accept = b",".join(value for name, value in request.headers if name == b"accept")
        coding = b",".join(value for name, value in request.headers if name == b"accept-encoding")
        target = request.target.decode("latin-1")
        return await self._page(Asked(method, target, accept.decode("latin-1"), coding.decode("latin-1")))

    async def _send(self, page: Page, method: str, *, close: bool = False) -> None:
        own: Mapping[str, str] = {} if self._guard is None else self._guard.headers
        taken = {name.lower() for name in own}
        headers = [
            ("Date", email.utils.formatdate(usegmt=True)),
            ("Content-Type", page.content_type),
            ("Content-Length", str(len(page.body))),
            *((name, value) for name, value in _BASE_HEADERS if name.lower() not in taken),
            *page.headers,
            *own.items(),
        ]
        if close:
            headers.append(("Connection", "close"))
        reason = HTTPStatus(page.status).phrase
        head = self._http.send(h11.Response(status_code=page.status, reason=reason, headers=headers)) or b""
        self._counted(page.status)
        body = memoryview(b"" if method == "HEAD" else page.body)
        if len(body):
            self._http.send(h11.Data(data=page.body))
        self._http.send(h11.EndOfMessage())  # a body of known length has no bytes of its own around it
        async with asyncio.timeout(WRITE_SECONDS):
            self._writer.write(head + body[:PIECE_BYTES])  # a short answer is one packet
            await self._writer.drain()
            for begin in range(PIECE_BYTES, len(body), PIECE_BYTES):
                self._writer.write(body[begin : begin + PIECE_BYTES])
                await self._writer.drain()

    async def _refuse(self, page: Page, method: str) -> None:
        """Say no and end the connection in a way that lets the answer arrive."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        await self._send(page, method, close=True)
        with contextlib.suppress(TimeoutError, ConnectionError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(LINGER_SECONDS):
                left = LINGER_BYTES
                while left > 0 and (data := await self._reader.read(PIECE_BYTES)):
                    left -= len(data)


def _page_of(error: h11.RemoteProtocolError) -> Page:
    status = error.error_status_hint
    if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return refused(status, f"A request's head may have {HEAD_BYTES} bytes.")
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return refused(status, "This transfer encoding is not known.")
    return refused(HTTPStatus.BAD_REQUEST, "This is no HTTP request; plain HTTP/1.0 and HTTP/1.1 are spoken here.")
