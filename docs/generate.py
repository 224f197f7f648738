"""Write the reference that is made from the code: METRICS.md, EVENTS.md and docs/schema/.

Owns the text of these files. Promises the same bytes from the same declarations; `--check` names each file that differs, is missing
or is left over, and exits 1. Refuses facts that the declarations do not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))

from diag.node.snapshot import json_schema  # noqa: E402
from hwr.outcomes import NEVER_EMITTED  # noqa: E402
from hwr.telemetry.catalogue import Kind, Label, Metric, Scope  # noqa: E402
from hwr.telemetry.event import Begin, End, Event, Progress, json_key  # noqa: E402
from hwr.telemetry.events import SegmentOpened, all_events  # noqa: E402
from hwr.telemetry.metrics import METRICS  # noqa: E402
from hwr.telemetry.node_metrics import NODE_METRICS, TOP_DOMAINS  # noqa: E402
from hwr.telemetry.schema import event_schema, index_schema  # noqa: E402

SERIES_OF_A_RANK: Final = 350
SERIES_OF_EIGHT_RANKS: Final = 3000
TOP_ARTIFACTS: Final = 50
BY_HAND: Final = "docs/schema/hwr-diag/"  # reports have no declarations to make them from; tests/retention validates real ones

_NOTE: Final = "<!-- Made by docs/generate.py; edit the declarations, then run it again. -->"
_GROUPS: Final = (
    ("Build and resolution", "build resolution resolutions stages stage failures lookup source lease leases tensors"),
    ("What a worker does", "worker heartbeat operation progress"),
    ("Validation", "validation checksum"),
    ("Publication", "publications publication"),
    ("Registration", "registration registrations registered pin transport"),
    ("Distributed layerwise offload", "h2d block staging prefetches prefetch dlo allgather"),
    ("Sequence parallelism", "sp collective"),
    ("Memory", "process artifact memory allocator python gc retention"),
    ("Store and locks", "store lock"),
    ("Node and telemetry", "runs run workers node agent snapshot unreadable collector events"),
    ("Other", ""),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with `--check` compare them; return the exit code."""
    parser = argparse.ArgumentParser(description="Write METRICS.md, EVENTS.md and docs/schema from the declarations.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what differs")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="the repository (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    differing = drift(chosen.root)
    if chosen.check:
        for name in differing:
            sys.stderr.write(f"{name}: differs from the declarations; run `python docs/generate.py`\n")
        return 1 if differing else 0
    made = outputs()
    for name in differing:
        path = chosen.root / name
        if name in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name], encoding="utf-8")
        else:
            path.unlink()
        sys.stdout.write(f"{name}\n")
    return 0


def drift(root: Path) -> list[str]:
    """Return the names of the files that differ, are missing, or have no declaration any more."""
    made = outputs()
    differing = [name for name, text in made.items() if _text(root / name) != text]
    present = {path.relative_to(root).as_posix() for path in (root / "docs" / "schema").rglob("*.json")}
    present = {name for name in present if not name.startswith(BY_HAND)}
    return sorted([*differing, *(present - made.keys())])


def outputs() -> dict[str, str]:
    """Return every generated file by its name in the repository."""
    files = {"METRICS.md": metrics_text(), "EVENTS.md": events_text(), "docs/schema/index.json": _json(index_schema())}
    files["docs/schema/node-snapshot.json"] = _json(json_schema())
    for kind in all_events():
        files[f"docs/schema/events/{kind.NAME}.json"] = _json(event_schema(kind))
    return files


def metrics_text() -> str:
    """Return METRICS.md."""
    own = [metric for metric in METRICS if metric.scope is Scope.WORKER]
    summed = [metric for metric in METRICS if metric.scope is Scope.PROCESS]
    artifact = [metric for metric in own if any(label.values is None for label in metric.labels)]
    plain = sum(metric.series() for metric in own if metric not in artifact)
    process = sum(metric.series() for metric in summed)
    node = sum(metric.series() for metric in NODE_METRICS if metric not in _of_each(NODE_METRICS))
    each = {name: sum(metric.series() for metric in _of_each(NODE_METRICS, name)) for name in ("artifact", "domain")}
    whole = 8 * (plain + sum(m.series() for m in artifact)) + process + node + sum(each.values())
    lines = [
        "# Metrics",
        "",
        _NOTE,
        "",
        "Every metric of a worker carries `engine` and `rank`; those summed over all workers of an endpoint, and those that the node's",
        "agent has of the node, carry neither.",
        "Sizes are bytes, times seconds, timestamps seconds since the epoch (an age is `time()` minus the timestamp).",
        "A label has the values listed and no other.",
        "",
        "**What is there when.** Counters, histograms and StateSets exist from the start at 0. A gauge or timestamp is absent until",
        "it is known, and absent again when it no longer applies; it is never NaN, and never 0 for what could not be known.",
        "",
        "**Restarts.** A new worker of an engine and rank replaces the dead one at once and starts its counters at 0, which `rate()`",
        "reads as the restart that it is. Sums over workers keep what a replaced worker had counted: they never fall while the",
        "endpoint lives.",
        "",
        "| budget | series | limit |",
        "|---|---:|---:|",
        f"| one rank | {plain} | {SERIES_OF_A_RANK} |",
        f"| an artifact that a rank maps, the largest {TOP_ARTIFACTS} | {sum(m.series() for m in artifact)} each | |",
        f"| summed over the workers of an endpoint | {process} | |",
        f"| the node's agent, of the node | {node} | |",
        f"| the node's agent, an artifact, the largest {TOP_ARTIFACTS} (those in use first) | {each['artifact']} each | |",
        f"| the node's agent, a domain of stores, at most {TOP_DOMAINS} | {each['domain']} each | |",
        f"| an agent with eight ranks, one artifact and one store | {whole} | {SERIES_OF_EIGHT_RANKS} |",
        "",
        f"Failure codes that this version cannot meet have no series: {', '.join(f'`{code}`' for code in sorted(NEVER_EMITTED))}.",
        "",
    ]
    for title, metrics in _grouped((*METRICS, *NODE_METRICS)):
        lines += [f"## {title}", "", "| metric | type | unit | labels | series | present | meaning |", "|---|---|---|---|---:|---|---|"]
        lines += [_metric_row(metric) for metric in metrics]
        lines.append("")
    return "\n".join(lines)


