"""Options that are not allowed."""

from __future__ import annotations

from hwr.errors.base import EXIT_USAGE, HwrError
from hwr.outcomes import FailureCode


class OptionError(HwrError, ValueError):
    """{option}: {problem}
    {remedy}"""

    code = FailureCode.INVALID_CONFIG
    exit_code = EXIT_USAGE

    def __init__(self, *, option: str, problem: str, remedy: str, reason: str = "") -> None:
        super().__init__(reason=reason, option=option, problem=problem, remedy=remedy)


class OptionTypeError(HwrError, TypeError):
    """{option}: {problem}
    {remedy}"""

    code = FailureCode.INVALID_CONFIG
    exit_code = EXIT_USAGE

    def __init__(self, *, option: str, problem: str, remedy: str, reason: str = "") -> None:
        super().__init__(reason=reason, option=option, problem=problem, remedy=remedy)


class NotImplementedYet(HwrError):
    """{what} is not implemented in this version.
    {remedy}"""

    code = FailureCode.UNSUPPORTED
    exit_code = EXIT_USAGE
