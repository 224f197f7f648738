"""Closed sets that all rooms share.

Owns every enumeration that appears in an event, a metric label, a report or an error.
Promises that values are stable once released: a value is added, never renamed.
Refuses behaviour: nothing here does anything.

Names follow the field's own spelling (vLLM-Omni's Host Weight Runtime) wherever it has one.
"""

from __future__ import annotations

from enum import StrEnum


class RuntimeMode(StrEnum):
    """What a worker may do with the store."""

    DISABLED = "disabled"
    PREFERRED = "preferred"
    REQUIRED = "required"


class ValidationLevel(StrEnum):
    """How much of an artifact is checked before it is served."""

    MANIFEST_AND_METADATA = "manifest_and_metadata"
    FULL_CHECKSUM = "full_checksum"


class RegistrationMode(StrEnum):
    """Whether mapped weights are registered with CUDA."""

    AUTO = "auto"
    DISABLED = "disabled"
    REQUIRED = "required"


class BuildAdmission(StrEnum):
    """Whether builders of different keys may work at once."""

    CONCURRENT = "concurrent"
    SERIALIZED = "serialized"


class Outcome(StrEnum):
    """How a begin/end pair of events ended."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """What a worker is doing, as an operator would say it."""

    STARTING = "starting"
    RESOLVING = "resolving"
    WAITING_LOCK = "waiting_lock"
    VALIDATING = "validating"
    PRODUCING = "producing"
    PUBLISHING = "publishing"
    RESTORING = "restoring"
    REGISTERING = "registering"
    READY = "ready"
    SERVING = "serving"
    TERMINATING = "terminating"
    FAILED = "failed"
    EXITED = "exited"


class Operation(StrEnum):
    """A slow, fallible or blocking thing with a begin and an end event."""

    LOOKUP = "lookup"
    LOCK = "lock"
    CHECKSUM = "checksum"
    PRODUCE = "produce"
    PUBLISH = "publish"
    RESTORE = "restore"
    REGISTER = "register"
    REGISTER_CHUNK = "register_chunk"
    ADMISSION = "admission"
    VOTE = "vote"
    TRANSFER = "transfer"
    ALLGATHER = "allgather"
    COLLECTIVE = "collective"
    PROBE = "probe"


class Transport(StrEnum):
    """The way that block bytes take to the device."""

    REGISTERED = "registered"
    STAGING = "staging"
    RANK_LOCAL = "rank_local"
    ALLGATHER = "allgather"
    NONE = "none"


class TransportReason(StrEnum):
    """Why block bytes take the way that they take; all but `registered` lead to staging or to no transport."""

    REGISTERED = "registered"
    MODE_DISABLED = "mode_disabled"
    PIN_OFF = "pin_off"
    NO_REGIONS = "no_regions"
    NO_LEASE = "no_lease"
    BUDGET = "budget"
    MEMLOCK = "memlock"
    CAPABILITY = "capability"
    PLATFORM = "platform"
    DRIVER_ERROR = "driver_error"
    DEADLINE = "deadline"
    ADMISSION_TIMEOUT = "admission_timeout"
    GROUP = "group"
    NOT_PINNED = "not_pinned"


class BudgetSource(StrEnum):
    """Where a ceiling for pinned memory comes from; the smallest one counts."""

    CONFIGURED = "configured"
    MEMLOCK = "memlock"
    CGROUP = "cgroup"
    MEMINFO = "meminfo"


class RegistrationOutcome(StrEnum):
    """How a registration ended; `failed` means that start-up ends, since something may still be registered or the group is broken."""

    REGISTERED = "registered"
    STAGED = "staged"
    FAILED = "failed"


class RollbackResult(StrEnum):
    """Whether a rollback undid everything; what it could not undo stays registered and mapped until the process ends."""

    CLEAN = "clean"
    PARTIAL = "partial"


class DrainResult(StrEnum):
    """What became of the error that a failed call leaves behind in the platform's runtime."""

    DRAINED = "drained"
    NOTHING_PENDING = "nothing_pending"
    OTHER = "other"
    UNAVAILABLE = "unavailable"


class LockKind(StrEnum):
    """The flocks of a store and of a pin."""

    DOMAIN_INIT = "domain_init"
    BUILD = "build"
    ARTIFACT = "artifact"
    ADMISSION = "admission"
    PIN = "pin"


class ChecksumPurpose(StrEnum):
    """Why bytes were hashed."""

    PUBLISH = "publish"
    VERIFY = "verify"
    SOURCE = "source"


