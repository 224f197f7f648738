"""The options, a frozen object a concern.

Owns every option that a user can set: its name, type, default, aliases and help, declared once in the field that holds
its value. Promises that an object which exists is valid: each value in its normal form, none contradicting another.
Refuses disk, CUDA and libraries: a root may not exist, a limit may exceed what this machine has.
"""

# option() is a field specifier, as dataclasses.field is: it returns a field, and is called once a class.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final

from hwr.errors import OptionError
from hwr.options.kinds import Choice, Flag, PathText, Whole, Word, gib, seconds
from hwr.options.table import Concern, Spelling, option
from hwr.outcomes import BuildAdmission, RegistrationMode, RuntimeMode, ValidationLevel
from hwr.units import GIB

_DLO: Final = "distributed layerwise offload"
_SP: Final = "sequence parallelism"


class UlyssesMode(StrEnum):
    """What Ulysses attention does with head counts and lengths that do not divide."""

    STRICT = "strict"
    ADVANCED_UAA = "advanced_uaa"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWeightRuntimeOptions(Concern):
    """Whether and how a node-local store of final weights is used."""

    TITLE: ClassVar[str] = "host weight runtime"

    mode: RuntimeMode = option(
        "host_weight_runtime_mode",
        Choice(RuntimeMode),
        RuntimeMode.DISABLED,
        aliases=("--mode",),
        help="what a start may do with stored weights: disabled never looks, preferred falls back to the ordinary loading, "
        "required fails instead; populate a store with preferred first",
    )
    root: Path | None = option(
        "host_weight_runtime_root",
        PathText(),
        None,
        aliases=("--root",),
        help="directory of the store, on a filesystem of this node; an enabled mode needs it",
        meaning={None: "no store"},
    )
    validation: ValidationLevel = option(
        "host_weight_runtime_validation",
        Choice(ValidationLevel),
        ValidationLevel.MANIFEST_AND_METADATA,
        aliases=("--validation",),
        help="manifest_and_metadata checks identity, structure and sizes and does not see changed payload bytes; full_checksum hashes "
        "every payload byte before weights are restored, once a start and never per inference; neither authenticates a writer, and a "
        "checksum at start never protects against a later change",
    )
    coordination_timeout_seconds: float = option(
        "hwr_coordination_timeout_seconds",
        seconds(),
        600.0,
        help="how long a start waits for the locks of other starts before it gives up or falls back",
    )
    max_store_gib: float | None = option(
        "host_weight_runtime_max_store_gib",
        gib(zero=False, optional=True),
        None,
        help="refuse to publish when the whole store, quarantine included, would exceed this",
        meaning={None: "no limit"},
    )
    max_artifact_gib: float | None = option(
        "host_weight_runtime_max_artifact_gib",
        gib(zero=False, optional=True),
        None,
        help="refuse to publish an artifact larger than this",
        meaning={None: "no limit"},
    )
    min_free_gib: float | None = option(
        "host_weight_runtime_min_free_gib",
        gib(zero=True, optional=True),
        None,
        help="refuse to publish when less than this would stay free on the filesystem; 0 keeps nothing free",
        meaning={None: "5 % of the filesystem", 0.0: "nothing kept free"},
    )
    build_admission: BuildAdmission = option(
        "host_weight_runtime_build_admission",
        Choice(BuildAdmission),
        BuildAdmission.CONCURRENT,
        awaits="serialized admission of builders",
        refused="away",
        help="serialized lets one builder of any key work at a time, so that builders together respect the store's limit (which it needs)",
    )
    stall_after_seconds: float = option(
        "hwr_stall_after_seconds",
        seconds(),
        30.0,
        help="an operation without progress for this long is reported as stalled by the node's agent",
    )

    def agree(self, spelled: Spelling) -> None:
        if self.enabled and self.root is None:
            raise OptionError(
                option=spelled("host_weight_runtime_root"),
                problem=f"missing or blank, although {spelled('host_weight_runtime_mode')} is {self.mode}",
                remedy="Give the directory of the store, or leave the mode disabled.",
            )
        if self.build_admission is BuildAdmission.SERIALIZED and self.max_store_gib is None:
            raise OptionError(
                option=spelled("host_weight_runtime_build_admission"),
                problem=f"serialized needs {spelled('host_weight_runtime_max_store_gib')}, which is not set",
                remedy=f"Set a limit for the store, or leave it {BuildAdmission.CONCURRENT} (allowed: {', '.join(BuildAdmission)}).",
            )

    @property
    def enabled(self) -> bool:
        """Whether a store is looked at."""
        return self.mode is not RuntimeMode.DISABLED

    @property
    def max_store_bytes(self) -> int | None:
        """The limit of the whole store; None is none."""
        return _whole_bytes(self.max_store_gib)

    @property
    def max_artifact_bytes(self) -> int | None:
        """The limit of one artifact; None is none."""
        return _whole_bytes(self.max_artifact_gib)

    @property
    def min_free_bytes(self) -> int | None:
        """What must stay free on the filesystem; None is 5 % of it."""
        return _whole_bytes(self.min_free_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedLayerwiseOffloadOptions(Concern):
    """Whether and how blocks are streamed to the device, and how their memory is registered."""

    TITLE: ClassVar[str] = "distributed layerwise offload and host registration"

    enabled: bool = option(
        "enable_distributed_layerwise_offload",
        Flag(),
        False,
        aliases=("--dlo",),
        off=("--no-enable-distributed-layerwise-offload", "--no-dlo"),
        awaits=_DLO,
        refused="away",
        help="stream blocks from host memory to the device while the one before computes",
    )
    use_allgather: bool = option(
        "dlo_use_allgather",
        Flag(),
        True,
        aliases=("--allgather",),
        off=("--dlo-no-use-allgather", "--no-allgather"),
        awaits=_DLO,
        help="each rank keeps a share of each block and the group puts it together; needs replicated components",
    )
    resident_layers: int = option(
        "dlo_resident_layers",
        Whole(least=0),
        0,
        aliases=("--resident-layers",),
        awaits=_DLO,
        help="how many blocks stay on the device",
    )
    host_registration_mode: RegistrationMode = option(
        "dlo_host_registration_mode",
        Choice(RegistrationMode),
        RegistrationMode.AUTO,
        help="auto registers mapped weights and stages where that fails; disabled always stages: it avoids the driver's path and does not "
        "repair the driver; required fails the start unless all is registered",
    )
    host_registration_limit_gib: float = option(
        "dlo_host_registration_limit_gib",
        gib(zero=True, optional=False),
        0.0,
        help="ceiling of registered memory a rank; 0 means no ceiling, not off (off is --dlo-host-registration-mode disabled)",
        meaning={0.0: "no ceiling"},
    )
    registration_deadline_seconds: float = option(
        "hwr_registration_deadline_seconds",
        seconds(),
        600.0,
        help="roll back when registration takes longer; honoured between driver calls only: a call in progress cannot be cancelled, and a "
        "process stuck in one needs supervision from outside",
    )
    pin_cpu_memory: bool = option(
        "pin_cpu_memory",
        Flag(),
        True,
        off=("--no-pin-cpu-memory",),
        help="pin the host memory that is copied from; without it nothing is registered",
    )

    @property
    def registration_limit_bytes(self) -> int | None:
        """The ceiling as the registrar takes it; None is no ceiling."""
        return _whole_bytes(self.host_registration_limit_gib) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallelOptions(Concern):
    """How a sequence is divided over ranks."""

    TITLE: ClassVar[str] = "sequence parallelism"

    ulysses_mode: UlyssesMode = option(
        "ulysses_mode",
        Choice(UlyssesMode),
        UlyssesMode.STRICT,
        awaits=_SP,
        help="strict refuses heads and lengths that do not divide; advanced_uaa pads heads and exchanges lengths",
    )
    ulysses_degree: int = option("ulysses_degree", Whole(least=1), 1, aliases=("--sp",), awaits=_SP, help="ranks that exchange heads")
    ring_degree: int = option("ring_degree", Whole(least=1), 1, aliases=("--ring",), awaits=_SP, help="ranks that pass keys and values on")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions(Concern):
    """Whether and where a process says what it does."""

    TITLE: ClassVar[str] = "telemetry"

    enabled: bool = option(
        "telemetry",
        Flag(),
        True,
        off=("--no-telemetry",),
        help="write a journal of typed events; off means no file and no thread",
    )
    run_dir: Path | None = option(
        "run_dir",
        PathText(),
        None,
        help="directory of the journals",
        meaning={None: "/run/hwr, else a private temporary directory"},
    )
    engine: str = option(
        "engine",
        Word(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", allowed="up to 64 letters, digits, dots, dashes and underscores"),
        "default",
        help="name of the server in metrics and views",
    )
    metrics_port: int | None = option(
        "metrics_port",
        Whole(least=0, most=65535, optional=True, metavar="PORT"),
        None,
        help="serve /metrics of this process on the loopback interface; 0 takes a free port",
        meaning={None: "no endpoint", 0: "any free port"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFileOptions(Concern):
    """The file that options are read from."""

    TITLE: ClassVar[str] = "configuration file"

    config: Path | None = option(
        "config",
        PathText(metavar="FILE"),
        None,
        layers="above_file",
        help="TOML file of options by their full names with underscores; command line and environment go before it",
        meaning={None: "no file"},
    )
    stage: str | None = option(
        "stage",
        Word(pattern=r"(?s).+", allowed="the name of a [stage.NAME] table of the file", optional=True),
        None,
        layers="above_file",
        help="take the table [stage.NAME] of the file before its top level",
        meaning={None: "top level only"},
    )

    def agree(self, spelled: Spelling) -> None:
        if self.stage is not None and self.config is None:
            raise OptionError(
                option=spelled("stage"),
                problem=f"a stage is a table of a file, and {spelled('config')} names none",
                remedy="Give the file too, or leave the stage out.",
            )


def _whole_bytes(size_gib: float | None) -> int | None:
    return None if size_gib is None else int(size_gib * GIB)
