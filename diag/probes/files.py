"""How a file comes to be: whole, or not at all.

Owns the name aside and the rename, and the directory that is made. Promises that a reader sees the old file, the new one or none, and that
nothing is left aside whatever went wrong. Refuses to say it to people: `OSError` passes through, with a word that fits.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file that takes the place of `path` when the block ends, unless it raises.

    Raises:
        OSError: the disk is full, the directory cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")  # two processes that write the same file do not share it
    try:
        with aside.open("wb") as file:
            yield file
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that is on its way says more
            aside.unlink(missing_ok=True)
        raise


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, if need be.

    Raises:
        NotADirectoryError: something else has the name; mkdir(2) says EEXIST, of which nobody can make anything.
        OSError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