def events_text() -> str:
    """Return EVENTS.md."""
    begins = {kind.END: kind for kind in all_events() if issubclass(kind, Begin)}
    lines = [
        "# Events",
        "",
        _NOTE,
        "",
        "One line of a journal is one event. The envelope and the files are described in",
        "[docs/internals/events.md](docs/internals/events.md), the JSON Schemas lie in [docs/schema](docs/schema/index.json).",
        "Names and fields only ever grow. Sizes are bytes, times seconds.",
        "A field marked `?` may be absent. An end event always carries `outcome` (ok, failed, timeout) and `seconds`, and on failure",
        "`error.code` and `error.reason`; a pair that failed is written with severity WARN at least.",
        "",
    ]
    for room, kinds in groupby(all_events(), key=lambda kind: kind.NAME.split(".")[1]):
        lines += [f"## {room}", ""]
        for kind in kinds:
            lines += [f"### `{kind.NAME}`", "", f"{_about(kind)}", "", f"{' · '.join(_facts(kind, begins))}", ""]
            rows = list(_fields(kind))
            if rows:
                lines += ["| field | type |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


# metrics ---------------------------------------------------------------------------------------------------------


def _grouped(metrics: Sequence[Metric]) -> Iterator[tuple[str, list[Metric]]]:
    group_of = {word: title for title, words in _GROUPS for word in words.split()}
    for title, _ in _GROUPS:
        of_group = [metric for metric in metrics if group_of.get(metric.name.split("_")[1], "Other") == title]
        if of_group:
            yield title, of_group


def _of_each(metrics: Sequence[Metric], label: str | None = None) -> list[Metric]:
    """Return those whose count depends on what lies on the node; the first label that has no closed set decides whose it is."""
    first = {metric.name: next((each.name for each in metric.labels if each.values is None), None) for metric in metrics}
    return [metric for metric in metrics if first[metric.name] is not None and label in (None, first[metric.name])]


def _metric_row(metric: Metric) -> str:
    labels = "<br>".join(_label(label) for label in metric.labels) or "-"
    unit = metric.unit or _unit(metric.name)
    series = str(metric.series()) + (" each" if any(label.values is None for label in metric.labels) else "")
    return f"| `{metric.name}` | {metric.kind} | {unit} | {labels} | {series} | {_presence(metric)} | {_cell(metric.help)} |"


def _label(label: Label) -> str:
    if label.values is None:
        most = f"at most {TOP_DOMAINS}" if label.name == "domain" else f"the largest {TOP_ARTIFACTS}"
        return f"`{label.name}`: 12 hex digits, {most}"
    if label.name == "event":
        return "`event`: every name of [EVENTS.md](EVENTS.md) but the checkpoint's"
    return f"`{label.name}`: {', '.join(label.values)}"


def _unit(name: str) -> str:
    words = name.removesuffix("_total").split("_")
    return next((unit for unit in ("bytes", "seconds") if unit in words), "-")


def _presence(metric: Metric) -> str:
    if metric.scope is Scope.PROCESS:
        return "from the start"
    if metric.scope is Scope.NODE or metric.name == "hwr_worker_stall":
        return "agent, once known"
    if metric.kind is Kind.INFO and metric.labels:
        return "once chosen"
    if metric.kind in (Kind.COUNTER, Kind.HISTOGRAM, Kind.STATESET, Kind.INFO):
        return "from the start"
    return "once known"


# events ----------------------------------------------------------------------------------------------------------


def _facts(kind: type[Event], begins: dict[type[End], type[Begin]]) -> Iterator[str]:
    yield f"severity {kind.SEV}"
    if issubclass(kind, Begin):
        if kind.OPERATION is not None:
            yield f"operation `{kind.OPERATION}`"
        yield f"ends with `{kind.END.NAME}`"
    elif issubclass(kind, End):
        yield f"begun by `{begins[kind].NAME}`"
    elif issubclass(kind, Progress):
        yield "carries the `op` of its begin event"
    elif kind is SegmentOpened:
        yield "carries `res`; its `seq` is that of the last event in its state"


def _fields(kind: type[Event]) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    common = {field.name for field in dataclasses.fields(End)} if issubclass(kind, End) else set()
    for field in dataclasses.fields(kind):
        if field.name not in common:
            text, may_miss = _type(hints[field.name])
            yield f"| `{json_key(field.name)}`{'?' if may_miss else ''} | {text} |"


def _type(hint: Any) -> tuple[str, bool]:
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_args(hint) and type(None) in typing.get_args(hint):
        return _type(parts[0])[0], True
    origin = typing.get_origin(hint)
    if origin is tuple:
        return f"list of {_type(parts[0])[0]}", False
    if origin is dict:
        return "object", False
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(f'`{member.value}`' for member in hint)}", False
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[hint], False


# text ------------------------------------------------------------------------------------------------------------


def _about(kind: type[Event]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


if __name__ == "__main__":
    sys.exit(main())
