"""The one tree of failures.

Owns every exception that a caller may meet. A class's docstring is its message template: the first line is the cause,
the second what to do. Promises a stable `code`, a `stage`, `retryable` (preferred may fall back) and an `exit_code`.
Refuses a bare `Exception`, and text that a terminal could not take: details are escaped when the message is built.
"""

from __future__ import annotations

import errno as errno_names
import inspect
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from hwr.outcomes import FailureCode, ResolutionStage
from hwr.units import one_line

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_NOT_MEASURED = 3
EXIT_TIMEOUT = 4
EXIT_INTERNAL = 70


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The third value beside a result and a raise: it could not be known, and this is why."""

    reason: str

    def __bool__(self) -> bool:
        return False


class HwrError(Exception):
    """The Host Weight Runtime failed: {message}
    Look at the journal's last events for what it was doing."""

    code: ClassVar[FailureCode] = FailureCode.INTERNAL
    stage: ClassVar[ResolutionStage] = ResolutionStage.CONFIGURATION
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = EXIT_FAILURE

    def __init__(self, *, reason: str = "", **details: Any) -> None:
        """Build the message from the class's docstring.

        `reason` is a word of the second closed set of this code; `details` fill the template.
        """
        self.reason = str(reason)
        self.recorded = False  # whether an event has told of it: a failure that travels through rooms counts once
        self.details: dict[str, Any] = {"reason": reason, **details}
        shown = {key: one_line(value, 2000) if isinstance(value, str) else value for key, value in self.details.items()}
        template = inspect.cleandoc(type(self).__doc__ or "{message}")
        super().__init__(template.format_map(shown))

    @property
    def cause(self) -> str:
        """The first line: what happened."""
        return str(self).partition("\n")[0]

    @property
    def way_out(self) -> str:
        """The second line: what to do."""
        return str(self).partition("\n")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.details)


def _rebuild(kind: type[HwrError], details: dict[str, Any]) -> HwrError:
    return kind(**details)


def errno_text(error: OSError) -> str:
    """Name an operating-system error: `EACCES (Permission denied)`."""
    if error.errno is None:
        return one_line(str(error))
    return f"{errno_names.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"


# Options ---------------------------------------------------------------------------------------------------------


class OptionError(HwrError, ValueError):
    """{option}: {problem}
    {remedy}"""

    code = FailureCode.INVALID_CONFIG
    exit_code = EXIT_USAGE

    def __init__(self, *, option: str, problem: str, remedy: str, reason: str = "") -> None:
        super().__init__(reason=reason, option=option, problem=problem, remedy=remedy)


class OptionTypeError(HwrError, TypeError):
    """{option}: {problem}
    {remedy}"""

    code = FailureCode.INVALID_CONFIG
    exit_code = EXIT_USAGE

    def __init__(self, *, option: str, problem: str, remedy: str, reason: str = "") -> None:
        super().__init__(reason=reason, option=option, problem=problem, remedy=remedy)


class NotImplementedYet(HwrError):
    """{what} is not implemented in this version.
    {remedy}"""

    code = FailureCode.UNSUPPORTED
    exit_code = EXIT_USAGE


# The canonical checkpoint ----------------------------------------------------------------------------------------


class SourceRejected(HwrError):
    """{file}: {problem}
    {remedy}"""

    code = FailureCode.CANONICAL_SOURCE_FAILED
    stage = ResolutionStage.CANONICAL_LOADING
    # Stock loading is allowed to try; what it must not try (a path that escapes, a partial set) says False.
    retryable = True


class NoWeights(SourceRejected):
    """{directory}: no safetensors weights here ({found}).
    Give the directory that holds model.safetensors, or shards with their *.safetensors.index.json."""

    code = FailureCode.NO_WEIGHTS


class AmbiguousWeights(SourceRejected):
    """{file}: a choice of weights that only a person can make: {problem}
    Leave one set of weights in the directory; if it has several files, give their index too."""

    # Stock loading picks by its own rule; what it picks gets no identity, so nothing is published.
    code = FailureCode.AMBIGUOUS_WEIGHTS


class SourceUnreadable(SourceRejected):
    """{file}: cannot be read: {problem}
    Check that the path exists and that this user may read it."""

    code = FailureCode.UNREADABLE


