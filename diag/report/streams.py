"""Where a verb talks: standard output is the report, standard error progress and notes.

Owns both ways. Promises that the report is out, or fails as what it is, before the verb ends; that progress and notes never end a
measurement; and that a line of them is printable. Refuses to know what is told.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import ClassVar, Final, TextIO

from hwr.errors import EXIT_NOT_MEASURED, HwrError, errno_text
from hwr.units import one_line
from hwr.usage import discard

PROGRAM: Final = "hwr-diag"
# Where nobody watches a line change, one now and then says that it goes on.
LINE_SECONDS: Final = 10.0
LASTING_COLUMNS: Final = 100
_CLEAR: Final = "\r\x1b[K"


class NotWritten(HwrError):
    """{what} could not be written: {problem}
    Make room, or say another place, and run it again."""

    exit_code: ClassVar[int] = EXIT_NOT_MEASURED


def out(text: str) -> None:
    """Print a part of the report, at once.

    Raises:
        BrokenPipeError: whoever read it has gone; `hwr.ending.ended` makes status 141 of it.
        NotWritten: it cannot be written, for another reason.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise NotWritten(what="the report", problem=errno_text(error)) from error


def refuse_output() -> None:
    """Have standard output refuse what is written, as the closed one that it stands for does: an answer that nobody gets is none."""
    descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


def note(text: str) -> None:
    """Tell something beside the report, in one line."""
    _err(sys.stderr, f"{PROGRAM}: note: {one_line(text, 1000)}\n")


class Progress:
    """How far it is: on a terminal one line that changes, elsewhere a line every ten seconds, nothing if `quiet`.

    Use it as a context, or call `close` before the report is printed: the changing line goes away.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._clock = clock
        self._terminal = not quiet and self._stream.isatty()
        self._last: float | None = None

    def tell(self, text: str, *, lasting: bool = False) -> None:
        """Say how far it is; `lasting` is for what stays to be read, cut to 100 columns, such as the end of one of many runs."""
        if self._quiet:
            return
        line, now = one_line(text, LASTING_COLUMNS - 1 if lasting else 1000), self._clock()  # a mark comes behind what was cut
        if self._terminal:
            # Cut by the reader's terminal, not wrapped by it: a wrapped line could not be cleared.
            _err(self._stream, f"{_CLEAR}{line}\n" if lasting else f"{_CLEAR}{line[: _columns() - 1]}")
        elif lasting or self._last is None or now - self._last >= LINE_SECONDS:
            _err(self._stream, f"{line}\n")
            self._last = now

    def close(self) -> None:
        """Take the changing line away."""
        if self._terminal:
            _err(self._stream, _CLEAR)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _err(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # ValueError: closed
        discard(stream)
