"""What is served at which path.

Owns the paths, their methods and the statuses of what is refused. Promises an answer to every request, in a few lines that say what is
served, and nothing of what the client sent in it. Refuses everything but GET and HEAD, and paths that only look like one of ours.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol

from diag.node import health
from diag.node.health import Health
from diag.node.server_bodies import Bodies, Unmade
from diag.node.snapshot import NodeSnapshot
from hwr.units import one_line

PLAIN: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
_MAX_RANK_DIGITS: Final = 9

PATHS: Final[Mapping[str, str]] = {
    "/metrics": "every worker's metrics and the node's, text format or OpenMetrics",
    "/startupz": "JSON: where was looked, what was found, and each rank; ?rank=N (&engine=E) is 503 only if it is stuck",
    "/livez": "200 while the agent itself looks",
    "/readyz": "200 once every part has been looked at",
    "/snapshot": "JSON: everything",
}
_SERVED: Final = "".join(f"{path:<10} {what}\n" for path, what in PATHS.items())


class Answers(Protocol):
    """What the port is told. All are quick and touch neither disk nor /proc; `exposition` may take some 20 ms and is called in a thread."""

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        """Render the newest snapshot: body and content type; None before the first."""

    def snapshot(self) -> NodeSnapshot | None:
        """Return the newest snapshot; None before the first."""

    def alive(self) -> Health:
        """Say whether the agent itself works."""

    def ready(self) -> Health:
        """Say whether every part has been looked at."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request's head, as far as it matters."""

    method: str
    target: str
    accept: str = ""
    accept_encoding: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """One answer; `headers` beside its type and length."""

    status: int
    body: bytes
    content_type: str = PLAIN
    headers: tuple[tuple[str, str], ...] = field(default=())


def refused(status: int, text: str, *headers: tuple[str, str]) -> Page:
    """Return a short answer that says no."""
    return Page(status, f"{text}\n".encode(), PLAIN, headers)


class Pages:
    """Finds the page for a request."""

    def __init__(self, answers: Answers, bodies: Bodies, boot_ns: Callable[[], int]) -> None:
        self._answers, self._bodies, self._boot_ns = answers, bodies, boot_ns

    async def page(self, asked: Asked) -> Page:
        """Return the answer to a request; whatever the agent raises is one too."""
        if asked.method not in ("GET", "HEAD"):
            return refused(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD are served here.", ("Allow", "GET, HEAD"))
        path, query = split_target(asked.target)
        try:
            match path:
                case "/metrics":
                    return await self._metrics(asked)
                case "/snapshot":
                    return await self._snapshot(asked)
                case "/startupz":
                    return self._startup(query)
                case "/livez":
                    return _of_health(self._answers.alive())
                case "/readyz":
                    return _of_health(self._answers.ready())
                case "/":
                    return Page(HTTPStatus.OK, f"The node agent of the Host Weight Runtime.\n\n{_SERVED}".encode())
        except Exception as error:  # noqa: BLE001 - the port goes on; the client hears of it
            return refused(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"This answer could not be made: {one_line(f'{type(error).__name__}: {error}')}"
            )
        return refused(HTTPStatus.NOT_FOUND, f"Nothing is served at this path. There are:\n\n{_SERVED}".rstrip())

    async def _metrics(self, asked: Asked) -> Page:
        made = await self._bodies.exposition(asked.accept, zipped=accepts_gzip(asked.accept_encoding))
        if isinstance(made, Unmade):
            return _not_yet(made.problem)
        return Page(HTTPStatus.OK, made.body, made.content_type, _negotiated(made.zipped, "Accept, Accept-Encoding"))

    async def _snapshot(self, asked: Asked) -> Page:
        made = await self._bodies.snapshot(zipped=accepts_gzip(asked.accept_encoding))
        if isinstance(made, Unmade):
            return _not_yet(made.problem)
        return Page(HTTPStatus.OK, made.body, JSON, _negotiated(made.zipped, "Accept-Encoding"))

    def _startup(self, query: str) -> Page:
        chosen = startup_query(query)
        if isinstance(chosen, str):
            return _json(HTTPStatus.BAD_REQUEST, {"problem": chosen})
        snapshot = self._answers.snapshot()
        if snapshot is None:
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"problem": "no look has ended yet"}, ("Retry-After", "1"))
        status, body = health.startup(snapshot, *chosen, now_ns=self._boot_ns())
        return _json(status, body)


def split_target(target: str) -> tuple[str, str]:
    """Return path and query of a request target; a full URL counts by its path, whatever host it names."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        authority, slash, path = rest.partition("/")
        if not slash:
            return "/", authority.partition("?")[2]
        target = slash + path
    path, _, query = target.partition("?")
    return urllib.parse.unquote(path), query


def startup_query(query: str) -> tuple[int | None, str | None] | str:
    """Return rank and engine that `/startupz` is asked for, or what is wrong: a misspelt probe must not always be well."""
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, max_num_fields=8)
    except ValueError:
        return "too many parameters; rank=N and engine=E are known"
    chosen: dict[str, str] = {}
    for name, value in pairs:
        if name not in ("rank", "engine"):
            return "a parameter is not known; rank=N and engine=E are"
        if name in chosen:
            return f"{name} comes twice"
        chosen[name] = value
    rank, engine = chosen.get("rank"), chosen.get("engine")
    if rank is None:
        return "engine=E needs rank=N" if engine is not None else (None, None)
    if not (rank.isascii() and rank.isdecimal() and len(rank) <= _MAX_RANK_DIGITS):
        return "rank is no whole number"
    return int(rank), engine


def accepts_gzip(header: str) -> bool:
    """Say whether an Accept-Encoding takes gzip: named, or by `*`, and not with weight 0."""
    weights: dict[str, bool] = {}
    for item in header.lower().split(","):
        coding, *parameters = (part.strip() for part in item.split(";"))
        weights[coding] = not any(_weight_is_zero(parameter) for parameter in parameters)
    return weights.get("gzip", weights.get("*", False))


def _weight_is_zero(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    if name.strip() != "q":
        return False
    try:
        return float(value) == 0
    except ValueError:
        return True


def _negotiated(zipped: bool, vary: str) -> tuple[tuple[str, str], ...]:
    return (("Vary", vary), ("Content-Encoding", "gzip")) if zipped else (("Vary", vary),)


def _of_health(found: Health) -> Page:
    return Page(HTTPStatus.OK if found.ok else HTTPStatus.SERVICE_UNAVAILABLE, f"{one_line(found.text, 2000)}\n".encode())


def _not_yet(problem: str) -> Page:
    return refused(HTTPStatus.SERVICE_UNAVAILABLE, problem, ("Retry-After", "1"))


def _json(status: int, value: Mapping[str, Any], *headers: tuple[str, str]) -> Page:
    text = json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False)
    return Page(status, f"{text}\n".encode(), JSON, headers)
