"""Values of arguments that are no options.

Owns the reading of counts and dtypes. Promises a refusal that names the argument and what is allowed.
Refuses torch: an argument is judged before anything is loaded.
"""

from __future__ import annotations

import argparse

from hwr.errors import OptionError
from hwr.loader.plan import CASTS


def whole(option: str, text: str, *, least: int) -> int:
    """Return the value of an argument that is a whole number.

    Raises:
        OptionError: it is not, or it is too small.
    """
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise OptionError(option=option, problem=f"{text!r} is not allowed", remedy=f"Give a whole number of at least {least}.")
    return value


def present(text: str) -> str:
    """Return an argument that must say something; for argparse."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is blank")
    return text


def one_dtype(text: str | None) -> str | None:
    """Return the dtype that was asked for, None if none was.

    Raises:
        OptionError: it is none that a model can be loaded in.
    """
    if text is not None and text not in CASTS:
        raise OptionError(option="--dtype", problem=f"{text!r} is not one of its values", remedy=f"Allowed: {', '.join(CASTS)}.")
    return text
