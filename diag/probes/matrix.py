"""Which retention runs a matrix has, in which order, and under which names.

Owns the plan: cases x element counts x offsets x repetitions, and what makes two plans the same. A function of the user's is one case, not
one for each size and offset. Promises that the control of a group is measured first in it, that repetitions of a case lie apart in time
(repetition is the outermost loop, the mode the innermost), and that a plan read back is the plan that was written. Refuses I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import Any, Final

from hwr.units import short_key

SCHEMA_VERSION: Final = 1
CONTROL: Final = "reuse"
CALL: Final = "call"
MODES: Final = ("get_tensor", "get_slice", "load_file", "reopen", CONTROL, "hwr_lease")
ELEMENTS: Final = (16, 64, 4096)
OFFSETS: Final = (0, 4000)
# The probe writes a file for each run: a matrix above this is a mistake in a list, not a wish.
MAX_RUNS: Final = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One case: how a tensor is come by, how large it is, and where it begins in the data section."""

    mode: str
    tensor_elements: int
    offset_bytes: int

    def __post_init__(self) -> None:
        if self.tensor_elements < 1 or self.offset_bytes < 0:
            raise ValueError(f"no such tensor: {self}")

    def __str__(self) -> str:
        return f"{self.mode}, {self.tensor_elements} elements, offset {self.offset_bytes}" if self.has_tensor else self.mode

    @property
    def has_tensor(self) -> bool:
        """Whether the size and the place of a tensor are part of the case; a function of the user's knows neither."""
        return self.mode != CALL

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; null for what it does not have."""
        elements, offset = (self.tensor_elements, self.offset_bytes) if self.has_tensor else (None, None)
        return {"mode": self.mode, "tensor_elements": elements, "offset_bytes": offset}


@dataclass(frozen=True, slots=True)
class Step:
    """One run of the matrix. `asked` is False for a control that the user did not name among the modes."""

    case: Case
    repetition: int
    asked: bool = True

    @property
    def stem(self) -> str:
        """The name of its files without a suffix (R24)."""
        return stem(self.case.mode, self.case.tensor_elements, self.case.offset_bytes, self.repetition)

    @property
    def is_control(self) -> bool:
        """Whether other runs of its group are judged against it."""
        return self.case.mode == CONTROL

    @property
    def control_stem(self) -> str | None:
        """The name of its control's files; None for the control itself."""
        return None if self.is_control else stem(CONTROL, self.case.tensor_elements, self.case.offset_bytes, self.repetition)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a matrix measures. `likeness` is what was copied from the process `like`, so that a resumed matrix does not need it alive."""

    modes: tuple[str, ...] = MODES
    tensor_elements: tuple[int, ...] = ELEMENTS
    offset_bytes: tuple[int, ...] = OFFSETS
    repetitions: int = 2
    iterations: int = 20_000
    sample_every: int = 2_000
    warmup: int = 1_000
    header_bytes: int | None = None
    tensors: int | None = None
    call: str | None = None
    call_sha256: str | None = None
    python: str = ""
    cpu: tuple[int, ...] | None = None
    like: int | None = None
    likeness: Mapping[str, Any] | None = None
    timeout_seconds: float = 120.0
    attribute: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("modes", "tensor_elements", "offset_bytes"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name}: empty, or one of them twice")
        if min(self.repetitions, self.iterations, self.sample_every, self.warmup) < 1:
            raise ValueError("a count below 1")
        if (self.call is not None) != (CALL in self.modes):
            raise ValueError("mode call and the function that it calls go together")

    def steps(self) -> tuple[Step, ...]:
        """Return every run in the order in which it is measured."""
        return tuple(self._steps())

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        told = asdict(self)
        for name in _TUPLES:
            if told[name] is not None:
                told[name] = list(told[name])
        return {"schema_version": SCHEMA_VERSION, **told, "order": [step.stem for step in self.steps()]}

    def _steps(self) -> Iterator[Step]:
        others = [mode for mode in self.modes if mode != CONTROL]
        asked = CONTROL in self.modes
        groups = list(product(self.tensor_elements, self.offset_bytes))
        for repetition in range(1, self.repetitions + 1):
            for elements, offset in groups:
                yield Step(Case(CONTROL, elements, offset), repetition, asked)
                for mode in others:
                    if mode != CALL or (elements, offset) == groups[0]:  # once, beside the first control
                        yield Step(Case(mode, elements, offset), repetition)


_TUPLES: Final = ("modes", "tensor_elements", "offset_bytes", "cpu")
# Told in a plan, and no reason to refuse it: what was copied from `like` shows in python, cpu and the environment.
_NOT_COMPARED: Final = frozenset({"likeness", "timeout_seconds"})
_SPELT: Final = {"call_sha256": "the file of --call"}


def runs_of(modes: Collection[str], groups: int, repetitions: int) -> int:
    """Return how many runs a plan of so many sizes and offsets has, before it is made."""
    tensors = {*modes, CONTROL} - {CALL}
    return (len(tensors) * groups + (CALL in modes)) * repetitions


def stem(mode: str, tensor_elements: int, offset_bytes: int, repetition: int) -> str:
    """Return the name of a run's files without a suffix (R24)."""
    return f"{mode}-{tensor_elements}-o{offset_bytes}-{repetition}" if offset_bytes else f"{mode}-{tensor_elements}-{repetition}"


def differences(before: Mapping[str, Any], after: Plan) -> list[str]:
    """Say what differs between a plan that was written and one that is asked for, a sentence each; empty if they are the same."""
    said = []
    now = after.to_json()
    if before.get("schema_version") != SCHEMA_VERSION:
        return [f"schema_version: {before.get('schema_version')} there, {SCHEMA_VERSION} now"]
    for name in (entry.name for entry in fields(Plan)):
        if name in _NOT_COMPARED:
            continue
        then, value = before.get(name), now[name]
        if name == "environment":
            said += _environment_differences(then if isinstance(then, dict) else {}, value)
        elif then != value:
            said.append(f"{_SPELT.get(name) or option(name)}: {_shown(then)} there, {_shown(value)} now")
    return said


def option(name: str) -> str:
    """Return the flag that sets a field of the plan."""
    return "--" + name.replace("_", "-")


def _environment_differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    said = []
    for name in sorted(then.keys() | now.keys()):
        old, new = then.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            said += _environment_differences(old, new, f"{prefix}{name}.")
        elif old != new:
            said.append(f"{prefix}{name}: {_shown(old)} there, {_shown(new)} now")
    return said


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    said = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return short_key(said) if re.fullmatch(r"[0-9a-f]{64}", said) else said
