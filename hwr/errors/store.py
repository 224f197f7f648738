"""A store that cannot be used, and leases."""

from __future__ import annotations

from hwr.errors.base import EXIT_TIMEOUT, HwrError
from hwr.outcomes import FailureCode, ResolutionStage


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
    Free space on the filesystem; whatever was unfinished was removed and nothing else touched."""

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
