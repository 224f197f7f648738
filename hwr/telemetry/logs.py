"""The logging projection: the same events as stdlib log records.

Owns the text of a log line. Loggers are named `hwr.<room>`; records are emitted synchronously, right after the event was written.
Promises to install no handler and to set no level. Refuses facts that the event does not have.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from hwr.outcomes import Outcome, Severity, Transport, TransportReason
from hwr.telemetry.event import Begin, End, Event, Progress
from hwr.telemetry.events import ChunkRegistered, ChunkRegistering, MappingRegistering, TransportChosen
from hwr.units import bytes_text, seconds_text, short_key

_LEVELS: Final = {
    Severity.DEBUG: logging.DEBUG,
    Severity.INFO: logging.INFO,
    Severity.WARN: logging.WARNING,
    Severity.ERROR: logging.ERROR,
}
_loggers: Final[dict[str, logging.Logger]] = {}


def level_of(event: Event) -> int:
    """Return the stdlib level of an event; a pair that failed is at least a warning."""
    level = _LEVELS[event.SEV]
    if isinstance(event, End) and event.outcome != Outcome.OK:
        return max(level, logging.WARNING)
    return level


def severity_of(event: Event) -> Severity:
    """Return the severity that is written with an event."""
    return Severity.WARN if isinstance(event, End) and event.outcome != Outcome.OK and event.SEV is not Severity.ERROR else event.SEV


def project(event: Event, attrs: dict[str, Any]) -> None:
    """Emit the log record of an event, if somebody listens at its level.

    A handler of the host's that raises must not stop what emitted the event.
    """
    logger = _logger(event.NAME)
    level = level_of(event)
    if not logger.isEnabledFor(level):
        return
    line = text(event, attrs)
    with contextlib.suppress(Exception):  # the host's handler may raise anything
        logger.log(level, "%s", line, extra={"hwr_event": event.NAME, "hwr_attrs": attrs})


def text(event: Event, attrs: dict[str, Any]) -> str:
    """Return one line for a person: the noun, the verb, then the facts; a few events have a line of their own (R6)."""
    own = _LINES.get(type(event))
    line = own(event, attrs) if own is not None else None
    if line is not None:
        return line
    _, _, noun, verb = event.NAME.split(".")
    words = [noun.replace("_", " "), _verb(event, verb)]
    words += [
        f"{name.removesuffix('_bytes').removesuffix('_seconds')}={_value(name, value)}"
        for name, value in attrs.items()
        if name not in _HIDDEN
    ]
    if isinstance(event, End):
        words.append(f"in {_value('_seconds', attrs.get('seconds'))}")
    return " ".join(words)


def _registering(event: Event, attrs: dict[str, Any]) -> str:
    limit = attrs.get("limit_bytes")
    sizes = f"{attrs['planned_bytes']} bytes ({bytes_text(attrs['planned_bytes'])}) in {attrs['chunks']} chunks"
    budget = "none" if limit is None else f"{limit} bytes"
    return f"mapping registration begins: device {attrs['device']}, {attrs['ranges']} ranges, {sizes}, budget {budget}"


def _chunk(event: Event, attrs: dict[str, Any]) -> str | None:
    # The line of the begin precedes the call. A call that failed has no such line after it: its failure is told by another (R6).
    if isinstance(event, End) and event.outcome != Outcome.OK:
        return f"registration call {_verb(event, '')}: {attrs.get('problem') or attrs.get('error.reason')}"
    chunk = f"range {attrs['range']}/{attrs['ranges']}, chunk {attrs['chunk']}/{attrs['chunks']}, {attrs['bytes']} bytes"
    return f"{chunk}: registered in {attrs.get('seconds') or 0.0:.3f} s" if isinstance(event, End) else f"{chunk}: registering"


def _transport(event: Event, attrs: dict[str, Any]) -> str | None:
    if attrs["transport"] != Transport.STAGING:
        return None
    off = {TransportReason.MODE_DISABLED.value: "switched off by policy", TransportReason.PIN_OFF.value: "switched off by pin_cpu_memory"}
    why = off.get(attrs["reason"], f"not done ({attrs['reason']})")
    return f"registration {why}, using bounded host staging" + (f": {attrs['detail']}" if attrs.get("detail") else "")


_LINES: Final[dict[type[Event], Callable[[Event, dict[str, Any]], str | None]]] = {
    MappingRegistering: _registering,
    ChunkRegistering: _chunk,
    ChunkRegistered: _chunk,
    TransportChosen: _transport,
}
_HIDDEN: Final = frozenset({"outcome", "seconds"})
_ENDS: Final = {Outcome.OK: "done", Outcome.FAILED: "failed", Outcome.TIMEOUT: "timed out", Outcome.CANCELLED: "cancelled"}


def _logger(name: str) -> logging.Logger:
    room = name.split(".")[1]
    if room not in _loggers:
        _loggers[room] = logging.getLogger(f"hwr.{room}")
    return _loggers[room]


def _verb(event: Event, verb: str) -> str:
    if isinstance(event, Begin):
        return "begins"
    if isinstance(event, End):
        return _ENDS.get(event.outcome, "ended")
    return "goes on" if isinstance(event, Progress) else verb


def _value(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return bytes_text(value)
    if name.endswith("_seconds") and isinstance(value, int | float):
        return seconds_text(value)
    if name == "key":
        return short_key(str(value))
    if isinstance(value, list):
        return ",".join(str(item) for item in value) or "-"
    return "-" if value is None else str(value)