class LfsPointer(SourceRejected):
    """{file}: a Git LFS pointer, not weights; the real file has {expected} bytes, this one {file_bytes}.
    Fetch the content with `git lfs pull`, or download the model again."""

    code = FailureCode.LFS_POINTER

    def __init__(self, *, expected_bytes: int | None, **details: Any) -> None:
        """Build the message; `expected_bytes` is None if the pointer is cut before its size."""
        details["expected"] = "an unknown number of" if expected_bytes is None else expected_bytes
        super().__init__(expected_bytes=expected_bytes, **details)


class NotSafetensorsHtml(SourceRejected):
    """{file}: an HTML page, not weights ({file_bytes} bytes); a download was answered with an error page.
    Download the file again, signed in if the model is gated."""

    code = FailureCode.NOT_SAFETENSORS_HTML


class NotSafetensors(SourceRejected):
    """{file}: not a safetensors file: {problem}
    Download or convert the file again."""

    code = FailureCode.NOT_SAFETENSORS


class HeaderOverLimit(SourceRejected):
    """{file}: its header claims {declared_header_bytes} bytes; the limit is {limit} and the file has {file_bytes}.
    If the file is whole, split the model into more shards; if not, download it again."""

    code = FailureCode.HEADER_OVER_LIMIT


class HeaderInvalid(SourceRejected):
    """{file}: its header is not valid: {problem}
    Download the file again, or write it again with safetensors' own save_file."""

    code = FailureCode.HEADER_INVALID


class TensorInvalid(SourceRejected):
    """{file}: tensor {tensor!r}: {problem}
    Write the file again with safetensors' own save_file."""

    code = FailureCode.TENSOR_INVALID


class Truncated(SourceRejected):
    """{file}: truncated: {missing} of {expected} bytes are missing.
    Download the file again; the end never arrived."""

    code = FailureCode.TRUNCATED

    def __init__(self, *, missing_bytes: int, expected_bytes: int, header_cut: bool = False, **details: Any) -> None:
        """Build the message; what a header that is itself cut would have described is unknown, so both figures are the least."""
        least = "at least " if header_cut else ""
        details |= {"missing": f"{least}{missing_bytes}", "expected": f"{least}{expected_bytes}"}
        super().__init__(missing_bytes=missing_bytes, expected_bytes=expected_bytes, header_cut=header_cut, **details)


class TrailingBytes(SourceRejected):
    """{file}: {extra_bytes} bytes too many: the header describes {expected_bytes}, the file has more.
    Download the file again; two downloads may have been joined."""

    code = FailureCode.TRAILING_BYTES


class IndexInvalid(SourceRejected):
    """{file}: not a usable shard index: {problem}
    Download the index again together with its shards."""

    code = FailureCode.INDEX_INVALID
    retryable = False


class IndexMismatch(SourceRejected):
    """{file}: the index and the shards disagree: {problem}
    Download index and shards again from one revision; no partial model is loaded or published."""

    code = FailureCode.INDEX_MISMATCH
    retryable = False


class MissingShard(SourceRejected):
    """{file}: {problem}
    Download what is missing; a link that dangles counts as missing."""

    code = FailureCode.MISSING_SHARD
    retryable = False


class PathEscape(SourceRejected):
    """{file}: names {target!r}, which lies outside the model's folder.
    Do not load this checkpoint; get it from a source that you trust."""

    code = FailureCode.PATH_ESCAPE
    retryable = False


class SourceChanged(SourceRejected):
    """{file}: changed while it was read.
    Wait until the download has finished and start again."""

    code = FailureCode.SOURCE_CHANGED


class CanonicalLoadFailed(HwrError):
    """{model}: ordinary loading failed: {problem}
    {remedy}"""

    code = FailureCode.CANONICAL_SOURCE_FAILED
    stage = ResolutionStage.CANONICAL_LOADING


# The store -------------------------------------------------------------------------------------------------------


class StoreError(HwrError):
    """{root}: the store cannot be used: {problem}
    {remedy}"""

    code = FailureCode.DOMAIN_UNAVAILABLE
    stage = ResolutionStage.DOMAIN
    retryable = True


class DomainUnavailable(StoreError):
    """{root}: the store cannot be used: {problem}
    Give --root a directory on a local disk that this user owns and may write."""


class ReadOnlyStore(StoreError):
    """{root}: the store cannot be written: {problem}
    Warm hits still work; to publish, remount it writable or give --root another directory."""

    code = FailureCode.READ_ONLY_STORE


class UntrustedPermissions(StoreError):
    """{path}: {problem}
    Make it owned by this user with mode 0700 (`chmod 700`), or give --root another directory."""

    code = FailureCode.UNTRUSTED_PERMISSIONS
    retryable = False


