"""What is known of one worker after some of its events.

Owns `WorkerState`, the one thing that metrics, screens and reports are functions of, and its JSON form (checkpoints).
Promises plain JSON values only, so that a state survives a segment, a process and a copied directory unchanged.
Refuses to know liveness, /proc or time: those belong to whoever reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

from hwr.outcomes import Operation, Phase, Transport

# Upper bounds in seconds: a start's stages, whose deadline is 600 s. A ladder for calls of microseconds comes with the first of them.
LONG_LADDER_SECONDS: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 5.0, 15.0, 60.0, 180.0, 600.0)

# Entries of one table: label values are closed sets of ours, but a journal may be somebody else's file.
MAX_KEYS: Final = 1024

_NUMBER: Final = (int, float)
_JSON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "float": _NUMBER,
    "bool": (bool,),
}

PHASE_OF_OPERATION: Final = {
    Operation.LOOKUP: Phase.RESOLVING,
    Operation.LOCK: Phase.WAITING_LOCK,
    Operation.CHECKSUM: Phase.VALIDATING,
    Operation.PRODUCE: Phase.PRODUCING,
    Operation.PUBLISH: Phase.PUBLISHING,
    Operation.RESTORE: Phase.RESTORING,
    Operation.REGISTER: Phase.REGISTERING,
    Operation.REGISTER_CHUNK: Phase.REGISTERING,
    Operation.ADMISSION: Phase.REGISTERING,
    Operation.VOTE: Phase.REGISTERING,
}


@dataclass(slots=True)
class OpenOperation:
    """A begin event without its end. Times are CLOCK_BOOTTIME; `deadline_ns` and progress are absent unless told."""

    event: str
    operation: str | None
    begun_ns: int
    parent: str | None = None
    deadline_ns: int | None = None
    planned_bytes: int | None = None
    done_bytes: int | None = None
    progress_ns: int | None = None
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Histogram:
    """Counts per bucket (not cumulative; the last is everything above the ladder) and the sum of all observations."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        """Return a histogram without observations."""
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count one observation."""
        at = 0
        for bound in self.bounds:
            if value <= bound:
                break
            at += 1
        self.counts[at] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations up to it) as Prometheus wants it, `+Inf` last."""
        return list(zip([*(str(bound) for bound in self.bounds), "+Inf"], map(float, accumulate(self.counts)), strict=True))


@dataclass(slots=True)
class WorkerState:
    """Everything that the events of one process say. Keys of the counting tables are label values joined by `|`."""

    res: dict[str, Any] = field(default_factory=dict)
    # where it is
    base_phase: str = Phase.STARTING
    phase_ns: int = 0
    ops: dict[str, OpenOperation] = field(default_factory=dict)
    exited: bool = False
    lifecycle: str | None = None
    last_event: str | None = None
    last_ns: int = 0
    progress_ns: int | None = None
    last_failure: dict[str, Any] | None = None
    last_resolution: dict[str, Any] | None = None
    last_good_seconds: dict[str, float] = field(default_factory=dict)
    endpoint: str | None = None
    stall_after_seconds: float | None = None
    roots: dict[str, int] = field(default_factory=dict)  # stores that were opened, and when; the newest last
    # sequence parallelism: by the collective's name, `sequence`, `world_size`, `begun_ns` (None: none is open) and its operation
    collectives: dict[str, dict[str, Any]] = field(default_factory=dict)
    # the journal itself
    seq: int = 0
    seq_gaps: int = 0
    events: dict[str, int] = field(default_factory=dict)
    unknown_events: int = 0
    malformed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    # build and resolution
    resolutions: dict[str, int] = field(default_factory=dict)
    resolution_seconds: Histogram = field(default_factory=lambda: Histogram.empty(LONG_LADDER_SECONDS))
    stages: dict[str, int] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    lookup_misses: dict[str, int] = field(default_factory=dict)
    source_rejected: dict[str, int] = field(default_factory=dict)
    lease_acquisitions: int = 0
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors_materialized: int = 0
    # validation
    validation_seconds: dict[str, Histogram] = field(default_factory=dict)
    validation_failures: dict[str, int] = field(default_factory=dict)
    checksum_seconds: dict[str, float] = field(default_factory=dict)
    checksum_bytes: dict[str, int] = field(default_factory=dict)
    checksum_planned_bytes: int | None = None
    checksum_done_bytes: int | None = None
    # publication
    publications: dict[str, int] = field(default_factory=dict)
    publication_seconds: dict[str, float] = field(default_factory=dict)
    publication_bytes: int = 0
    # locks
    lock_waits: dict[str, int] = field(default_factory=dict)
    lock_wait_seconds: dict[str, float] = field(default_factory=dict)
    # registration and transport
    registration_planned_bytes: int | None = None
    registered_bytes: int | None = None
    registration_chunks: int | None = None
    registration_chunks_done: int | None = None
    registration_chunk_seconds: Histogram = field(default_factory=lambda: Histogram.empty(LONG_LADDER_SECONDS))
    registrations: dict[str, int] = field(default_factory=dict)
    registration_rollbacks: dict[str, int] = field(default_factory=dict)
    pin_budget: dict[str, int] = field(default_factory=dict)
    transport: str = Transport.NONE
    transport_reason: str | None = None
    # memory
    memory: dict[str, Any] = field(default_factory=dict)
    memory_sample_ns: dict[str, int] = field(default_factory=dict)
    memory_sample_seconds: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    allocator: dict[str, Any] = field(default_factory=dict)
    retention: dict[str, int] = field(default_factory=dict)
    # an agent's: the node by part and entry, and the last verdict on each worker by its directory
    node: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def current_operation(self) -> OpenOperation | None:
        """Return the innermost open operation that has an operator's name: the one begun last."""
        newest = None
        for operation in self.ops.values():
            if operation.operation is not None and (newest is None or operation.begun_ns >= newest.begun_ns):
                newest = operation
        return newest

    def phase(self) -> Phase:
        """Return what the worker is doing: its open operation's phase, else its own word."""
        if not self.exited:
            current = self.current_operation()
            if current is not None and current.operation in PHASE_OF_OPERATION:
                return PHASE_OF_OPERATION[Operation(current.operation)]
        try:
            return Phase(self.base_phase)
        except ValueError:  # a journal of a later version
            return Phase.STARTING

    def wall_seconds(self, mono_ns: int) -> float:
        """Convert a CLOCK_BOOTTIME reading of this worker to seconds since the epoch."""
        return (mono_ns + int(self.res.get("clock.realtime_offset_ns", 0))) / 1e9

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WorkerState:
        """Rebuild a state; unknown fields are ignored and absent ones are new since.

        Raises:
            ValueError: the value is not a state's JSON form; a checkpoint may come from somebody else's file.
        """
        state = cls()
        for item in dataclasses.fields(cls):
            if item.name in value:
                setattr(state, item.name, _rebuilt(str(item.type), value[item.name]))
        return state


