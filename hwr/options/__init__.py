"""Options: what a user may set, where each value came from, and what is refused.

Owns one table of all options (declared in the fields of the concerns), the frozen objects that hold their values, and
the layers that they come from: a call or command line, environment, a stage of a TOML file, the file, defaults.
Promises that what exists is valid and that a refusal names the option as its user wrote it.
Refuses disk, CUDA and libraries while values are checked; only `compose` opens a file, the one that `config` names.

    options = Options.of(host_weight_runtime_mode="preferred", host_weight_runtime_root="/var/cache/weights")
    options = compose({"host_weight_runtime_mode": "preferred"})  # and HWR_* and the file of HWR_CONFIG
"""

from __future__ import annotations

from hwr.options.composition import (
    BY_NAME,
    CALL,
    COMMAND_LINE,
    CONCERNS,
    DEFAULT,
    OPTIONS,
    TOML,
    Options,
    refuse_unimplemented,
)
from hwr.options.concerns import (
    ConfigFileOptions,
    DistributedLayerwiseOffloadOptions,
    HostWeightRuntimeOptions,
    SequenceParallelOptions,
    TelemetryOptions,
    UlyssesMode,
)
from hwr.options.layers import compose, misspelt_variables
from hwr.options.table import Option, nearest

__all__ = [
    "BY_NAME",
    "CALL",
    "COMMAND_LINE",
    "CONCERNS",
    "DEFAULT",
    "OPTIONS",
    "TOML",
    "ConfigFileOptions",
    "DistributedLayerwiseOffloadOptions",
    "HostWeightRuntimeOptions",
    "Option",
    "Options",
    "SequenceParallelOptions",
    "TelemetryOptions",
    "UlyssesMode",
    "compose",
    "misspelt_variables",
    "nearest",
    "refuse_unimplemented",
]