class StorageClassMismatch(StoreError):
    """{root}: lies on a {fstype} filesystem, which is not known to be local.
    Give --root a directory on a local disk or tmpfs; flock and mmap are not safe on network filesystems."""

    code = FailureCode.STORAGE_CLASS_MISMATCH
    retryable = False


class DomainPolicyMismatch(StoreError):
    """{root}: {file} does not agree with the options given: {problem}
    Start with the options that the store was made with, or give --root another directory."""

    code = FailureCode.DOMAIN_POLICY_MISMATCH
    retryable = False


class LockUnsupported(StoreError):
    """{root}: flock does not work on this filesystem ({fstype}): {problem}
    Give --root a directory on a local filesystem that has flock."""

    code = FailureCode.LOCK_UNSUPPORTED


class MmapUnsupported(StoreError):
    """{root}: files on this filesystem ({fstype}) cannot be mapped shared: {problem}
    Give --root a directory on a filesystem that has shared mappings."""

    code = FailureCode.MMAP_UNSUPPORTED


class LockTimeout(StoreError):
    """{path}: waited {waited:.1f} s for the {lock} lock, held by {holder}.
    Look at the holder (state T is a stopped process), or raise the coordination timeout."""

    code = FailureCode.ACTIVE_BUILD_TIMEOUT
    stage = ResolutionStage.LOOKUP
    exit_code = EXIT_TIMEOUT


class DomainInitTimeout(LockTimeout):
    """{path}: waited {waited:.1f} s for the {lock} lock, held by {holder}.
    Look at the holder (state T is a stopped process), or raise the coordination timeout."""

    code = FailureCode.DOMAIN_UNAVAILABLE
    stage = ResolutionStage.DOMAIN


class StoreIoError(StoreError):
    """{path}: {operation} failed: {problem}
    This is an I/O error, not corruption: nothing was denied; look at the disk and try again."""

    code = FailureCode.STORE_IO
    stage = ResolutionStage.LOOKUP


class FdLimit(StoreError):
    """{path}: no file descriptor left (RLIMIT_NOFILE is {limit}).
    Raise the limit (`ulimit -n`), or close what holds descriptors open."""

    code = FailureCode.FD_LIMIT
    stage = ResolutionStage.LOOKUP


class MapLimit(StoreError):
    """{path}: cannot be mapped: no address space or too many mappings (vm.max_map_count is {limit}).
    Raise vm.max_map_count or RLIMIT_AS."""

    code = FailureCode.MAP_LIMIT
    stage = ResolutionStage.LOOKUP


class ArtifactInvalid(StoreError):
    """artifact {key}: {problem}
    It will be denied, quarantined and built again from the canonical checkpoint."""

    code = FailureCode.MANIFEST_CORRUPT
    stage = ResolutionStage.VALIDATION


class ManifestIncompatible(ArtifactInvalid):
    """artifact {key}: {problem}
    It was written by another version; it will be built again from the canonical checkpoint."""

    code = FailureCode.MANIFEST_INCOMPATIBLE


class ChecksumMismatch(ArtifactInvalid):
    """artifact {key}: {file}: {what} does not match its digest (expected {expected}, found {actual}).
    The bytes on disk changed after publication: check the disk and memory of this node (dmesg, SMART)."""

    code = FailureCode.CHECKSUM_MISMATCH


class ArtifactDenied(StoreError):
    """artifact {key}: denied earlier: {problem}
    Start once in preferred mode to build it again; the deny marker goes with the republication."""

    code = FailureCode.ARTIFACT_DENIED
    stage = ResolutionStage.LOOKUP


class LocalMiss(StoreError):
    """artifact {key}: not in the store {root}: {problem}
    Populate it first (`hwr publish`, or one start in preferred mode), then require it."""

    code = FailureCode.LOCAL_MISS
    stage = ResolutionStage.LOOKUP


class IdentityCollision(StoreError):
    """artifact {key}: already there with other content; ours was set aside in quarantine.
    Two producers make different bytes under one identity: report the plan and both content digests."""

    code = FailureCode.IDENTITY_COLLISION
    stage = ResolutionStage.PRODUCTION
    retryable = False


class ArtifactTooLarge(StoreError):
    """artifact {key}: needs {needed} bytes, the artifact limit is {limit}.
    Raise --host-weight-runtime-max-artifact-gib, or publish fewer tensors."""

    code = FailureCode.ARTIFACT_TOO_LARGE
    stage = ResolutionStage.CAPACITY


