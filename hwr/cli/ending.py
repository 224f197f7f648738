"""How a command ends.

Owns the one place where failures become two lines and an exit status: 0 fine, 1 typed failure, 2 usage, 3 could not measure, 4 timeout,
70 internal, 128+N signal; and what of the log projection a terminal sees. Promises a journal event with the same code as the two lines,
unless telemetry is off. Refuses tracebacks for what has a name.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Final

from hwr import telemetry
from hwr.errors import EXIT_INTERNAL, HwrError, OptionError
from hwr.options import BY_NAME
from hwr.outcomes import Role
from hwr.telemetry.failures import record_failure
from hwr.units import one_line

_TELEMETRY: Final = BY_NAME["telemetry"]


def open_streams() -> None:
    """Stand in for standard streams that were closed before we started: `print` would take another one for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the life of the process)


def ended(work: Callable[[], int], *, enabled: bool, run_dir: str | None = None) -> int:
    """Do the work of a command and return its exit status; with `enabled` a failure is an event of this process's journal."""
    try:
        return work()
    except HwrError as error:
        return report_failure(error, enabled=enabled, run_dir=run_dir)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; so may the interpreter's own complaint about it
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001  (the last line of defence: a name, a place to look, a status)
        what = f"{type(error).__name__}: {one_line(str(error))}"
        record_failure(HwrError(reason=type(error).__name__, message=what), fatal=True)
        where = telemetry.journal_directory()
        print(f"hwr: internal error: {what}", file=sys.stderr)
        print(f"Please report it with the journal{f' in {where}' if where else ''}; the traceback follows.", file=sys.stderr)
        traceback.print_exception(error)
        return EXIT_INTERNAL


def report_failure(error: HwrError, *, enabled: bool, run_dir: str | None = None) -> int:
    """Say it in two lines, leave it in the journal, and return its status."""
    if enabled and telemetry.snapshot() is None:  # it failed before telemetry was configured
        telemetry.configure(run_dir=run_dir, role=Role.TOOL)
    record_failure(error, fatal=True)
    print(f"hwr: {error.cause}", file=sys.stderr)
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


def show_logs(level: str | None) -> None:
    """Show the log projection only to those who ask: without a handler, Python would print warnings beside our two lines."""
    logger = logging.getLogger("hwr")
    if level is None:
        logger.addHandler(logging.NullHandler())
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hwr: %(message)s"))
        handler.addFilter(lambda record: not hasattr(record, "hwr_event"))
        # What telemetry cannot tell by an event: that there is no journal to look for.
        logging.getLogger("hwr.telemetry").addHandler(handler)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
