"""`hwr publish`: put a model's final bytes into a store, so that servers may require them.

Owns the command line and its report. Promises the key that `hwr run` with the same directory and options looks up.
Refuses to overwrite: a good artifact that is there stays.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hwr import telemetry
from hwr.cli.arguments import add_options, composed
from hwr.cli.children import terminating
from hwr.cli.progress import shown
from hwr.cli.values import one_dtype, present
from hwr.ending import terminated
from hwr.options import Options, refuse_unimplemented
from hwr.outcomes import Role
from hwr.units import bytes_text, printable, seconds_text

OPTION_NAMES = (
    "host_weight_runtime_root",
    "host_weight_runtime_validation",
    "hwr_coordination_timeout_seconds",
    "host_weight_runtime_max_store_gib",
    "host_weight_runtime_max_artifact_gib",
    "host_weight_runtime_min_free_gib",
    "run_dir",
    "config",
    "stage",
)


def add_command(commands: Any) -> None:
    """Add `publish` to the commands."""
    parser = commands.add_parser("publish", help="write a model's final bytes into a store", description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", metavar="MODEL_DIR", type=present, help="directory of a checkpoint: config.json and safetensors weights")
    parser.add_argument("--dtype", metavar="DTYPE", help="publish in this dtype (default: as the library would)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    add_options(parser, OPTION_NAMES)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Publish."""
    arguments.host_weight_runtime_mode = "preferred"
    options = composed(arguments)
    refuse_unimplemented(options)
    configure_tool(options)
    dtype = one_dtype(arguments.dtype)
    from hwr.cli.worker import quiet_libraries
    from hwr.loader.factory import PretrainedFactory
    from hwr.runtime import publish_checkpoint

    quiet_libraries()
    with terminated(terminating) as stop, shown(quiet=arguments.quiet):
        result, report = publish_checkpoint(PretrainedFactory(arguments.model, dtype), arguments.model, options)
    if stop.signal:
        return stop.exit_code
    if arguments.json:
        stages = {stage.value: seconds for stage, seconds in report.stage_seconds.items()}
        told = {"outcome": result.outcome, "key": result.key, "content_digest": result.content_digest, "bytes": result.payload_bytes}
        print(json.dumps({"schema_version": 1, **told, "stage_seconds": stages}))
        return 0
    print(f"{result.outcome}: {result.key}")
    print(
        f"{bytes_text(result.payload_bytes)} in {printable(str(options.host_weight_runtime.root))}, content digest {result.content_digest}"
    )
    print(", ".join(f"{stage} {seconds_text(seconds)}" for stage, seconds in report.stage_seconds.items()))
    return 0


def configure_tool(options: Options) -> None:
    """Start the journal of a command that is no server."""
    told = options.telemetry
    telemetry.configure(told.enabled, None if told.run_dir is None else str(told.run_dir), told.engine, role=Role.TOOL)