class PublicationStage(StrEnum):
    """The steps of a publication, in order; `commit` is the fsync that makes it durable."""

    ALLOCATE = "allocate"
    WRITE = "write"
    HASH = "hash"
    FSYNC = "fsync"
    HARDEN = "harden"
    RENAME = "rename"
    COMMIT = "commit"


class Stall(StrEnum):
    """What holds a worker up, as judged from outside."""

    NONE = "none"
    STOPPED = "stopped"
    LOCK_WAIT = "lock_wait"
    PIN_ADVANCING = "pin_advancing"
    PIN_STUCK = "pin_stuck"
    COMPACTION = "compaction"
    COLD_CACHE = "cold_cache"
    RECLAIM = "reclaim"
    DRIVER_POLL = "driver_poll"
    GIL_HELD = "gil_held"
    MMAP_LOCK_HELD = "mmap_lock_held"
    COLLECTIVE_WAIT = "collective_wait"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How sure a verdict is: high rests on what the kernel says, medium on two that agree, low on what is left over."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Liveness(StrEnum):
    """Whether a worker lives; `recorded` is all that a copied directory can say."""

    ALIVE = "alive"
    EXITED = "exited"
    DEAD = "dead"
    RECORDED = "recorded"
    UNKNOWN = "unknown"


class Collective(StrEnum):
    """The collectives that ranks wait for each other in."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"


class CollectorName(StrEnum):
    """The parts that a node's snapshot is made of, each read on its own."""

    RUNS = "runs"
    PROCESSES = "processes"
    MEMORY = "memory"
    PAGE_CACHE = "page_cache"
    LOCKS = "locks"
    KERNEL = "kernel"
    CGROUP = "cgroup"
    STORE = "store"
    MAPPERS = "mappers"


class View(StrEnum):
    """Who took a snapshot: the node's agent, a tool that looked itself, or nobody: it was put together from recorded journals."""

    AGENT = "agent"
    DIRECT = "direct"
    REPLAY = "replay"


class StorageScope(StrEnum):
    """The locality that a store serves."""

    NODE = "node"
    NUMA = "numa"


class StorageClass(StrEnum):
    """What kind of filesystem a store lies on."""

    DISK = "disk"
    TMPFS = "tmpfs"


class StoreStatus(StrEnum):
    """What a store answered; a lease comes with hit, built and joined only."""

    HIT = "hit"
    MISS = "miss"
    BUILT = "built"
    JOINED = "joined"
    INVALID = "invalid"
    TIMEOUT = "timeout"
    FAILED = "failed"


class AttemptResult(StrEnum):
    """How one stage of a resolution ended."""

    HIT = "hit"
    MISS = "miss"
    SUCCESS = "success"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"


class ResolutionOutcome(StrEnum):
    """Where the weights came from; only `local_hit` is a cache hit."""

    LOCAL_HIT = "local_hit"
    REMOTE_IMPORT = "remote_import"
    LOCAL_PRODUCTION = "local_production"
    CANONICAL_DIRECT = "canonical_direct"
    CANONICAL_FALLBACK = "canonical_fallback"
    FAILED = "failed"


class PublicationOutcome(StrEnum):
    """How a publication ended; a resolution that is finished is never changed by it."""

    PUBLISHED = "published"
    JOINED = "joined"
    ALREADY_PRESENT = "already_present"
    RUNTIME_DISABLED = "runtime_disabled"
    POLICY_DISABLED = "policy_disabled"
    FAILED = "failed"


class ResolutionStage(StrEnum):
    """The part of a resolution that an attempt or a failure belongs to."""

    CONFIGURATION = "configuration"
    DOMAIN = "domain"
    LOOKUP = "lookup"
    VALIDATION = "validation"
    REMOTE = "remote"
    PRODUCTION = "production"
    CAPACITY = "capacity"
    RESTORATION = "restoration"
    LIFECYCLE = "lifecycle"
    CANONICAL_LOADING = "canonical_loading"


class ResolutionAction(StrEnum):
    """What was done next."""

    RETURN_LEASE = "return_lease"
    TRY_REMOTE = "try_remote"
    TRY_PRODUCER = "try_producer"
    QUARANTINE_THEN_PRODUCE = "quarantine_then_produce"
    CANONICAL_FALLBACK = "canonical_fallback"
    FAIL_STARTUP = "fail_startup"
    SKIP = "skip"


class LoadStage(StrEnum):
    """The stages of a start whose seconds are reported side by side."""

    INSPECT = "inspect"
    IMPORT = "import"
    IDENTITY = "identity"
    DOMAIN = "domain"
    LOOKUP = "lookup"
    SKELETON = "skeleton"
    RESTORE = "restore"
    CANONICAL = "canonical"
    ADAPT = "adapt"
    PUBLISH = "publish"
    REGISTER = "register"
    FORWARD = "forward"


