"""This process's telemetry: configured once, found by every room.

Owns the process-wide hub, its files and its thread. Promises: nothing happens before `configure` or the first event after
`ensure_configured`; `enabled=False` means no file and no thread; a forked child closes what it inherited and gets a journal of its
own with its first event (J7). Refuses signal handlers, logging set-up and any global registry.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.errors import errno_text
from hwr.outcomes import Phase, Role
from hwr.telemetry import events as E
from hwr.telemetry import rundir
from hwr.telemetry.alive import BEAT_SECONDS, AliveFile, Beat, read_beat
from hwr.telemetry.allocator import allocator_sample
from hwr.telemetry.event import Begin, Event
from hwr.telemetry.hub import Hub, Span
from hwr.telemetry.journal import JournalWriter
from hwr.telemetry.resource import Writer, process_start_ns, resource
from hwr.telemetry.state import WorkerState
from hwr.units import printable

ALLOCATOR_SECONDS: Final = 60.0
_log = logging.getLogger("hwr.telemetry")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What `configure` was told."""

    enabled: bool = True
    run_dir: str | None = None
    engine: str | None = None
    rank: int | None = None
    role: Role = Role.WORKER


class _Process:
    """The state of this module: one instance, replaced in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.configuration: Configuration | None = None
        self.hub: Hub | None = None
        self.alive: AliveFile | None = None
        self.directory: Path | None = None
        self.stop: threading.Event | None = None
        self.own_run_id = False


_process = _Process()
_hooks_installed = False


def configure(
    enabled: bool = True,
    run_dir: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    rank: int | None = None,
    *,
    role: Role = Role.WORKER,
) -> Path | None:
    """Start telemetry for this process, or switch it off; a second call replaces the first.

    `run_dir` defaults to HWR_RUN_DIR and the rules of docs/internals/events.md, `engine` to HWR_ENGINE, `rank` to HWR_RANK or RANK.
    Returns the directory of this process's journal; None if disabled or if nothing can be written (events then stay in a ring in
    memory, and one warning says so).
    """
    with _process.lock:
        close()
        _process.configuration = Configuration(
            enabled=enabled,
            run_dir=None if run_dir is None else os.fspath(run_dir),
            engine=engine,
            rank=rank,
            role=role,
        )
        _hub()
        return _process.directory


def ensure_configured(run_dir: str | os.PathLike[str] | None = None, engine: str | None = None) -> None:
    """Configure unless somebody has configured already: the host's own `configure` wins over a library call's options."""
    with _process.lock:
        if _process.configuration is None:
            configure(run_dir=run_dir, engine=engine)


def emit(event: Event) -> None:
    """Write an event. Never raises; does nothing when telemetry is off."""
    hub = _hub()
    if hub is not None:
        hub.emit(event)


def span(begin: Begin, **end: Any) -> Span:
    """Bracket something slow, fallible or blocking: `with span(LookupBegun(...)) as s: ... s.add(status=...)`.

    `end` gives fields of the end event that are known already.
    """
    return Span(_hub(), begin, end)


def snapshot() -> WorkerState | None:
    """Return this process's state as folded from its events, None when telemetry is off."""
    hub = _hub()
    return None if hub is None else hub.snapshot()


def journal_directory() -> Path | None:
    """Return where this process writes, None if it does not."""
    return _process.directory


def run_directory() -> Path | None:
    """Return the directory that holds all runs, None if nothing is written."""
    return None if _process.directory is None else _process.directory.parent.parent


def run_id_is_shared() -> bool:
    """Say whether the ranks of this start write into one run: its id was given, or follows from their launcher."""
    return not _process.own_run_id and rundir.shared_run_id(os.environ) is not None


def sync() -> None:
    """Make the journal durable, before something that may take the node down."""
    if _process.hub is not None:
        _process.hub.sync()


def close() -> None:
    """Write the exit event and close everything; telemetry is unconfigured afterwards."""
    with _process.lock:
        if _process.stop is not None:
            _process.stop.set()
        if _process.hub is not None:
            _process.hub.emit(E.WorkerExited())
        _drop_files()
        _process.configuration = None


def heartbeat_ns() -> int | None:
    """Return CLOCK_BOOTTIME of this process's last beat, None if it does not beat."""
    directory = _process.directory
    beat = read_beat(directory) if directory is not None else None
    return beat.mono_ns if isinstance(beat, Beat) else None


