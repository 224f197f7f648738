"""The agent: one process a node that watches, keeps a journal of its own, and answers on one port.

Owns the second's work (look, record, hand out), what the port asks for, and the orderly beginning and end. Promises that nothing which
hangs or fails elsewhere keeps it from answering, and that a restart lets no sum fall. Refuses to signal, lock or change anything of a
worker or a store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diag.node.exposition import Exposition
from diag.node.files import AgentFiles
from diag.node.health import Health, alive, ready
from diag.node.journal import NodeJournal
from diag.node.places import run_directories
from diag.node.server import Server
from diag.node.snapshot import NodeSnapshot
from diag.node.watching import NodeWatch, WatchSettings
from diag.node.webconfig import WebConfig
from hwr import telemetry
from hwr.ending import handling, telemetry_wanted
from hwr.outcomes import Role, View
from hwr.telemetry import events as E
from hwr.telemetry import rundir
from hwr.telemetry.clock import boot_ns
from hwr.units import one_line, printable

PERIOD_SECONDS: Final = 1.0
# The sums are written when they may have grown, for the agent after this one.
TOTALS_SECONDS: Final = 10.0
ENGINE: Final = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says."""

    run_dirs: tuple[Path, ...] = ()
    roots: tuple[Path, ...] = ()
    address: str = "127.0.0.1"
    port: int = 9478
    web_config: Path | None = None
    stall_after_seconds: float = 30.0


class Agent:
    """One agent; `run` is its whole life."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        places = _places(settings)
        self._place = places()[0]
        self._watch = NodeWatch(_watching(settings, places, View.AGENT))
        self._files = AgentFiles(self._place)
        self._journal = NodeJournal()
        self._exposition = Exposition()
        self._snapshot: NodeSnapshot | None = None
        self._looked_ns = boot_ns()
        self._problem: str | None = None
        self._totals_ns = 0
        self._stop = threading.Event()
        self._signal = 0

    def run(self) -> int:
        """Answer until a signal ends it; return the exit status.

        Raises:
            OptionError: the port is taken, the address cannot be used, or the web configuration makes no sense.
        """
        settings = self._settings
        web = None if settings.web_config is None else WebConfig.load(settings.web_config)
        server = Server(self, settings.address, settings.port, web)
        server.start()
        try:
            self._say(f"serving {server.url}/metrics")
            warning = openness_warning(settings.address, protected=web is not None and web.protected)
            if warning:
                self._say(warning)
            with self._journalled(), handling(self._ended_by, ()):
                self._begin(server)
                self._work()
        finally:
            server.close()
        return 128 + self._signal

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        """Render the newest snapshot; None before the first."""
        snapshot = self._snapshot
        return None if snapshot is None else self._exposition.render(snapshot, accept)

    def snapshot(self) -> NodeSnapshot | None:
        """Return the newest snapshot; None before the first."""
        return self._snapshot

    def alive(self) -> Health:
        """Say whether this agent itself does its second's work."""
        return alive(self._looked_ns, boot_ns(), self._problem)

    def ready(self) -> Health:
        """Say whether every part has been looked at once, or is known to hang."""
        return ready(self._snapshot)

    @contextlib.contextmanager
    def _journalled(self) -> Iterator[None]:
        """Write a journal of our own, in a run of our own, whoever's environment we were started in."""
        os.environ["HWR_RUN_ID"] = f"agent-{rundir.run_id({})}"
        wanted = telemetry_wanted(None)
        telemetry.configure(wanted, run_dir=self._place, engine=ENGINE, rank=0, role=Role.AGENT)
        try:
            yield
        finally:
            telemetry.close()

    def _begin(self, server: Server) -> None:
        telemetry.emit(E.EndpointOpened(address=self._settings.address, port=server.port))
        refused = self._files.claim()
        if refused is None:
            self._exposition = Exposition(self._files.totals())
            refused = self._files.announce(
                {"version": 1, "pid": os.getpid(), "url": server.url, "address": self._settings.address, "port": server.port}
            )
        if refused is not None:
            self._say(f"{printable(str(self._files.directory))}: where this agent listens is not written: {refused.reason}")

    def _work(self) -> None:
        self._watch.start()
        try:
            first = True
            while not self._stop.wait(0 if first else PERIOD_SECONDS):
                self._look()
                if first and self._snapshot is not None and ready(self._snapshot).ok:
                    first = False
                    for line in found(self._snapshot):
                        self._say(line)
                elif first:
                    self._stop.wait(PERIOD_SECONDS / 5)
        finally:
            self._watch.stop()
            self._keep_totals()
            self._files.close()

    def _look(self) -> None:
        try:
            snapshot = self._watch.look()
            self._journal.record(snapshot)
        except Exception as error:  # noqa: BLE001 - the port goes on with what was seen last, and says that it is old
            problem = one_line(f"{type(error).__name__}: {error}")
            if problem != self._problem:
                self._say(f"cannot put a snapshot together: {problem}")
            self._problem = problem
            return
        self._snapshot, self._looked_ns, self._problem = snapshot, boot_ns(), None
        if boot_ns() - self._totals_ns > TOTALS_SECONDS * 1e9:
            self._totals_ns = boot_ns()
            self._keep_totals()

    def _keep_totals(self) -> None:
        totals = self._exposition.totals()
        if totals:
            self._files.keep_totals(totals)

    def _ended_by(self, number: int, _: object) -> None:
        self._signal = number
        self._stop.set()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody need read it
            sys.stderr.write(f"hwr agent: {text}\n")
            sys.stderr.flush()


def once(settings: Settings) -> bytes:
    """Look twice, a second apart, since a verdict needs two samples; return one exposition."""
    watch = NodeWatch(_watching(settings, _places(settings), View.DIRECT))
    try:
        watch.once()
        threading.Event().wait(PERIOD_SECONDS)
        snapshot = watch.once()
    finally:
        watch.stop()
    return Exposition().render(snapshot, "")[0]


def found(snapshot: NodeSnapshot) -> Iterator[str]:
    """Yield where was looked and what was found, in lines for a person."""
    for place in snapshot.run_directories:
        what = f"{place.runs} runs, {place.workers} workers" if place.readable else f"not readable: {place.problem}"
        yield f"looked in {place.path}: {what}"
    for store in snapshot.stores:
        entries = ", ".join(f"{count} {state}" for state, count in sorted(store.entries.items()) if count) or "empty"
        yield f"store {store.root}: {store.problem or (entries if store.reporting else 'reported by another agent')}"
    for text in snapshot.unreadable:
        yield f"cannot read {text}"


def openness_warning(address: str, *, protected: bool) -> str | None:
    """Return what to say of an address that others can reach; None for loopback, and where TLS and passwords are set."""
    try:
        local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        local = address == "localhost"
    if local or protected:
        return None
    return f"{printable(address)} is reachable from outside, without TLS and passwords: give a --web-config"


def _places(settings: Settings) -> Callable[[], tuple[Path, ...]]:
    environ = dict(os.environ)  # as it was given to us: our own telemetry exports what its children should have
    return lambda: run_directories(settings.run_dirs, environ)


def _watching(settings: Settings, places: Callable[[], tuple[Path, ...]], view: View) -> WatchSettings:
    return WatchSettings(view=view, run_dirs=places, roots=settings.roots, stall_after_seconds=settings.stall_after_seconds)
