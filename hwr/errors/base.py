"""The root of the tree of failures, and what stands beside it.

Owns `HwrError`, the exit statuses and the third value. A class's docstring is its message template: the first line is the cause,
the second what to do. Promises a stable `code`, a `stage`, `retryable` (preferred may fall back) and an `exit_code`.
Refuses a bare `Exception`, and text that a terminal could not take: details are escaped when the message is built.
"""

from __future__ import annotations

import errno as errno_names
import inspect
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from hwr.outcomes import FailureCode, ResolutionStage
from hwr.units import one_line

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_NOT_MEASURED = 3
EXIT_TIMEOUT = 4
EXIT_INTERNAL = 70


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The third value beside a result and a raise: it could not be known, and this is why."""

    reason: str

    def __bool__(self) -> bool:
        return False


class HwrError(Exception):
    """The Host Weight Runtime failed: {message}
    Look at the journal's last events for what it was doing."""

    code: ClassVar[FailureCode] = FailureCode.INTERNAL
    stage: ClassVar[ResolutionStage] = ResolutionStage.CONFIGURATION
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = EXIT_FAILURE

    def __init__(self, *, reason: str = "", **details: Any) -> None:
        """Build the message from the class's docstring.

        `reason` is a word of the second closed set of this code; `details` fill the template.
        """
        self.reason = str(reason)
        self.recorded = False  # whether an event has told of it: a failure that travels through rooms counts once
        self.details: dict[str, Any] = {"reason": reason, **details}
        shown = {key: one_line(value, 2000) if isinstance(value, str) else value for key, value in self.details.items()}
        template = type(self).__doc__
        if template is None:  # python -OO strips docstrings: less well said, and nothing lost
            message = f"{self.code}: " + ", ".join(f"{name}={value}" for name, value in shown.items() if value != "")
        else:
            message = inspect.cleandoc(template).format_map(shown)
        super().__init__(message)

    @property
    def cause(self) -> str:
        """The first line: what happened."""
        return str(self).partition("\n")[0]

    @property
    def way_out(self) -> str:
        """The second line: what to do."""
        return str(self).partition("\n")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.details)


def _rebuild(kind: type[HwrError], details: dict[str, Any]) -> HwrError:
    return kind(**details)


def errno_text(error: OSError) -> str:
    """Name an operating-system error: `EACCES (Permission denied)`."""
    if error.errno is None:
        return one_line(str(error))
    return f"{errno_names.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"
