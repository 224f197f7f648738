"""The answer to "which options are in force, and who set them".

Owns the table and the JSON object of `--print-config`. Promises each option with its value and origin, a value that does
not speak for itself with its meaning. Refuses to judge: it shows options that a run would refuse as not implemented.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from hwr.options import OPTIONS, Options, misspelt_variables
from hwr.units import printable

_SCHEMA_VERSION = 1


def print_config(
    options: Options,
    *,
    as_json: bool = False,
    rank: int | None = None,
    environ: Mapping[str, str] | None = None,
    out: TextIO | None = None,
    notes: TextIO | None = None,
) -> None:
    """Write options, values and origins to `out` (stdout), as a table or as one JSON object.

    Variables that look like a misspelt option go to `notes` (stderr): nothing else would ever mention them.
    """
    print(config_json(options, rank) if as_json else config_table(options, rank), file=sys.stdout if out is None else out)
    for name, near in misspelt_variables(os.environ if environ is None else environ).items():
        print(f"note: {printable(name)} is no option; did you mean {near}?", file=sys.stderr if notes is None else notes)


def config_table(options: Options, rank: int | None = None) -> str:
    """Return the aligned table, a header line first; `rank` says whose object it is."""
    lines = [("option", "value", "origin")]
    lines += [(row.name, printable(row.shown(options.value(row.name))), printable(options.origins[row.name])) for row in OPTIONS]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    heading = "" if rank is None else f"rank {rank}\n"
    return heading + "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in lines)


def config_json(options: Options, rank: int | None = None) -> str:
    """Return one JSON object: for each option its value, origin, and whether it was given."""
    plain = options.plain_values()
    entries = {
        row.name: {"value": plain[row.name], "origin": options.origins[row.name], "given": row.name in options.given} for row in OPTIONS
    }
    whose = {} if rank is None else {"rank": rank}
    return json.dumps({"schema_version": _SCHEMA_VERSION, **whose, "options": entries}, indent=2)