@contextlib.contextmanager
def recording_hub() -> Iterator[Hub]:
    """Give the hub to listen on; with telemetry off, one in memory for as long as the block lasts."""
    hub = _hub()
    if hub is not None:
        yield hub
        return
    res = resource(Writer(run_id="recording", engine="default", rank=0, role=Role.TOOL))
    hub = Hub(res, realtime_offset_ns=res["clock.realtime_offset_ns"])
    _install_hooks()
    with _process.lock:
        _process.hub = hub
    try:
        yield hub
    finally:
        with _process.lock:
            if _process.hub is hub:  # telemetry may have been configured meanwhile
                _process.hub = None


def current_hub() -> Hub | None:
    """Return the hub of this process, opened if telemetry is on."""
    return _hub()


def _hub() -> Hub | None:
    hub = _process.hub
    if hub is not None:
        return hub
    configuration = _process.configuration
    if configuration is None or not configuration.enabled:
        return None
    with _process.lock:
        if _process.hub is None:
            _open(configuration)
        return _process.hub


def _open(configuration: Configuration) -> None:
    environ = os.environ
    if rundir.shared_run_id(environ) is None:
        _process.own_run_id = True
    run_id = rundir.run_id(environ)
    if not environ.get("HWR_RUN_ID", "").strip():
        environ["HWR_RUN_ID"] = run_id  # ranks that this process starts belong to the same run
    rank = configuration.rank if configuration.rank is not None else _rank(environ)
    engine = configuration.engine or environ.get("HWR_ENGINE") or "default"
    res = resource(Writer(run_id=run_id, engine=engine, rank=rank, role=configuration.role))
    hub = Hub(res, realtime_offset_ns=res["clock.realtime_offset_ns"])
    _install_hooks()
    # Known before anything can warn: a log handler of the host's that emits must find this hub, not open another.
    _process.hub = hub
    run_dir = rundir.run_directory(configuration.run_dir, environ)
    try:
        worker = rundir.create_worker_directory(run_dir, run_id, rank, os.getpid(), process_start_ns())
        _process.alive = AliveFile(worker.path)
        hub.open_journal(lambda head: JournalWriter(worker.path, head))
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        if _process.alive is not None:
            _process.alive.close()
            _process.alive = None
        problem = errno_text(error) if isinstance(error, OSError) else str(error)
        _log.warning("no journal is written: %s: %s; events stay in memory", printable(str(run_dir)), problem)
    else:
        _process.directory = worker.path
        _process.stop = threading.Event()
        beating = threading.Thread(target=_beat, args=(_process.alive, _process.stop, hub), name="hwr-alive", daemon=True)
        try:
            beating.start()
        except RuntimeError as error:  # no thread can be started: a limit, or the interpreter is shutting down
            _log.warning("no heartbeat is written: %s", error)
        with contextlib.suppress(OSError):
            rundir.prune(run_dir, now=time.time())
    hub.emit(E.WorkerStarted())
    hub.emit(E.PhaseChanged(phase=Phase.STARTING))


def _beat(alive: AliveFile, stop: threading.Event, hub: Hub) -> None:
    since = ALLOCATOR_SECONDS
    while not stop.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            alive.beat()
        since += BEAT_SECONDS
        if since >= ALLOCATOR_SECONDS:
            since = 0.0
            hub.emit(allocator_sample())


def _rank(environ: Any) -> int:
    for name in ("HWR_RANK", "RANK"):
        if re.fullmatch("[0-9]{1,9}", environ.get(name, "")):
            return int(environ[name])
    return 0


def _drop_files() -> None:
    if _process.hub is not None:
        _process.hub.close_journal()
    if _process.alive is not None:
        _process.alive.close()
    _process.hub, _process.alive, _process.directory, _process.stop = None, None, None, None


def _install_hooks() -> None:
    global _hooks_installed
    if not _hooks_installed:
        _hooks_installed = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(close)


def _after_fork() -> None:
    """Close what the parent owns, without its lock: whoever held that lock does not exist here."""
    global _process
    inherited, _process = _process, _Process()
    _process.configuration = inherited.configuration
    if inherited.hub is not None:
        inherited.hub.abandon()
    if inherited.alive is not None:
        inherited.alive.abandon()