class Lifecycle(StrEnum):
    """The ladder from nothing to a model in service; planning leaves the skeleton untouched."""

    UNRESOLVED = "unresolved"
    LEASE_OWNED_BY_LOADER = "lease_owned_by_loader"
    RESTORE_PLANNED = "restore_planned"
    COMMIT_STARTED = "commit_started"
    CARRIER_OWNED = "carrier_owned"
    BACKEND_OWNED = "backend_owned"
    BACKEND_READY = "backend_ready"
    IN_SERVICE = "in_service"


class InventoryState(StrEnum):
    """The state of one directory of a store."""

    READY = "ready"
    DENIED = "denied"
    QUARANTINED = "quarantined"
    TEMPORARY = "temporary"


class QuarantineReason(StrEnum):
    """Why a tree was moved out of `artifacts/`; part of its directory name."""

    VALIDATION_FAILURE = "validation_failure"
    PUBLICATION_FAILURE = "publication_failure"
    IDENTITY_COLLISION = "identity-collision"
    CLEANUP = "cleanup"


class TensorKind(StrEnum):
    """What a tensor is to its module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


class IdentitySection(StrEnum):
    """The parts of an artifact identity; a miss is explained by those that differ."""

    SOURCE = "source"
    COMPONENT = "component"
    REPRESENTATION = "representation"
    LAYOUT = "layout"
    ADAPTATION = "adaptation"
    PRODUCER = "producer"


class MemoryMoment(StrEnum):
    """The lifecycle boundaries at which a worker measures its own memory."""

    BEFORE_LOAD = "before_load"
    AFTER_MAP = "after_map"
    AFTER_CHECKSUM = "after_checksum"
    AFTER_RESTORE = "after_restore"
    AFTER_REGISTRATION = "after_registration"
    CLOSED = "closed"


class MemorySource(StrEnum):
    """The file of /proc that a memory figure was read from."""

    STATUS = "status"
    STATM = "statm"
    SMAPS = "smaps"
    SMAPS_ROLLUP = "smaps_rollup"
    PAGEMAP_SCAN = "pagemap_scan"
    CACHESTAT = "cachestat"
    MINCORE = "mincore"


class RetentionVerdict(StrEnum):
    """What a retention run says; what it says of one size, offset and version holds for no other."""

    RETAINED = "retained"
    FLAT = "flat"
    INCONCLUSIVE = "inconclusive"


class RetentionClass(StrEnum):
    """Who holds memory that stayed; the anonymous ones are disjoint, locked is counted among the others too."""

    INTERPRETER = "interpreter"
    MALLOC_IN_USE = "malloc_in_use"
    ALLOCATOR_FREE = "allocator_free"
    OTHER_ANONYMOUS = "other_anonymous"
    FILE = "file"
    LOCKED = "locked"


class SourceReason(StrEnum):
    """Why a canonical checkpoint was rejected; also the failure code of that rejection."""

    NO_WEIGHTS = "no_weights"
    AMBIGUOUS_WEIGHTS = "ambiguous_weights"
    UNREADABLE = "unreadable"
    LFS_POINTER = "lfs_pointer"
    NOT_SAFETENSORS_HTML = "not_safetensors_html"
    NOT_SAFETENSORS = "not_safetensors"
    HEADER_OVER_LIMIT = "header_over_limit"
    HEADER_INVALID = "header_invalid"
    TENSOR_INVALID = "tensor_invalid"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    INDEX_INVALID = "index_invalid"
    INDEX_MISMATCH = "index_mismatch"
    MISSING_SHARD = "missing_shard"
    PATH_ESCAPE = "path_escape"
    SOURCE_CHANGED = "source_changed"


class FailureCode(StrEnum):
    """What went wrong, for machines; the field's names first, then each room's own."""

    INVALID_CONFIG = "invalid_config"
    COHORT_POLICY_MISMATCH = "cohort_policy_mismatch"
    DOMAIN_POLICY_MISMATCH = "domain_policy_mismatch"
    DOMAIN_UNAVAILABLE = "domain_unavailable"
    STORAGE_CLASS_MISMATCH = "storage_class_mismatch"
    NUMA_PLACEMENT_INVALID = "numa_placement_invalid"
    LOCAL_MISS = "local_miss"
    ARTIFACT_DENIED = "artifact_denied"
    ACTIVE_BUILD_TIMEOUT = "active_build_timeout"
    MANIFEST_INCOMPATIBLE = "manifest_incompatible"
    MANIFEST_CORRUPT = "manifest_corrupt"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    IDENTITY_COLLISION = "identity_collision"
    REMOTE_MISS = "remote_miss"
    REMOTE_UNAVAILABLE = "remote_unavailable"
    REMOTE_AUTH_FAILED = "remote_auth_failed"
    REMOTE_TIMEOUT = "remote_timeout"
    REMOTE_ARTIFACT_INVALID = "remote_artifact_invalid"
    PRODUCER_UNAVAILABLE = "producer_unavailable"
    PRODUCER_UNSUPPORTED = "producer_unsupported"
    PRODUCER_FAILED = "producer_failed"
    PRODUCTION_TIMEOUT = "production_timeout"
    ARTIFACT_TOO_LARGE = "artifact_too_large"
    STORE_LIMIT_EXCEEDED = "store_limit_exceeded"
    INSUFFICIENT_CAPACITY = "insufficient_capacity"
    ENOSPC = "enospc"
    RESTORER_UNAVAILABLE = "restorer_unavailable"
    RESTORE_PREFLIGHT_FAILED = "restore_preflight_failed"
    RESTORE_COMMIT_FAILED = "restore_commit_failed"
    ACTIVE_LEASE = "active_lease"
    PUBLICATION_FAILED = "publication_failed"
    QUARANTINE_FAILED = "quarantine_failed"
    CANONICAL_SOURCE_FAILED = "canonical_source_failed"
    UNSUPPORTED = "unsupported"
    # Ours: the store
    STORE_IO = "store_io"
    LOCK_UNSUPPORTED = "lock_unsupported"
    MMAP_UNSUPPORTED = "mmap_unsupported"
    READ_ONLY_STORE = "read_only_store"
    UNTRUSTED_PERMISSIONS = "untrusted_permissions"
    FD_LIMIT = "fd_limit"
    MAP_LIMIT = "map_limit"
    NO_INODES = "no_inodes"
    LEASE_CLOSED = "lease_closed"
    LEASE_INHERITED = "lease_inherited"
    LEASE_LOST = "lease_lost"
    # Ours: the canonical checkpoint (the same words as SourceReason)
    NO_WEIGHTS = "no_weights"
    AMBIGUOUS_WEIGHTS = "ambiguous_weights"
    UNREADABLE = "unreadable"
    LFS_POINTER = "lfs_pointer"
    NOT_SAFETENSORS_HTML = "not_safetensors_html"
    NOT_SAFETENSORS = "not_safetensors"
    HEADER_OVER_LIMIT = "header_over_limit"
    HEADER_INVALID = "header_invalid"
    TENSOR_INVALID = "tensor_invalid"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    INDEX_INVALID = "index_invalid"
    INDEX_MISMATCH = "index_mismatch"
    MISSING_SHARD = "missing_shard"
    PATH_ESCAPE = "path_escape"
    SOURCE_CHANGED = "source_changed"
    # Ours: registration
    WRITABLE_REGION = "writable_region"
    REGISTRATION_BUDGET = "registration_budget"
    REGISTRATION_UNSUPPORTED = "registration_unsupported"
    REGISTRATION_FAILED = "registration_failed"
    REGISTRATION_DEADLINE = "registration_deadline"
    REGISTRATION_CLEANUP_FAILED = "registration_cleanup_failed"
    REGISTRATION_REQUIRED = "registration_required"
    REGISTRATION_VOTE_OVERDUE = "registration_vote_overdue"
    PIN_ADMISSION_TIMEOUT = "pin_admission_timeout"
    # Ours: everything else
    FORWARD_FAILED = "forward_failed"
    INTERNAL = "internal"


# Modelled because the field has the word, and never emitted: there is no remote store and no cohort.
NEVER_EMITTED: frozenset[FailureCode] = frozenset(
    {
        FailureCode.COHORT_POLICY_MISMATCH,
        FailureCode.NUMA_PLACEMENT_INVALID,
        FailureCode.REMOTE_MISS,
        FailureCode.REMOTE_UNAVAILABLE,
        FailureCode.REMOTE_AUTH_FAILED,
        FailureCode.REMOTE_TIMEOUT,
        FailureCode.REMOTE_ARTIFACT_INVALID,
        FailureCode.PRODUCER_UNAVAILABLE,
        FailureCode.PRODUCTION_TIMEOUT,
        FailureCode.RESTORER_UNAVAILABLE,
    }
)


class Severity(StrEnum):
    """OpenTelemetry's short severity names, as far as we use them."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARN = "WARN"
    ERROR = "ERROR"


class Role(StrEnum):
    """What the process that writes a journal is."""

    WORKER = "worker"
    AGENT = "agent"
    TOOL = "tool"
