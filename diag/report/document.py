"""The JSON of a verb: one versioned object.

Owns the keys that every verb's document begins with, the text of any object that a verb prints or stores, and its way into a file.
Promises indented ASCII, base units as given, and a file that is complete or absent. Refuses NaN and infinities: they are no JSON, and
a figure that could not be had is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from diag.probes.files import replacing
from diag.report.findings import Finding
from diag.report.streams import NotWritten, out
from hwr.errors import errno_text
from hwr.units import printable

SCHEMA_VERSION: Final = 1
TOOL: Final = "hwr-diag"


def document(verb: str, findings: Iterable[Finding], **facts: Any) -> dict[str, Any]:
    """Return a verb's document: the common keys, then its own `facts`.

    Raises:
        ValueError: a fact has the name of a common key.
    """
    from importlib import metadata

    common = {"schema_version": SCHEMA_VERSION, "tool": TOOL, "verb": verb, "version": metadata.version("hwr-suite")}
    common["findings"] = [finding.to_json() for finding in findings]
    if taken := common.keys() & facts.keys():
        raise ValueError(f"common keys of every document: {', '.join(sorted(taken))}")
    return common | facts


def dumped(value: Mapping[str, Any]) -> str:
    """Return the text of an object, two blanks an indent, no line's end at its end.

    Raises:
        ValueError: NaN or an infinity.
        TypeError: a value that JSON does not have.
    """
    return json.dumps(value, indent=2, allow_nan=False)


def print_document(value: Mapping[str, Any]) -> None:
    """Print an object as the report, `document()`'s or one whose keys are somebody else's; a verb does so once."""
    out(dumped(value))


def write_document(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object to a file, in one piece: a reader sees the old one, the new one or none.

    Raises:
        NotWritten: the disk is full, the directory cannot be written.
    """
    write_bytes(path, (dumped(value) + "\n").encode("ascii"))


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file, in one piece.

    Raises:
        NotWritten: the disk is full, the directory cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise NotWritten(what=printable(str(path)), problem=errno_text(error)) from error
