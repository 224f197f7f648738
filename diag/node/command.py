"""`hwr agent`: the command line.

Owns the arguments of the agent and what a person sees of its beginning and end. Promises that help loads none of the agent, two lines for
what cannot be served, and on standard error where it looked and what it found. Refuses to read anything itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 9478
_LAST_PORT = 65535


def add_command(commands: Any) -> None:
    """Add `agent` to the commands of `hwr`."""
    parser = commands.add_parser(
        "agent",
        help="watch every worker of this node; one port that always answers",
        description="Read the journals, /proc and the stores of this node, and answer on one port: "
        "/metrics, /startupz, /livez, /readyz, /snapshot. Reads only; signals nobody, calls neither CUDA nor NVML.",
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, and the command as the default `command`."""
    parser.add_argument(
        "--run-dir",
        dest="run_dirs",
        metavar="DIR",
        type=_path,
        action="append",
        help="where journals lie; may be given several times (default: HWR_RUN_DIR, else /run/hwr and the private ones)",
    )
    parser.add_argument(
        "--root", dest="roots", metavar="DIR", type=_path, action="append", help="a store to report; those that journals name are found"
    )
    parser.add_argument(
        "--addr",
        metavar="ADDR",
        type=_word,
        default=DEFAULT_ADDRESS,
        help=f"address to listen on (default: {DEFAULT_ADDRESS}); another one is reachable from outside: give a --web-config then",
    )
    parser.add_argument(
        "--port", metavar="PORT", type=_port, default=DEFAULT_PORT, help=f"port to listen on; 0 takes a free one (default: {DEFAULT_PORT})"
    )
    parser.add_argument("--web-config", metavar="FILE", type=_path, help="TLS and passwords, in the format of Prometheus's own exporters")
    parser.add_argument(
        "--stall-after",
        metavar="SECONDS",
        type=_seconds,
        help="an operation without progress for this long is reported as stalled, unless its worker has a value of its own "
        "(default: HWR_STALL_AFTER_SECONDS, else 30)",
    )
    parser.add_argument("--once", action="store_true", help="look once, print one exposition, end")
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run it."""
    from diag.node.agent import Agent, Settings, once

    settings = Settings(
        run_dirs=tuple(arguments.run_dirs or ()),
        roots=tuple(arguments.roots or ()),
        address=arguments.addr,
        port=arguments.port,
        web_config=arguments.web_config,
        stall_after_seconds=_stall_after(arguments.stall_after),
    )
    if arguments.once:
        sys.stdout.write(once(settings).decode())
        return 0
    return Agent(settings).run()


def _stall_after(given: float | None) -> float:
    from hwr.options import BY_NAME

    row = BY_NAME["hwr_stall_after_seconds"]
    told = os.environ.get(row.variable, "")
    if given is not None:
        return given
    value = row.kind.from_text(row.variable, told) if told else row.default
    return float(str(value))


def _path(text: str) -> Path:
    return Path(_word(text)).absolute()


def _word(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is blank")
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= _LAST_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 0 to {_LAST_PORT}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
