"""The agent's own journal: what changed on the node, what was concluded, what failed.

Owns the last value that was told of each entry. Promises one line a snapshot at most (the first, and one after much changed, takes
several), only what moved beyond the rules of `recorded.py`, a verdict when its class or whom it blames changes, and a collector when
it begins or ends to fail. Refuses what workers say of themselves: their journals have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from diag.node import recorded
from diag.node.recorded import Entries, Entry
from diag.node.snapshot import NodeSnapshot
from hwr import telemetry
from hwr.outcomes import Stall
from hwr.telemetry import events as E
from hwr.telemetry.event import Event

# A line holds 64 KiB; this is what the entries of one may take by a rough count.
LINE_BYTES: Final = 24 << 10
PROBLEM_NS: Final = 60_000_000_000


class NodeJournal:
    """Records snapshots, one after the other, from one thread."""

    def __init__(self, emit: Callable[[Event], None] = telemetry.emit) -> None:
        self._emit = emit
        self._told: dict[str, Entries] = {}
        self._times: dict[tuple[str, str], dict[str, int]] = {}
        self._verdicts: dict[str, tuple[Stall, tuple[str, ...]]] = {}
        self._failing: dict[tuple[str, str], tuple[str, int]] = {}
        self._artifacts: object = None

    def record(self, snapshot: NodeSnapshot) -> None:
        """Emit what is new in this snapshot."""
        self._sample(snapshot)
        self._judge(snapshot)
        self._health(snapshot)

    def _sample(self, snapshot: NodeSnapshot) -> None:
        line: dict[str, Entries] = {}
        size = 0
        parts = recorded.parts(snapshot)
        if snapshot.artifacts is not self._artifacts:  # thousands of them are joined again only when something changed
            self._artifacts = snapshot.artifacts
            parts["artifacts"] = recorded.artifacts(snapshot.artifacts)
        for part, entries in parts.items():
            for name, entry in self._changes(part, entries, snapshot.taken_ns).items():
                cost = len(name) + len(repr(entry))
                if size + cost > LINE_BYTES and line:
                    self._emit(E.NodeSampled(**line))
                    line, size = {}, 0
                line.setdefault(part, {})[name] = entry
                size += cost
        if line:
            self._emit(E.NodeSampled(**line))

    def _changes(self, part: str, entries: Entries, now_ns: int) -> dict[str, Any]:
        held = self._told.setdefault(part, {})
        found: dict[str, Entry | None] = {}
        for name in [name for name in held if name not in entries]:
            del held[name]
            self._times.pop((part, name), None)
            found[name] = None
        for name, entry in entries.items():
            told = held.setdefault(name, {})
            change = recorded.changed(part, name, told, self._times.setdefault((part, name), {}), entry, now_ns)
            if change:
                told |= change
                found[name] = change
        return found

    def _judge(self, snapshot: NodeSnapshot) -> None:
        present = set()
        for worker in snapshot.workers:
            name, verdict = recorded.name_of(worker.directory), worker.verdict
            present.add(name)
            if self._verdicts.get(name, (Stall.NONE, ())) == (verdict.stall, verdict.blames):
                continue
            self._verdicts[name] = (verdict.stall, verdict.blames)
            self._emit(
                E.StallJudged(
                    worker=name,
                    run_id=worker.run_id,
                    engine=worker.engine,
                    rank=worker.rank,
                    pid=worker.pid,
                    stall=verdict.stall,
                    confidence=verdict.confidence,
                    evidence=verdict.evidence,
                    blames=verdict.blames,
                    runbook=verdict.runbook or None,
                    since_ns=verdict.since_ns,
                )
            )
        for name in self._verdicts.keys() - present:
            del self._verdicts[name]

    def _health(self, snapshot: NodeSnapshot) -> None:
        present = set()
        for health in snapshot.collectors:
            place = (health.name.value, health.target)
            present.add(place)
            if health.ok and health.problem is None:
                if self._failing.pop(place, None) is not None:
                    self._emit(E.CollectorRecovered(collector=health.name, target=health.target))
                continue
            if health.problem is None and health.sampled_ns is None and health.seconds is None:
                continue  # it has not ended a run yet
            problem = health.problem or "no data"
            last = self._failing.get(place)
            # A text that counts seconds is not worth a line each.
            if last is None or (last[0] != problem and snapshot.taken_ns - last[1] >= PROBLEM_NS):
                self._failing[place] = (problem, snapshot.taken_ns)
                self._emit(E.CollectorFailed(collector=health.name, target=health.target, problem=problem))
        for place in self._failing.keys() - present:
            del self._failing[place]
