"""The logging projection: the same events as stdlib log records.

Owns the text of a log line. Loggers are named `hwr.<room>`; records are emitted synchronously, right after the event was written.
Promises to install no handler and to set no level. Refuses facts that the event does not have.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

from hwr.outcomes import Outcome, Severity
from hwr.telemetry.event import Begin, End, Event, Progress
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
    """Return one line for a person: the noun, the verb, then the facts."""
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
