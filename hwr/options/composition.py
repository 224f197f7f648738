"""All options of a process as one value, with where each came from.

Owns `Options`, the table derived from its concerns, its JSON form for spawned ranks, and the rules that span concerns.
Promises that values and the set of explicitly given options travel together and arrive equal.
Refuses layers: files and environment are read elsewhere and only when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final, cast

from hwr.errors import NotImplementedYet, OptionError, OptionTypeError
from hwr.options.concerns import (
    ConfigFileOptions,
    DistributedLayerwiseOffloadOptions,
    HostWeightRuntimeOptions,
    SequenceParallelOptions,
    TelemetryOptions,
)
from hwr.options.table import Concern, Option, Spelling, nearest, plain, rows
from hwr.outcomes import RegistrationMode, RuntimeMode
from hwr.units import canonical_json

SCHEMA_VERSION: Final = 1

# Origins, beside `toml:<stage>` and `environment <variable>`.
DEFAULT: Final = "default"
TOML: Final = "toml"
COMMAND_LINE: Final = "command line"
CALL: Final = "call"
_ORIGINS: Final = (DEFAULT, TOML, COMMAND_LINE, CALL)
_STAGE_PREFIX: Final = TOML + ":"
_ENVIRONMENT_PREFIX: Final = "environment "


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option of a process; what `hwr.load` and a spawned rank are given.

    `origins` maps each option's name to `default`, `toml`, `toml:<stage>`, `environment <variable>`, `command line` or
    `call`. A value away from its default that nobody claims was set by the caller.
    """

    host_weight_runtime: HostWeightRuntimeOptions = field(default_factory=HostWeightRuntimeOptions)
    distributed_layerwise_offload: DistributedLayerwiseOffloadOptions = field(default_factory=DistributedLayerwiseOffloadOptions)
    sequence_parallel: SequenceParallelOptions = field(default_factory=SequenceParallelOptions)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
    config_file: ConfigFileOptions = field(default_factory=ConfigFileOptions)
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, holder in CONCERNS.items():
            if not isinstance(getattr(self, name), holder):
                raise OptionTypeError(
                    option=name, problem=f"takes {holder.__name__}, not {type(getattr(self, name)).__name__}", remedy="Or use Options.of()."
                )
        for name, origin in self.origins.items():
            row_of(name)
            if origin not in _ORIGINS and not str(origin).startswith((_STAGE_PREFIX, _ENVIRONMENT_PREFIX)):
                raise OptionError(
                    option=name,
                    problem=f"{origin!r} is no origin",
                    remedy=f"Allowed: {', '.join(_ORIGINS)}, toml:<stage>, environment <variable>.",
                )
        origins = {}
        for row in OPTIONS:
            origin = str(self.origins.get(row.name, DEFAULT))
            origins[row.name] = CALL if origin == DEFAULT and self.value(row.name) != row.default else origin
        object.__setattr__(self, "origins", MappingProxyType(origins))

    @classmethod
    def of(cls, *, server: bool = True, **values: Any) -> Options:
        """Build from full option names alone; neither environment nor file is read (`hwr.options.compose` does that).

        A name that is present is given, None included; what is absent keeps its default.

        Raises:
            OptionError: a name or a value is not allowed, or (unless `server` is false) registration is not eligible.
            OptionTypeError: a value has a type that the option does not take.
        """
        return assemble(values, dict.fromkeys(values, CALL), plain, server=server)

    @property
    def given(self) -> frozenset[str]:
        """The options that some layer gave explicitly, equal to the default or not."""
        return frozenset(name for name, origin in self.origins.items() if origin != DEFAULT)

    def value(self, name: str) -> Any:
        """Return an option's value by its full name."""
        row = row_of(name)
        return getattr(getattr(self, row.concern), row.field)

    def plain_values(self) -> dict[str, str | int | float | bool | None]:
        """Return all values by name in types that JSON has: paths and members of closed sets as text."""
        values = {row.name: self.value(row.name) for row in OPTIONS}
        return {name: str(value) if isinstance(value, str | PurePath) else value for name, value in values.items()}

    def spelled(self, name: str) -> str:
        """Return an option as its user wrote it: a flag, a variable, a key of a file."""
        top = COMMAND_LINE if COMMAND_LINE in self.origins.values() else CALL
        return spelling(self.origins, self.config_file.config, top)(name)

    def to_json(self) -> str:
        """Return values and origins as one line of ASCII JSON; `from_json` makes an equal object of it."""
        document = {"schema_version": SCHEMA_VERSION, "values": self.plain_values(), "origins": dict(self.origins)}
        return canonical_json(document).decode("ascii")

    @classmethod
    def from_json(cls, text: str | bytes) -> Options:
        """Return the options that `to_json` wrote, in this or another process.

        Raises:
            OptionError: not such text, or one of a version with other options.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        names = {row.name for row in OPTIONS}
        whole = isinstance(document, dict) and document.get("schema_version") == SCHEMA_VERSION
        if not whole or any(not isinstance(document.get(part), dict) or set(document[part]) != names for part in ("values", "origins")):
            raise OptionError(
                option="options as JSON",
                problem=f"not the options of this version (schema {SCHEMA_VERSION}, {len(names)} options)",
                remedy="Let the same version write and read them.",
            )
        return assemble(document["values"], document["origins"], plain, server=False)

    def __reduce__(self) -> tuple[Callable[[str], Options], tuple[str]]:
        # A mapping proxy cannot be pickled, and one form to travel in is enough.
        return Options.from_json, (self.to_json(),)


CONCERNS: Final[Mapping[str, type[Concern]]] = MappingProxyType(
    {
        f.name: f.default_factory
        for f in fields(Options)
        if f.default_factory is not MISSING and isinstance(f.default_factory, type) and issubclass(f.default_factory, Concern)
    }
)
OPTIONS: Final[tuple[Option, ...]] = tuple(row for name, holder in CONCERNS.items() for row in rows(name, holder))
BY_NAME: Final[Mapping[str, Option]] = MappingProxyType({row.name: row for row in OPTIONS})


def row_of(name: str, label: str = "") -> Option:
    """Return the row of a full name; `label` is where the name was written, if that was not Python.

    Raises:
        OptionError: no option has the name; says which one comes nearest.
    """
    row = BY_NAME.get(name)
    if row is None:
        raise OptionError(option=label or name, problem="no option has this name", remedy=_suggestion(name))
    return row


def spelling(origins: Mapping[str, str], config: PurePath | None, top: str) -> Spelling:
    """Return how to write options of these origins; what nobody gave is written as the layer `top` would."""

    def spelled(name: str) -> str:
        origin = origins.get(name, DEFAULT)
        if origin == DEFAULT:
            origin = top
        if origin == COMMAND_LINE:
            return BY_NAME[name].flag
        if origin.startswith(_ENVIRONMENT_PREFIX):
            return origin.removeprefix(_ENVIRONMENT_PREFIX)
        if origin.startswith(_STAGE_PREFIX):
            return f"{config}: [stage.{origin.removeprefix(_STAGE_PREFIX)}] {name}"
        if origin == TOML:
            return f"{config}: {name}"
        return name

    return spelled


def assemble(values: Mapping[str, object], origins: Mapping[str, str], spelled: Spelling, *, server: bool) -> Options:
    """Build the concerns from the values that won, then the whole; with `server`, apply the rules for one.

    Raises:
        OptionError: a name or a value is not allowed, or values contradict each other.
        OptionTypeError: a value has a type that the option does not take.
    """
    parts: dict[str, dict[str, object]] = {concern: {} for concern in CONCERNS}
    for name, value in values.items():
        row = row_of(name)
        parts[row.concern][row.field] = value
    built = {concern: CONCERNS[concern](spelled=spelled, **fields_given) for concern, fields_given in parts.items()}
    options = Options(origins=origins, **cast("dict[str, Any]", built))
    if server:
        _refuse_ineligible_registration(options, spelled)
    return options


def refuse_unimplemented(options: Options) -> None:
    """Refuse to run with what is modelled and not built yet, rather than ignore it.

    Raises:
        NotImplementedYet: names the option, as it was written, and the part that it waits for.
    """
    for row in OPTIONS:
        if not row.awaits or row.name not in options.given:
            continue
        if row.refused == "given" or options.value(row.name) != row.default:
            written = options.spelled(row.name)
            raise NotImplementedYet(
                what=f"{written} ({row.awaits})", remedy=f"Leave {written} out; --print-config shows what is set where."
            )


def _refuse_ineligible_registration(options: Options, spelled: Spelling) -> None:
    """Refuse a registration policy that could have no effect in a server (R3, R5)."""
    dlo = options.distributed_layerwise_offload
    mode = dlo.host_registration_mode
    if mode is RegistrationMode.AUTO:
        return
    lacking = []
    if not dlo.enabled:
        lacking.append(f"{spelled('enable_distributed_layerwise_offload')} is off")
    if dlo.use_allgather:
        lacking.append(f"{spelled('dlo_use_allgather')} is on")
    if options.host_weight_runtime.mode is RuntimeMode.DISABLED:
        lacking.append(f"{spelled('host_weight_runtime_mode')} is disabled")
    if lacking:
        raise OptionError(
            option=spelled("dlo_host_registration_mode"),
            problem=f"{mode} has no effect here: {' and '.join(lacking)}",
            remedy="Enable layerwise offload without AllGather and the host weight runtime, or leave it auto "
            f"(allowed: {', '.join(RegistrationMode)}).",
        )


def _suggestion(name: str) -> str:
    known = {row.name: row.name for row in OPTIONS}
    # The short flags are what fingers remember: `root` in a file stands for the option that --root sets.
    known |= {alias.removeprefix("--").replace("-", "_"): row.name for row in OPTIONS for alias in row.aliases}
    close = nearest(name.replace("-", "_").lower(), known)
    return f"Did you mean {known[close]}?" if close else "--help lists all options."
