"""What lies where a weight file should be, when it is something else.

Owns the recognition of Git LFS pointers, error pages and other formats by their first bytes. Promises that text from
outside comes out on one printable line. Refuses I/O, and the judgement whether a file is safetensors: a legal length
word may look like a magic (`PK` does), so whoever asks knows already that it is none.
"""

from __future__ import annotations

import re
from typing import Final

from hwr.errors import LfsPointer, NotSafetensorsHtml
from hwr.units import one_line

SNIFF_BYTES: Final = 1024  # Git LFS promises pointers below this; error pages say what they are sooner
_MAGICS: Final = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it (a renamed .bin or .pt?)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "gzip-compressed"),
    (b"GGUF", "a GGUF model"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (b"\xfd7zXZ", "xz-compressed"),
    (b"BZh", "bzip2-compressed"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x7fELF", "an ELF binary"),
)
# The aliases that Git LFS itself still accepts: git-media and hawser are its older names.
_POINTER: Final = re.compile(r"version\s+\S*(git-lfs|hawser|git-media)", re.IGNORECASE)
_POINTER_SIZE: Final = re.compile(r"^size[ \t]+(\d{1,20})\s*$", re.MULTILINE)
_HTML: Final = re.compile(r"<(!doctype\s+html|!--|html|head|body|title|script|meta|center|div|h1|p)\b|<!--", re.IGNORECASE)


def refuse_pointer_or_page(prefix: bytes | bytearray, *, file: str, file_bytes: int) -> None:
    """Refuse what a download tends to leave in place of a file; `prefix` is its first `SNIFF_BYTES` bytes.

    Raises:
        LfsPointer: with the size that the pointer promises, or None if the pointer is cut.
        NotSafetensorsHtml: an HTML page.
    """
    text = _as_text(prefix)
    if _POINTER.match(text):
        size = _POINTER_SIZE.search(text)
        raise LfsPointer(file=file, expected_bytes=int(size[1]) if size else None, file_bytes=file_bytes)
    if text.startswith("<") and _HTML.search(text):
        raise NotSafetensorsHtml(file=file, file_bytes=file_bytes)


def foreign_kind(prefix: bytes | bytearray) -> str:
    """Say what a file is that begins with `prefix` and is not safetensors, as the second half of a sentence; empty if unknown."""
    if not prefix:
        return "it is empty"
    if not prefix.strip(b"\0"):
        return "it begins with zeros: space was set aside, the content never arrived"
    for magic, found in _MAGICS:
        if prefix.startswith(magic):
            return f"it is {found}"
    if prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "it is a Python pickle (a renamed .bin or .pt?)"
    if prefix[257:262] == b"ustar":
        return "it is a tar archive"
    text = _as_text(prefix)
    if not text:
        return ""
    kinds = {"<": "an XML document", "{": "a JSON document", "[": "a JSON document"}
    return f"it is {kinds.get(text[0], 'text')}, perhaps an error message: {one_line(text, 60)}"


def _as_text(prefix: bytes | bytearray) -> str:
    """Decode what is plainly text, without byte order mark and leading blanks; otherwise return nothing."""
    if prefix[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = prefix.decode("utf-16", "ignore")
    else:  # bytes that are no UTF-8 become surrogates, which are not printable
        text = prefix.decode("utf-8-sig", "surrogateescape")
    text = text.lstrip(" \t\r\n").replace("\r", "\n")
    start = text[:16]
    return text if start and all(character.isprintable() or character in "\n\t" for character in start) else ""
