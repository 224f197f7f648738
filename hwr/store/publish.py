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
    NoSpace,
    PublicationFailed,
    ReadOnlyStore,
    StoreError,
    errno_text,
)
from hwr.outcomes import LockKind, PublicationOutcome, PublicationStage, QuarantineReason, ValidationLevel
from hwr.store import capacity, containment
from hwr.store.domain import Domain, fsync_directory
from hwr.store.layout import ARTIFACT_MODE, DIRECTORY_MODE, FILE_MODE, MANIFEST, READY
from hwr.store.locks import acquire
from hwr.store.lookup import judge
from hwr.store.manifest import Manifest, ReadyMarker, document_digest
from hwr.store.writer import LARGE_ALIGNMENT, PAGE_BYTES, FilePlan, PayloadWriter, TensorSource, plan_files
from hwr.telemetry import span
from hwr.telemetry.events import PublicationBegun, PublicationProgress, PublicationStageBegun
from hwr.telemetry.hub import Span
from hwr.units import short_key

TELL_SECONDS: Final = 0.25
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


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
) -> Publication:
    """Publish the tensors under the identity's key; never raises a typed failure, it returns it.

    `unchanged` is called before anything becomes visible: it raises if the canonical checkpoint is no longer the one that the identity
    was made of. Bytes are streamed: memory does not grow with the model.
    """
    key = identity.key
    try:
        plans = plan_files(sources)
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
        begun = time.monotonic()
        with acquire(domain.layout.lock(LockKind.BUILD, key), LockKind.BUILD, exclusive=True, deadline=domain.deadline()):
            waited = time.monotonic() - begun > TELL_SECONDS
            there = self._valid_already()
            if there is not None:
                outcome = PublicationOutcome.JOINED if waited else PublicationOutcome.ALREADY_PRESENT
                return Publication(outcome, key, there.content_digest, there.payload_bytes)
            self._clear_the_way()
            capacity.check(domain, key, self.size, len(self.plans))
            staging = domain.layout.new_temporary(key)
            try:
                manifest = self._build(staging)
                if self.unchanged is not None:
                    self.unchanged()
                self._commit(staging, manifest)
            except BaseException:
                # Not if it was renamed: then it is in `artifacts/`, and the failure says what became of it.
                containment.remove_tree(staging)
                raise
        return Publication(PublicationOutcome.PUBLISHED, key, manifest.content_digest, manifest.payload_bytes)

    def _valid_already(self) -> Manifest | None:
        """Return the manifest of a good artifact that is there, None if there is none, or one that must go."""
        path = self.domain.layout.artifact(self.key)
        if containment.denial(self.domain, self.key) is not None:
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
            denied = containment.denial(self.domain, self.key) is not None
            reason = QuarantineReason.VALIDATION_FAILURE if denied else QuarantineReason.PUBLICATION_FAILURE
            containment.quarantine(self.domain, self.key, reason)
        containment.remove_leftovers(self.domain, self.key)

    def _build(self, staging: Path) -> Manifest:
        staging.mkdir(mode=DIRECTORY_MODE)
        told = time.monotonic()

        def progress(done: int) -> None:
            nonlocal told
            if time.monotonic() - told >= TELL_SECONDS or done == total:
                told = time.monotonic()
                self.publishing.progress(PublicationProgress(done_bytes=done, planned_bytes=self.size))

        total = sum(plan.data_bytes for plan in self.plans)
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
            alignment={"data": PAGE_BYTES, "large_tensors": LARGE_ALIGNMENT},
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

    def _commit(self, staging: Path, manifest: Manifest) -> None:
        final = self.domain.layout.artifact(self.key)
        with span(PublicationStageBegun(stage=PublicationStage.HARDEN), stage=PublicationStage.HARDEN):
            for entry in os.scandir(staging):
                os.chmod(entry.path, FILE_MODE)
            fsync_directory(staging)
        with span(PublicationStageBegun(stage=PublicationStage.RENAME), stage=PublicationStage.RENAME):
            self._rename(staging, final)
        try:
            with span(PublicationStageBegun(stage=PublicationStage.COMMIT), stage=PublicationStage.COMMIT):
                # Only now: a directory that is not writable cannot change its parent. Until then lookups see an unfinished publication.
                os.chmod(final, ARTIFACT_MODE)
                fsync_directory(final)
                fsync_directory(staging.parent)
                fsync_directory(final.parent)
                containment.lift_denial(self.domain, self.key)
        except OSError as error:
            contained = "moved to quarantine"
            try:
                containment.quarantine(self.domain, self.key, QuarantineReason.PUBLICATION_FAILURE)
            except StoreError as second:
                raise DomainUnavailable(
                    reason="outcome_uncertain",
                    root=str(self.domain.root),
                    problem=f"the commit failed ({errno_text(error)}) and so did containing it: {second.cause}",
                ) from error
            raise PublicationFailed(
                reason="commit",
                root=str(self.domain.root),
                key=short_key(self.key),
                step="commit",
                problem=errno_text(error),
                remedy=f"What was written was {contained}; look at the disk, then publish again.",
            ) from error

    def _rename(self, staging: Path, final: Path) -> None:
        try:
            os.rename(staging, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EPERM, errno.EACCES) or not final.exists():
                raise
            # Somebody who does not take our lock put something there.
            containment.quarantine(self.domain, self.key, QuarantineReason.IDENTITY_COLLISION, source=staging)
            raise IdentityCollision(reason="other_content", root=str(self.domain.root), key=short_key(self.key)) from error


def _write_durably(path: Path, raw: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(raw)
        while len(view):
            view = view[os.write(fd, view) :]
        with span(PublicationStageBegun(stage=PublicationStage.FSYNC), stage=PublicationStage.FSYNC, bytes=len(raw)):
            os.fsync(fd)
    finally:
        os.close(fd)


def _typed(error: OSError, domain: Domain, key: str, step: str) -> HwrError:
    if error.errno in _FULL:
        return NoSpace(reason="disk_full", root=str(domain.root), path=str(domain.root), operation="publishing", problem=errno_text(error))
    if error.errno == errno.EROFS:
        return ReadOnlyStore(reason="read_only", root=str(domain.root), problem=errno_text(error))
    return DomainUnavailable(
        reason=errno.errorcode.get(error.errno or 0, "os_error").lower(), root=str(domain.root), problem=f"{step}: {errno_text(error)}"
    )
