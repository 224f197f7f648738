"""Layers of options: a call or command line, then environment, then a file's stage, then the file, then defaults.

Owns the reading of the environment and of the TOML file, and which layer wins. Promises that a refusal names the layer
and the place in it: a flag, a variable, a file with its key. Refuses every file but the one that an option names.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from hwr.errors import OptionError, errno_text
from hwr.options.composition import BY_NAME, CALL, OPTIONS, TOML, Options, assemble, row_of, spelling
from hwr.options.concerns import ConfigFileOptions
from hwr.options.table import nearest
from hwr.units import one_line

_STAGES: Final = "stage"  # the table of tables of a file; also the option that chooses one of them

# Variables with our prefix that are not options.
_OTHER_VARIABLES: Final = frozenset({"HWR_RUN_ID"})


def compose(
    call: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    server: bool = True,
    layer: str = CALL,
) -> Options:
    """Compose the options of a process from all layers, each name's value from the highest layer that gives it.

    `call` maps full names to values; as `layer` "command line" its values may be text. `environ` defaults to the
    process's own. With `server`, a registration policy that could have no effect is refused; a tool passes False.

    Raises:
        OptionError: a name or a value is not allowed, values contradict each other, or the file cannot be used.
        OptionTypeError: a value has a type that the option does not take.
    """
    variables = os.environ if environ is None else environ
    above: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for row in OPTIONS:
        # An empty variable is how unit files and compose files write "not set".
        if variables.get(row.variable):
            above[row.name], origins[row.name] = variables[row.variable], f"environment {row.variable}"
    for name, value in (call or {}).items():
        row_of(name)
        above[name], origins[name] = value, layer
    spelled = spelling(origins, None, layer)
    for name, value in above.items():
        if isinstance(value, str) and origins[name] != CALL:
            above[name] = BY_NAME[name].kind.from_text(spelled(name), value)
    # Read first and alone: without a usable file there is nothing to compose.
    source = ConfigFileOptions(spelled=spelled, **{name: above[name] for name in ("config", "stage") if name in above})
    below: dict[str, object] = {}
    if source.config is not None:
        origins_below: dict[str, str] = {}
        for origin, table in _from_file(source.config, source.stage, spelled("config"), spelled("stage")):
            below |= table
            origins_below |= dict.fromkeys(table, origin)
        origins = origins_below | origins
    return assemble(below | above, origins, spelling(origins, source.config, layer), server=server)


def misspelt_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like an option's and are none, with the one that was probably meant."""
    known = {row.variable for row in OPTIONS} | _OTHER_VARIABLES
    strange = sorted(name for name in environ if name.startswith("HWR_") and name not in known)
    return {name: near for name in strange if (near := nearest(name, known, cutoff=0.85)) is not None}


def _from_file(path: Path, stage: str | None, config_label: str, stage_label: str) -> Iterable[tuple[str, dict[str, object]]]:
    """Yield (origin, values) of the top level, then of the chosen stage."""
    document = _read_toml(path, config_label)
    stages = document.pop(_STAGES, {})
    if not isinstance(stages, dict) or not all(isinstance(table, dict) for table in stages.values()):
        raise OptionError(option=f"{path}: {_STAGES}", problem="not a table of tables", remedy="Write options under [stage.NAME].")
    _refuse_strange_keys(document, f"{path}: ")
    for name, table in stages.items():
        _refuse_strange_keys(table, f"{path}: [{_STAGES}.{name}] ")
    yield TOML, document
    if stage is None:
        return
    if stage not in stages:
        known = ", ".join(sorted(stages)) or "none"
        raise OptionError(option=stage_label, problem=f"{path} has no table [stage.{stage}]", remedy=f"Stages of this file: {known}.")
    yield f"{TOML}:{stage}", stages[stage]


def _read_toml(path: Path, label: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise OptionError(option=label, problem=f"{path} cannot be read: {errno_text(error)}", remedy="Give a TOML file.") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or a number of thousands of digits
        problem = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        raise OptionError(option=label, problem=f"{path} is not TOML: {problem}", remedy="Correct the file at that place.") from error


def _refuse_strange_keys(table: Mapping[str, object], place: str) -> None:
    for key in table:
        row = row_of(key, f"{place}{key}")
        if row.layers == "above_file":
            raise OptionError(
                option=f"{place}{key}", problem="cannot be set in a file", remedy=f"Use {row.flag} or the variable {row.variable}."
            )
