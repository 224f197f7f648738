"""Exit statuses of `hwr-diag`.

Owns their names and which one several answers make together. Promises that what could not be measured is never fine, nor hidden
behind findings: an incomplete answer is no answer. Refuses statuses that are not of this set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from enum import IntEnum
from typing import Final

from hwr.errors import EXIT_FAILURE, EXIT_INTERNAL, EXIT_NOT_MEASURED, EXIT_OK, EXIT_TIMEOUT, EXIT_USAGE


class Exit(IntEnum):
    """What a verb may answer a shell; a signal N is 128 + N."""

    FINE = EXIT_OK
    FINDINGS = EXIT_FAILURE
    USAGE = EXIT_USAGE
    NOT_MEASURED = EXIT_NOT_MEASURED
    TIMEOUT = EXIT_TIMEOUT
    INTERNAL = EXIT_INTERNAL


_SIGNALS: Final = 128
_LAST_SIGNAL: Final = 64  # signal(7): SIGRTMAX

# A timeout comes after what more time would not make good.
_FIRST: Final = (Exit.INTERNAL, Exit.USAGE, Exit.NOT_MEASURED, Exit.TIMEOUT, Exit.FINDINGS, Exit.FINE)


def of_findings(findings: Sized) -> Exit:
    """Return the status of a complete answer."""
    return Exit.FINDINGS if len(findings) else Exit.FINE


def combined(statuses: Iterable[int]) -> int:
    """Return the one status of several answers: a signal, then internal, usage, not measured, timeout, findings, fine.

    No answer at all, and a status that is none of ours, are "not measured".
    """
    known = [status if _is_ours(status) else Exit.NOT_MEASURED for status in statuses]
    signals = [status for status in known if status > _SIGNALS]
    if signals:
        return int(signals[0])
    return int(next((status for status in _FIRST if status in known), Exit.NOT_MEASURED))


def _is_ours(status: int) -> bool:
    return status in _FIRST or _SIGNALS < status <= _SIGNALS + _LAST_SIGNAL