def _rebuilt(kind: str, value: Any) -> Any:
    """Take a JSON value for what a field's annotation says, or refuse it."""
    if kind.endswith(" | None"):
        return None if value is None else _rebuilt(kind.removesuffix(" | None"), value)
    if kind == "Histogram":
        return _histogram(value)
    if kind == "OpenOperation":
        return _operation(value)
    if kind.startswith("dict[str, "):
        if type(value) is not dict or len(value) > MAX_KEYS:
            raise ValueError("not a table of this size")
        inner = kind[len("dict[str, ") : -1]
        return value if inner == "Any" else {key: _rebuilt(inner, item) for key, item in value.items()}
    if type(value) not in _JSON_TYPES[kind]:
        raise ValueError(f"not {kind}")
    return value


def _operation(value: Any) -> OpenOperation:
    fields = {item.name: str(item.type) for item in dataclasses.fields(OpenOperation)}
    if type(value) is not dict or not {"event", "begun_ns"} <= value.keys():
        raise ValueError("not an open operation")
    return OpenOperation(**{name: _rebuilt(kind, value[name]) for name, kind in fields.items() if name in value})


def _histogram(value: Any) -> Histogram:
    match value:
        case {"bounds": [*bounds], "counts": [*counts], "total": int() | float() as total}:
            pass
        case _:
            raise ValueError("not a histogram")
    if len(counts) != len(bounds) + 1 or len(counts) > MAX_KEYS:
        raise ValueError("a histogram has one bucket more than bounds")
    if not all(type(bound) in _NUMBER for bound in bounds) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("bounds and counts are numbers")
    if any(low >= high for low, high in pairwise(bounds)):
        raise ValueError("bounds rise")
    return Histogram(bounds=tuple(float(bound) for bound in bounds), counts=counts, total=float(total))
