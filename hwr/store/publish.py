"""Publishing an artifact.

Owns the protocol from the build lock to the commit point. Promises: built invisibly in `tmp/`, hashed while written, every file durable
before its directory, READY last, one rename, then the parents' fsync, which is the commit (P1). Killed at any step, the next acquire is
a hit, or a miss and a rebuild, never a wrong hit (P2). Two builders of one key: one builds, the other joins (P3).
Refuses to touch a live model or a finished resolution: its result stands for itself.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr import digest
from hwr.checkpoint.identity import ArtifactIdentity
from hwr.errors import (
    ArtifactInvalid,
    DomainUnavailable,
    HwrError,
    IdentityCollision,
    PublicationFailed,
    ReadOnlyStore,
    StoreError,
    errno_text,
)
from hwr.outcomes import LockKind, PublicationOutcome, PublicationStage, QuarantineReason, ValidationLevel
from hwr.store import capacity, containment
from hwr.store.domain import Domain, fsync_directory
from hwr.store.layout import ARTIFACT_MODE, DIRECTORY_MODE, FILE_MODE, MANIFEST, READY
from hwr.store.locks import acquire, create, no_space
from hwr.store.lookup import judge
from hwr.store.manifest import Manifest, ReadyMarker, document_digest
from hwr.store.writer import ALIGNMENT, FILE_BYTES, PAGE_BYTES, FilePlan, PayloadWriter, TensorSource, plan_files
from hwr.telemetry import span
from hwr.telemetry.events import PublicationBegun, PublicationProgress, PublicationStageBegun
from hwr.telemetry.hub import Span
from hwr.units import short_key

TELL_SECONDS: Final = 0.25
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_OCCUPIED: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EPERM, errno.EACCES})


@dataclass(frozen=True, slots=True)
class Publication:
    """How a publication ended; a failure exactly with `failed`."""

    outcome: PublicationOutcome
    key: str
    content_digest: str | None = None
    payload_bytes: int = 0
    failure: HwrError | None = None

    def __post_init__(self) -> None:
        if (self.failure is not None) != (self.outcome is PublicationOutcome.FAILED):
            raise ValueError(f"{self.outcome} {'without' if self.failure is None else 'with'} a failure")


def publish(
    domain: Domain,
    identity: ArtifactIdentity,
    sources: Sequence[TensorSource],
    *,
    aliases: dict[str, str] | None = None,
    unchanged: Callable[[], None] | None = None,
    file_bytes: int = FILE_BYTES,
) -> Publication:
    """Publish the tensors under the identity's key; never raises a typed failure, it returns it.

    `unchanged` is called before anything becomes visible: it raises if the canonical checkpoint is no longer the one that the identity
    was made of. Bytes are streamed: memory does not grow with the model.
    """
    key = identity.key
    try:
        plans = plan_files(sources, aliases=tuple(aliases or ()), file_bytes=file_bytes)
        size = sum(plan.size for plan in plans)
        with span(PublicationBegun(key=key, planned_bytes=size, tensors=len(sources))) as publishing:
            try:
                result = _Publisher(domain, identity, plans, aliases or {}, unchanged, publishing).run()
            except OSError as error:
                raise _typed(error, domain, key, "publication") from error
            publishing.add(
                result=result.outcome,
                bytes=result.payload_bytes,
                tensors=len(sources),
                zero_byte_tensors=sum(1 for plan in plans for one in plan.placed if not one.nbytes),
                filler_tensors=sum(1 for plan in plans for one in plan.placed if one.source is None),
                content_digest=result.content_digest,
            )
    except HwrError as error:
        return Publication(PublicationOutcome.FAILED, key, failure=error)
    return result


class _Publisher:
    """One publication of one key."""

    def __init__(
        self,
        domain: Domain,
        identity: ArtifactIdentity,
        plans: Sequence[FilePlan],
        aliases: dict[str, str],
        unchanged: Callable[[], None] | None,
        publishing: Span,
    ) -> None:
        self.domain, self.identity, self.plans, self.aliases = domain, identity, plans, aliases
        self.unchanged, self.publishing = unchanged, publishing
        self.key = identity.key
        self.size = sum(plan.size for plan in plans)

    def run(self) -> Publication:
        domain, key = self.domain, self.key
        if not domain.writable:
            raise ReadOnlyStore(reason="read_only", root=str(domain.root), problem="the filesystem or its permissions refuse it")
        before = self._tree_there()
        with acquire(domain.layout.lock(LockKind.BUILD, key), LockKind.BUILD, exclusive=True, deadline=domain.deadline()):
            there = self._valid_already()
            if there is not None:
                # Another builder made it while we waited, or it was there all along.
                outcome = PublicationOutcome.ALREADY_PRESENT if self._tree_there() == before else PublicationOutcome.JOINED
                return Publication(outcome, key, there.content_digest, there.payload_bytes)
            self._clear_the_way()
            # Readers of a store that has become read-only or full cannot make the file that they lock.
            create(domain.layout.lock(LockKind.ARTIFACT, key))
            capacity.check(domain, key, self.size, len(self.plans))
            staging = domain.layout.new_temporary(key)
            try:
                manifest = self._build(staging)
                if self.unchanged is not None:
                    self.unchanged()
                outcome = self._commit(staging, manifest)
            except OSError as error:
                failure = _typed(error, domain, key, "publication")  # before the removal gives back what was missing
                containment.remove_tree(staging)
                raise failure from error
            except BaseException:
                # Not if it was renamed: then it is in `artifacts/`, and the failure says what became of it.
                containment.remove_tree(staging)
                raise
        return Publication(outcome, key, manifest.content_digest, manifest.payload_bytes)

    def _tree_there(self) -> int | None:
        """Return the inode of what is published under the key, None if nothing is."""
        try:
            return os.lstat(self.domain.layout.artifact(self.key)).st_ino
        except FileNotFoundError:
            return None

    def _valid_already(self) -> Manifest | None:
        """Return the manifest of a good artifact that is there, None if there is none, or one that must go."""
        path = self.domain.layout.artifact(self.key)
        if containment.denial(self.domain.layout, self.key) is not None:
            return None
        try:
            opened = judge(path, self.key, self.identity.to_json(), ValidationLevel.MANIFEST_AND_METADATA)
        except (FileNotFoundError, ArtifactInvalid):
            return None
        opened.close()
        return opened.manifest

    def _clear_the_way(self) -> None:
        path = self.domain.layout.artifact(self.key)
        if os.path.lexists(path):
            denied = containment.denial(self.domain.layout, self.key) is not None
            reason = QuarantineReason.VALIDATION_FAILURE if denied else QuarantineReason.PUBLICATION_FAILURE
            containment.quarantine(self.domain, self.key, reason)
        containment.remove_leftovers(self.domain, self.key)

    def _build(self, staging: Path) -> Manifest:
        staging.mkdir(mode=DIRECTORY_MODE)
        told = time.monotonic()

        def progress(done: int) -> None:
            nonlocal told
            if time.monotonic() - told >= TELL_SECONDS or done == self.size:
                told = time.monotonic()
                self.publishing.progress(PublicationProgress(done_bytes=done, planned_bytes=self.size))

        writer = PayloadWriter(staging, self.key, progress)
        written = [writer.write(plan) for plan in self.plans]
        tensors = tuple(sorted((tensor for _, some in written for tensor in some), key=lambda tensor: tensor.name))
        rows = ((t.name, t.kind.value, t.dtype, t.shape, t.digest) for t in tensors)
        manifest = Manifest(
            key=self.key,
            identity=self.identity.to_json(),
            tensors=tensors,
            files=tuple(file for file, _ in written),
            content_digest=digest.of_content(rows, self.aliases),
            aliases=self.aliases,
            alignment={"data": PAGE_BYTES, "tensors": ALIGNMENT},
        )
        raw = manifest.to_bytes()
        _write_durably(staging / MANIFEST, raw)
        ready = ReadyMarker(
            publication_id=uuid.uuid4().hex,
            manifest_digest=document_digest(raw),
            content_digest=manifest.content_digest,
            published_ns=time.time_ns(),
        )
        _write_durably(staging / READY, ready.to_bytes())
        return manifest

    def _commit(self, staging: Path, manifest: Manifest) -> PublicationOutcome:
        final = self.domain.layout.artifact(self.key)
        with span(PublicationStageBegun(stage=PublicationStage.HARDEN), stage=PublicationStage.HARDEN):
            fsync_directory(staging)  # the files in it are durable and read-only by now
        with span(PublicationStageBegun(stage=PublicationStage.RENAME), stage=PublicationStage.RENAME):
            if not self._rename(staging, final, manifest):
                return PublicationOutcome.JOINED
        try:
            with span(PublicationStageBegun(stage=PublicationStage.COMMIT), stage=PublicationStage.COMMIT):
                # Only now: a directory that is not writable cannot change its parent. Until then lookups see an unfinished publication.
                os.chmod(final, ARTIFACT_MODE)
                fsync_directory(final)
                fsync_directory(staging.parent)
                fsync_directory(final.parent)
                containment.lift_denial(self.domain, self.key)
        except OSError as error:
            failed = PublicationFailed(
                reason="commit",
                root=str(self.domain.root),
                key=short_key(self.key),
                step="commit",
                problem=errno_text(error),
                remedy="What was written was denied and moved to quarantine; look at the disk, then publish again.",
            )
            # Denied first: if the move fails too, nobody is served what may not survive a power cut.
            containment.deny(self.domain, self.key, failed)
            try:
                containment.quarantine(self.domain, self.key, QuarantineReason.PUBLICATION_FAILURE)
            except StoreError as second:
                raise DomainUnavailable(
                    reason="outcome_uncertain",
                    root=str(self.domain.root),
                    problem=f"the commit failed ({errno_text(error)}) and so did containing it: {second.cause}",
                ) from error
            raise failed from error
        return PublicationOutcome.PUBLISHED

    def _rename(self, staging: Path, final: Path, manifest: Manifest) -> bool:
        """Make it visible; False if somebody who does not take our lock has put the same content there meanwhile."""
        try:
            os.rename(staging, final)
        except OSError as error:
            if error.errno not in _OCCUPIED or not os.path.lexists(final):
                raise
            there = self._valid_already()
            if there is not None and there.content_digest == manifest.content_digest:
                containment.remove_tree(staging)
                return False
            containment.quarantine(self.domain, self.key, QuarantineReason.IDENTITY_COLLISION, source=staging)
            raise IdentityCollision(reason="other_content", root=str(self.domain.root), key=short_key(self.key)) from error
        return True


def _write_durably(path: Path, raw: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(raw)
        while len(view):
            view = view[os.write(fd, view) :]
        with span(PublicationStageBegun(stage=PublicationStage.FSYNC), stage=PublicationStage.FSYNC, bytes=len(raw)):
            os.fchmod(fd, FILE_MODE)
            os.fsync(fd)
    finally:
        os.close(fd)


def _typed(error: OSError, domain: Domain, key: str, step: str) -> HwrError:
    if error.errno in _FULL:
        return no_space(error, domain.root, "publishing")
    if error.errno == errno.EROFS:
        return ReadOnlyStore(reason="read_only", root=str(domain.root), problem=errno_text(error))
    return DomainUnavailable(
        reason=errno.errorcode.get(error.errno or 0, "os_error").lower(), root=str(domain.root), problem=f"{step}: {errno_text(error)}"
    )
