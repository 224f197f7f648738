"""The names in a store.

Owns where everything lies below a root, and the permissions it has. Promises that a key is 64 hex digits before it becomes part of
a path. Refuses I/O beyond building paths; whoever opens something follows no link.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from hwr.outcomes import LockKind, QuarantineReason

DIRECTORY_MODE: Final = 0o700
ARTIFACT_MODE: Final = 0o555
FILE_MODE: Final = 0o444
LOCK_MODE: Final = 0o600

DOMAIN: Final = "domain.json"
POLICY: Final = "domain-policy.json"
READY: Final = "READY.json"
MANIFEST: Final = "manifest.json"
PAYLOAD_SUFFIX: Final = ".safetensors"

KEY: Final = re.compile(r"[0-9a-f]{64}\Z")
TEMPORARY: Final = re.compile(r"([0-9a-f]{64})\.(\d+)\.([0-9a-f-]{32,36})\Z")
QUARANTINED: Final = re.compile(r"([0-9a-f]{64})\.([a-z_-]+)\.([0-9a-f-]{32,36})\Z")
# One safe base name: no separator, no leading dot.
PAYLOAD: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors\Z")


def check_key(key: str) -> str:
    """Return the key.

    Raises:
        ValueError: it is not 64 lower-case hex digits.
    """
    if not KEY.match(key):
        raise ValueError(f"not an artifact key: {key!r}")
    return key


@lru_cache(maxsize=256)
def _kept(directory: Path, name: str) -> Path:
    """Join what every acquire joins again. pathlib interns each part of a path: parts that die and come back wear out the interpreter's
    table of interned strings, which then is enlarged by megabytes.
    """
    return directory / name


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The paths below one root."""

    root: Path

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory that a store has, parents first."""
        return (self.root, self.locks, self.artifacts, self.temporary, self.quarantine, self.deny, self.digests.parent, self.digests)

    @property
    def domain(self) -> Path:
        """The document that says what the store is."""
        return self.root / DOMAIN

    @property
    def policy(self) -> Path:
        """The document that says which limits it was made with."""
        return self.root / POLICY

    @property
    def locks(self) -> Path:
        """Lock files; never deleted, since their inode is the protocol."""
        return self.root / "locks"

    @property
    def artifacts(self) -> Path:
        """Published artifacts, one directory a key."""
        return self.root / "artifacts"

    @property
    def temporary(self) -> Path:
        """Publications in progress, and what dead builders left."""
        return self.root / "tmp"

    @property
    def quarantine(self) -> Path:
        """Trees that were moved out of `artifacts/`."""
        return self.root / "quarantine"

    @property
    def deny(self) -> Path:
        """Deny markers, one a key."""
        return self.root / "deny"

    @property
    def digests(self) -> Path:
        """The source digest cache."""
        return self.root / "source-digests-v1" / "entries"

    def artifact(self, key: str) -> Path:
        """Return the directory of an artifact."""
        return _kept(self.artifacts, check_key(key))

    def deny_marker(self, key: str) -> Path:
        """Return the path of a deny marker."""
        return _kept(self.deny, f"{check_key(key)}.json")

    def lock(self, kind: LockKind, key: str | None = None) -> Path:
        """Return the path of a lock file."""
        if kind is LockKind.DOMAIN_INIT:
            return self.locks / "domain-init.lock"
        if kind is LockKind.ADMISSION:
            return self.locks / "domain-build.lock"
        if kind not in (LockKind.BUILD, LockKind.ARTIFACT) or key is None:
            raise ValueError(f"no lock file for {kind}")
        return _kept(self.locks, f"{check_key(key)}.{kind}.lock")

    def new_temporary(self, key: str) -> Path:
        """Return a fresh name for a publication of this process."""
        return self.temporary / f"{check_key(key)}.{os.getpid()}.{uuid.uuid4().hex}"

    def new_quarantine(self, key: str, reason: QuarantineReason) -> Path:
        """Return a fresh name for a tree that is set aside."""
        return self.quarantine / f"{check_key(key)}.{reason}.{uuid.uuid4().hex}"
