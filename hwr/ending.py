"""How a command ends.

Owns the one place where failures become two lines and an exit status: 0 fine, 1 typed failure, 2 usage, 3 could not measure, 4 timeout,
70 internal, 128+N signal; the orderly end that a signal asks for; and what of the log projection a terminal sees. Promises a journal
event with the same code as the two lines, unless telemetry is off. Refuses tracebacks for what has a name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from hwr import telemetry
from hwr.errors import EXIT_FAILURE, EXIT_INTERNAL, HwrError, OptionError
from hwr.options import BY_NAME
from hwr.outcomes import Role
from hwr.telemetry.failures import record_failure
from hwr.units import one_line
from hwr.usage import reader_left

_TELEMETRY: Final = BY_NAME["telemetry"]
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def ended(
    work: Callable[[], int], *, enabled: bool, run_dir: str | None = None, program: str = "hwr", failure_status: int = EXIT_FAILURE
) -> int:
    """Do the work of a command and return its exit status; with `enabled` a failure is an event of this process's journal.

    `failure_status` stands for a typed failure that has no status of its own: where 1 means that something was found, it is another.
    """
    try:
        return work()
    except HwrError as error:
        status = report_failure(error, enabled=enabled, run_dir=run_dir, program=program)
        return failure_status if status == EXIT_FAILURE else status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return reader_left()
    except Exception as error:  # noqa: BLE001  (the last line of defence: a name, a place to look, a status)
        what = f"{type(error).__name__}: {one_line(str(error))}"
        record_failure(HwrError(reason=type(error).__name__, message=what), fatal=True)
        where = telemetry.journal_directory()
        print(f"{program}: internal error: {what}", file=sys.stderr)
        print(f"Please report it with the journal{f' in {where}' if where else ''}; the traceback follows.", file=sys.stderr)
        traceback.print_exception(error)
        return EXIT_INTERNAL


def report_failure(error: HwrError, *, enabled: bool, run_dir: str | None = None, program: str = "hwr") -> int:
    """Say it in two lines, leave it in the journal, and return its status."""
    if enabled and telemetry.snapshot() is None:  # it failed before telemetry was configured
        telemetry.configure(run_dir=run_dir, role=Role.TOOL)
    record_failure(error, fatal=True)
    print(f"{program}: {error.cause}", file=sys.stderr)
    if error.way_out:
        print(error.way_out, file=sys.stderr)
    return error.exit_code


def telemetry_wanted(given: bool | None, environ: Mapping[str, str] | None = None) -> bool:
    """Say whether telemetry is on, as far as that is known before the options are composed."""
    if given is not None:
        return given
    text = (os.environ if environ is None else environ).get(_TELEMETRY.variable, "")
    try:
        return not text or bool(_TELEMETRY.kind.from_text(_TELEMETRY.variable, text))
    except OptionError:  # the composition refuses it in its own words
        return True


def show_logs(level: str | None, *, program: str = "hwr") -> None:
    """Show the log projection only to those who ask: without a handler, Python would print warnings beside our two lines."""
    logger = logging.getLogger("hwr")
    if level is None:
        logger.addHandler(logging.NullHandler())
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{program}: %(message)s"))
        handler.addFilter(lambda record: not hasattr(record, "hwr_event"))
        # What telemetry cannot tell by an event: that there is no journal to look for.
        logging.getLogger("hwr.telemetry").addHandler(handler)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


class Terminated(BaseException):
    """A signal asked for the end; unwinding closes what is open."""


@dataclass(slots=True)
class Stop:
    """The signal that asked for the end, 0 while none did."""

    signal: int = 0

    @property
    def exit_code(self) -> int:
        """The exit status that a shell expects."""
        return 128 + self.signal if self.signal else 0


@contextlib.contextmanager
def terminated(told: Callable[[], None] | None = None, *, ignore: Sequence[signal.Signals] = ()) -> Iterator[Stop]:
    """Turn SIGTERM and SIGINT (except those to `ignore`) into an orderly end of the block; `told` is called as the first arrives."""
    stop = Stop()

    def handler(number: int, _: FrameType | None) -> None:
        if stop.signal:  # it is ending already: a second exception would tear what the first one closes
            return
        stop.signal = number
        if told is not None:
            told()
        raise Terminated

    with handling(handler, ignore), contextlib.suppress(Terminated):
        yield stop


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None], ignore: Sequence[signal.Signals]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT (except those to `ignore`) in the block, and as before after it."""
    before = {number: signal.signal(number, signal.SIG_IGN if number in ignore else handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