class StoreLimitExceeded(StoreError):
    """{root}: needs {needed} bytes more; holds {held} of {limit} (quarantine {quarantined}, temporary {temporary}).
    Remove artifacts or quarantine entries, or raise --host-weight-runtime-max-store-gib."""

    code = FailureCode.STORE_LIMIT_EXCEEDED
    stage = ResolutionStage.CAPACITY


class InsufficientCapacity(StoreError):
    """{root}: needs {needed} bytes; {available} are free for this user, {reserve} of them reserved.
    Free space on the filesystem, or lower --host-weight-runtime-min-free-gib."""

    code = FailureCode.INSUFFICIENT_CAPACITY
    stage = ResolutionStage.CAPACITY


class NoSpace(StoreError):
    """{path}: no space left while {operation} ({problem}).
    Free space on the filesystem; the unfinished artifact was removed and nothing else touched."""

    code = FailureCode.ENOSPC
    stage = ResolutionStage.CAPACITY


class NoInodes(StoreError):
    """{root}: no free inodes ({available} left, {needed} needed).
    Remove small files from the filesystem; `df -i` shows who has them."""

    code = FailureCode.NO_INODES
    stage = ResolutionStage.CAPACITY


class PublicationFailed(StoreError):
    """artifact {key}: publication failed at {step}: {problem}
    {remedy}"""

    code = FailureCode.PUBLICATION_FAILED
    stage = ResolutionStage.PRODUCTION
    retryable = False


class QuarantineFailed(StoreError):
    """artifact {key}: could not be moved to quarantine: {problem}
    It stays denied and is never served; remove it by hand or try again."""

    code = FailureCode.QUARANTINE_FAILED
    stage = ResolutionStage.LIFECYCLE


class LeaseError(HwrError):
    """{problem}
    {remedy}"""

    stage = ResolutionStage.LIFECYCLE


class ActiveLease(LeaseError):
    """lease of artifact {key}: {count} tensors still use its memory ({names}).
    Drop every reference to them (also autograd graphs: use torch.no_grad()), then close again."""

    code = FailureCode.ACTIVE_LEASE
    retryable = True


class LeaseClosed(LeaseError):
    """lease of artifact {key}: closed or handed over already.
    Acquire a new lease; a carrier gives its lease exactly once."""

    code = FailureCode.LEASE_CLOSED


class LeaseInherited(LeaseError):
    """lease of artifact {key}: belongs to process {creator_pid}; this is a forked child, {pid}.
    Acquire a lease in each process; do not use an inherited one."""

    code = FailureCode.LEASE_INHERITED


class LeaseLost(LeaseError):
    """lease of artifact {key}: {file} changed under its mapping: {problem}
    Restart this worker; something other than this runtime wrote into the store."""

    code = FailureCode.LEASE_LOST


# Production and restoration --------------------------------------------------------------------------------------


class ProducerFailed(HwrError):
    """the producer of artifact {key} failed: {problem}
    {remedy}"""

    code = FailureCode.PRODUCER_FAILED
    stage = ResolutionStage.PRODUCTION


class ProducerUnsupported(HwrError):
    """{what} cannot be published: {problem}
    {remedy}"""

    code = FailureCode.PRODUCER_UNSUPPORTED
    stage = ResolutionStage.PRODUCTION


class RestorePreflightFailed(HwrError):
    """the artifact does not fit the model: {problem}
    The model was not touched; check that model code and artifact belong together."""

    code = FailureCode.RESTORE_PREFLIGHT_FAILED
    stage = ResolutionStage.RESTORATION
    retryable = True


class RestoreCommitFailed(HwrError):
    """restoring broke off: {problem}
    The model is unusable and was discarded; start again."""

    code = FailureCode.RESTORE_COMMIT_FAILED
    stage = ResolutionStage.RESTORATION
    retryable = True


class ResolutionFailed(HwrError, RuntimeError):
    """Host Weight Runtime resolution failed: {cause}
    {remedy}"""

    def __init__(self, *, failure: HwrError) -> None:
        """Wrap the typed failure that ended the resolution; its code, stage and exit code show through."""
        super().__init__(reason=failure.reason, cause=failure.cause, remedy=failure.way_out, failure=failure)
        self.failure = failure
        self.details = {"failure": failure}

    # The instance speaks for its failure; the class keeps the defaults of the tree.
    @property
    def code(self) -> FailureCode:  # type: ignore[override]
        return self.failure.code

    @property
    def stage(self) -> ResolutionStage:  # type: ignore[override]
        return self.failure.stage

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return self.failure.retryable

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.failure.exit_code
