"""`hwr store`: look at a store, check what it holds, ask why a model would miss.

Owns ls, show, verify and explain. Promises to change nothing in a store; `verify` reads and hashes every payload byte of an artifact and
judges it as a start under full_checksum would. Refuses to deny or quarantine: that is a server's decision.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hwr import telemetry
from hwr.cli.arguments import add_options, composed
from hwr.cli.children import terminating
from hwr.cli.progress import shown
from hwr.cli.publish import configure_tool
from hwr.cli.values import one_dtype, present
from hwr.ending import terminated
from hwr.errors import EXIT_FAILURE, EXIT_OK, DomainUnavailable, HwrError, OptionError, Unavailable, UntrustedPermissions
from hwr.options import Options
from hwr.outcomes import InventoryState, ValidationLevel
from hwr.store import inventory
from hwr.store.inventory import Entry
from hwr.store.layout import MANIFEST, READY
from hwr.telemetry.failures import record_failure
from hwr.units import bytes_text, printable, short_key

OPTION_NAMES = ("host_weight_runtime_root", "run_dir", "config", "stage")


def add_command(commands: Any) -> None:
    """Add `store` and its verbs to the commands."""
    store = commands.add_parser("store", help="look at a store", description=__doc__.partition("\n\n")[0])
    verbs = store.add_subparsers(metavar="VERB", required=True)
    _verb(verbs, "ls", "list artifacts, quarantine and leftovers", ls)
    _verb(verbs, "show", "show one artifact's identity and tensors", show).add_argument(
        "key", metavar="KEY", type=present, help="key, or its first digits"
    )
    verify_parser = _verb(verbs, "verify", "read and hash every payload byte", verify)
    verify_parser.add_argument("key", metavar="KEY", type=present, nargs="?", help="key, or its first digits (default: every artifact)")
    explain_parser = _verb(verbs, "explain", "say whether this model would hit here, and if not, why", explain)
    explain_parser.add_argument("model", metavar="MODEL_DIR", type=present, help="directory of a checkpoint")
    explain_parser.add_argument("--dtype", metavar="DTYPE", help="as for hwr run")


def _verb(verbs: Any, name: str, text: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, OPTION_NAMES)
    parser.set_defaults(command=command)
    return parser


def ls(arguments: argparse.Namespace) -> int:
    """List what is there."""
    options, found = _opened(arguments)
    if arguments.json:
        rows = [
            {
                "key": e.key,
                "state": e.state,
                "name": e.name,
                "size_bytes": e.size_bytes,
                "files": e.files,
                "modified_ns": e.modified_ns,
                "reason": e.reason,
            }
            for e in found
        ]
        print(json.dumps({"schema_version": 1, "root": str(_root(options)), "entries": rows}, indent=2))
        return EXIT_OK
    if not found:
        print("the store is empty")
        return EXIT_OK
    print(f"{'KEY':12}  {'STATE':11}  {'SIZE':>9}  {'CHANGED':19}  COMPONENT")
    for entry in found:
        identity = inventory.identity(entry.path) or {}
        component = printable(str((identity.get("component") or {}).get("name", "-")))
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.modified_ns / 1e9))
        reason = f"  ({printable(entry.reason)})" if entry.reason else ""
        print(f"{short_key(entry.key):12}  {entry.state:11}  {bytes_text(entry.size_bytes):>9}  {changed}  {component}{reason}")
    total = sum(entry.size_bytes for entry in found)
    print(f"{len(found)} entries, {bytes_text(total)} in {printable(str(_root(options)))}")
    return EXIT_OK


def show(arguments: argparse.Namespace) -> int:
    """Show one artifact."""
    options, found = _opened(arguments)
    entry = _chosen(found, arguments.key, _root(options))
    manifest, ready = inventory.document(entry.path / MANIFEST), inventory.document(entry.path / READY)
    if arguments.json:
        told = {"key": entry.key, "state": entry.state, "reason": entry.reason, "ready": ready, "manifest": manifest}
        print(json.dumps({"schema_version": 1, **told}, indent=2))
        return EXIT_OK
    manifest = manifest or {}
    tensors = manifest.get("tensors") or []
    print(f"key             {entry.key}")
    print(f"state           {entry.state}" + (f" ({printable(entry.reason)})" if entry.reason else ""))
    print(f"size            {bytes_text(entry.size_bytes)} in {entry.files} files")
    print(f"tensors         {len(tensors)}, names that share one: {len(manifest.get('aliases') or {})}")
    print(f"content digest  {printable(str(manifest.get('content_digest', '-')))}")
    for section, fields in (manifest.get("identity") or {}).items():
        if isinstance(fields, dict):
            said = ", ".join(f"{name}={printable(str(value))}" for name, value in fields.items() if value not in ("", {}, None))
            print(f"{printable(section):15} {said}")
    return EXIT_OK


def verify(arguments: argparse.Namespace) -> int:
    """Hash every payload byte of one artifact, or of all."""
    options, found = _opened(arguments)
    configure_tool(options)
    from hwr.store.lookup import judge

    owner = os.stat(_root(options)).st_uid
    if owner != os.geteuid():  # every artifact would look wrong to us, and none is
        problem = f"belongs to uid {owner}, not to this user ({os.geteuid()}), who cannot judge it"
        raise UntrustedPermissions(reason="owner", path=str(_root(options)), root=str(_root(options)), problem=problem)
    wanted = [_chosen(found, arguments.key, _root(options))] if arguments.key else _artifacts(found)
    results = []
    with terminated(terminating) as stop, shown():
        for entry in wanted:
            failure: HwrError | None = None
            try:
                judge(entry.path, entry.key, None, ValidationLevel.FULL_CHECKSUM).close()
            except HwrError as error:
                failure = error
                record_failure(error, fatal=False)
            results.append((entry, failure))
    if stop.signal:
        return stop.exit_code
    if arguments.json:
        rows = [
            {"key": e.key, "ok": f is None, "code": f and f.code, "reason": f and f.reason, "message": f and str(f)} for e, f in results
        ]
        print(json.dumps({"schema_version": 1, "artifacts": rows}, indent=2))
    else:
        for entry, failure in results:
            print(f"{short_key(entry.key)}  {'ok' if failure is None else failure.code}  {bytes_text(entry.size_bytes)}")
            if failure is not None:
                print(f"  {failure.cause}\n  {failure.way_out}")
    return EXIT_OK if all(failure is None for _, failure in results) else EXIT_FAILURE


def explain(arguments: argparse.Namespace) -> int:
    """Say whether a model would hit."""
    arguments.host_weight_runtime_mode = "preferred"
    options = composed(arguments)
    configure_tool(options)
    dtype = one_dtype(arguments.dtype)
    from hwr.loader.factory import PretrainedFactory
    from hwr.runtime import explain as explained

    with terminated(terminating) as stop, shown():
        key, miss = explained(PretrainedFactory(arguments.model, dtype), arguments.model, options)
    if stop.signal:
        return stop.exit_code
    if arguments.json:
        told = (
            None
            if miss is None
            else {"sections": miss.sections, "fields": miss.fields, "nearest": miss.nearest, "candidates": miss.candidates}
        )
        print(json.dumps({"schema_version": 1, "key": key, "stored": miss is None, "miss": told}, indent=2))
    elif miss is None:
        print(f"hit: artifact {key} is stored")
    else:
        print(f"miss: artifact {key} is not stored\n{miss.text()}")
    telemetry.close()
    return EXIT_OK if miss is None else EXIT_FAILURE


def _opened(arguments: argparse.Namespace) -> tuple[Options, tuple[Entry, ...]]:
    options = composed(arguments)
    root = _root(options)
    found = inventory.entries(root)
    if isinstance(found, Unavailable):
        raise DomainUnavailable(reason="no_store", root=str(root), problem=found.reason)
    return options, found


def _root(options: Options) -> Path:
    root = options.host_weight_runtime.root
    if root is None:
        raise OptionError(option="--host-weight-runtime-root", problem="it is not set", remedy="Say which store: --root DIRECTORY.")
    return root


def _artifacts(found: tuple[Entry, ...]) -> list[Entry]:
    return [entry for entry in found if entry.state in (InventoryState.READY, InventoryState.DENIED)]


def _chosen(found: tuple[Entry, ...], key: str, root: Path) -> Entry:
    matching = [entry for entry in _artifacts(found) if entry.key.startswith(key)]
    if not matching:
        raise OptionError(option="KEY", problem=f"no key begins with {key!r}", remedy=f"`hwr store ls --root {root}` shows the keys.")
    if len(matching) > 1:
        raise OptionError(
            option="KEY", problem=f"{len(matching)} keys begin with {key!r}", remedy="Give more digits; `hwr store ls` shows them."
        )
    return matching[0]
