"""Who may ask: names and bcrypt hashes.

Owns the check of HTTP Basic credentials. Promises that a name which does not exist costs as much as a wrong password, and that a right one
is hashed once: outcomes are remembered as keyed digests, in memory, a bounded number. Refuses to keep a password. Hashing takes tens of
milliseconds on purpose: `check` is for a worker thread, `remembered` for the loop.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import bcrypt

# Those that were right are at most one a user and never pushed out by guesses; wrong ones are remembered for a misconfigured scraper.
MAX_WRONG: Final = 256
# bcrypt takes no more; longer passwords count up to here, in this server as in Go's.
MAX_PASSWORD_BYTES: Final = 72
_SCHEME: Final = b"basic "


class Users:
    """The users of one configuration."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {name.encode(): digest.encode() for name, digest in hashes.items()}
        cost = max((int(digest[4:6]) for digest in self._hashes.values()), default=4)
        self._nobody = b"$2b$%02d$" % cost + b"." * 53  # the hash of no password that we know
        self._key = os.urandom(32)
        self._right: dict[bytes, bytes] = {}
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def remembered(self, authorization: bytes | None) -> bool | None:
        """Return the outcome for these credentials if it is known without hashing, else None."""
        pair = _pair(authorization)
        if pair is None:
            return False
        digest = self._digest(*pair)
        with self._lock:
            if self._right.get(pair[0]) == digest:
                return True
            if digest in self._wrong:
                self._wrong.move_to_end(digest)
                return False
        return None

    def check(self, authorization: bytes | None) -> bool:
        """Return whether a user has this password; slow."""
        pair = _pair(authorization)
        if pair is None:
            return False
        name, password = pair
        known = self._hashes.get(name)
        try:
            same = bcrypt.checkpw(password[:MAX_PASSWORD_BYTES], known or self._nobody)
        except ValueError:
            same = False
        right = same and known is not None
        digest = self._digest(name, password)
        with self._lock:
            if right:
                self._right[name] = digest
            else:
                self._wrong[digest] = None
                while len(self._wrong) > MAX_WRONG:
                    self._wrong.popitem(last=False)
        return right

    def _digest(self, name: bytes, password: bytes) -> bytes:
        return hashlib.blake2b(len(name).to_bytes(4, "little") + name + password, key=self._key, digest_size=32).digest()


def _pair(authorization: bytes | None) -> tuple[bytes, bytes] | None:
    if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    try:
        text = base64.b64decode(authorization[len(_SCHEME) :].strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    name, colon, password = text.partition(b":")
    return (name, password) if colon else None
