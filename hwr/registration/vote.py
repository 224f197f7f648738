"""All registered or all staged: the vote of a group.

Owns the protocol of a vote, and the one by files: each rank writes its ballot into its own worker directory, below the run that all
share, and reads those of the others. Promises a deadline; that whoever waits says for whom; that a rank which died is named at once; and
one answer for all ranks that get one (H5), since a ballot is never changed for the better. One vote against decides: whoever is staged
waits for nobody, and whoever sees such a ballot is staged at once and says so in its own. A rank that leaves without an answer says
`failed`, and then nobody gets `registered`. Refuses what an earlier start left behind, in one run and under one name: a vote counts if
its process lives (the flock on `alive`) and wrote it since we joined, or if it was counted together with ours. The rank that joined first
can count all others', then the second, and so on. A vote against counts as long as its process lives: its rank did not wait for us. One
that lingers from an earlier start is seen before we vote, so that it stages all of us alike. Refuses directories and files of another
user, links, and files above 64 KiB.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from hwr.errors import GroupVoteOverdue, errno_text
from hwr.outcomes import Operation, Phase, RegistrationOutcome, Role, TransportReason
from hwr.telemetry import alive, rundir, span
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.events import VoteBegun, VoteStillWaiting
from hwr.telemetry.hub import Span
from hwr.telemetry.process import journal_directory
from hwr.telemetry.reader import read_state
from hwr.telemetry.resource import process_start_ns
from hwr.telemetry.state import OpenOperation
from hwr.units import one_line, seconds_text

MAX_BYTES: Final = 64 << 10
# A poll reads a small file a rank; the first ones are quick, since ranks that map a warm file are milliseconds apart.
POLL_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
TELL_SECONDS: Final = 2.0
_OVERDUE: Final = "vote_overdue"  # the reason of a rank that left because of others
# Whoever is in one of these waits for another process; whoever is in a chunk is waited for.
_WAITS: Final = frozenset({Operation.LOCK, Operation.ADMISSION, Operation.VOTE})
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_rounds: Final[dict[str, int]] = {}


@dataclass(frozen=True, slots=True)
class Decision:
    """What the group decided; `against` says who voted otherwise, and why."""

    registered: bool
    against: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.registered == bool(self.against):
            raise ValueError("a group registers if and only if nobody is against it")


class Vote(Protocol):
    """How the ranks of a group agree. One vote is one registration."""

    def join(self) -> None:
        """Say that this rank takes part, before anything slow; the others can tell it from one that never came."""

    def decide(self, outcome: RegistrationOutcome, reason: TransportReason, *, seconds: float | None = None) -> Decision:
        """Vote; what is staged is decided at once, and what is registered waits for all others or one against.

        It waits up to `seconds`; None is what the vote was made with.

        Raises:
            GroupVoteOverdue: there is no answer, and there will be none for this rank.
        """

    def leave(self) -> None:
        """Say that this rank gets no answer any more: its start ends. After an answer it does nothing. Raises nothing."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank wrote: no `outcome` yet while it is at it; `counted` are the processes that it decided with.

    Times are CLOCK_BOOTTIME.
    """

    rank: int
    pid: int
    start_ns: int
    written_ns: int
    outcome: RegistrationOutcome | None = None
    reason: str | None = None
    counted: tuple[str, ...] = ()

    @property
    def process(self) -> str:
        """The process, as no other one of this machine is called."""
        return f"{self.rank}.{self.pid}.{self.start_ns}"

    def to_json(self) -> bytes:
        """Return the text of the file."""
        names = {name: getattr(self, name) for name in ("rank", "pid", "start_ns", "written_ns", "outcome", "reason")}
        return json.dumps({"v": 1, **names, "counted": list(self.counted)}).encode("ascii")

    @classmethod
    def from_json(cls, text: bytes) -> Ballot | None:
        """Read a file that may be anything; None is no ballot."""
        try:
            told: Any = json.loads(text)
            numbers = {name: told[name] for name in ("rank", "pid", "start_ns", "written_ns")}
            outcome = None if told["outcome"] is None else RegistrationOutcome(told["outcome"])
            reason = None if told["reason"] is None else one_line(str(told["reason"]), 64)
            counted = tuple(told["counted"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not all(type(value) is int and value >= 0 for value in numbers.values()) or not all(type(one) is str for one in counted):
            return None
        return cls(**numbers, outcome=outcome, reason=reason, counted=counted)


@dataclass(slots=True)
class _Standing:
    """What is known of one rank: its vote that counts, or why there is none.

    `lost`: there will be none. `follows`: it waits for others, or has left because of them; they are the ones to name.
    """

    ballot: Ballot | None = None
    why: str = "never came"
    directory: Path | None = None
    lost: bool = False
    follows: bool = False
    joined: str | None = None  # the process, if it takes part and has not voted
    operation: OpenOperation | None = None


class FileVote:
    """A vote by files in the run directory."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take part in the next vote of this name. `directory` is this process's worker directory; all ranks share its parent.

        `deadline_seconds` is for a `decide` that is not told how long it may wait.

        The n-th vote of a name in one process is the n-th of it in every other: ranks register in the same order.
        """
        if not _NAME.fullmatch(name) or not 0 <= rank < world_size:
            raise ValueError(f"no vote is called {name!r}, or no group of {world_size} has a rank {rank}")
        if world_size > 1 and not _is_of(directory, rank):
            raise ValueError(f"{directory}: not the worker directory of rank {rank}")
        _rounds[name] = _rounds.get(name, 0) + 1
        self._file = f"registration.{name}.{_rounds[name]}.json"
        self._directory, self._rank, self._size = directory, rank, world_size
        self._deadline_seconds, self._clock, self._pause = deadline_seconds, clock, pause
        self._started_ns = process_start_ns()
        self._seen_alive: set[str] = set()  # who is gone later has died, and is no relic of an earlier start
        self._joined_ns, self._joined = boot_ns(), clock()
        self._decided = False
        self._mine = Ballot(rank, os.getpid(), self._started_ns, self._joined_ns)

    def join(self) -> None:
        """Write a ballot without an outcome."""
        self._write()

    def decide(self, outcome: RegistrationOutcome, reason: TransportReason, *, seconds: float | None = None) -> Decision:
        """Vote and wait; see `Vote`."""
        seconds = self._deadline_seconds if seconds is None else seconds
        begun = VoteBegun(rank=self._rank, world_size=self._size, vote=outcome, reason=reason, deadline_seconds=seconds)
        with span(begun) as voting:
            seen = self._against(self._standings()) if outcome is RegistrationOutcome.REGISTERED else ()
            if seen:  # never voted for: nobody can count it
                outcome, reason = RegistrationOutcome.STAGED, TransportReason.GROUP
            self._write(outcome=outcome, reason=reason.value)
            standings = self._wait(voting, seconds) if outcome is RegistrationOutcome.REGISTERED else self._standings()
            self._decided = True
            # With a vote against, of those that have not voted too: it stays readable for them when this process has ended.
            processes = (one.joined if one.ballot is None else one.ballot.process for one in standings.values())
            counted = tuple(process for process in processes if process is not None)
            against = seen or self._against(standings)
            if against and self._mine.outcome is RegistrationOutcome.REGISTERED:
                self._write(outcome=RegistrationOutcome.STAGED, reason=TransportReason.GROUP.value, counted=counted)
            else:
                self._write(counted=counted)
            decision = Decision(not against, against)
            voting.add(decision=RegistrationOutcome.REGISTERED if decision.registered else RegistrationOutcome.STAGED, against=against)
            return decision

    def leave(self) -> None:
        """Vote `failed`; one who left because of others stays so, and an answer that others have too is not taken back."""
        if not self._decided and self._mine.outcome is not RegistrationOutcome.FAILED:
            self._leave("start_ended")

    def _leave(self, why: str) -> None:
        with contextlib.suppress(GroupVoteOverdue):
            self._write(outcome=RegistrationOutcome.FAILED, reason=why)

    def _against(self, standings: Mapping[int, _Standing]) -> tuple[str, ...]:
        """Say who is staged and why; those that are because of others are left out, unless they are all there are."""
        ballots = [one.ballot for one in standings.values() if one.ballot is not None]
        staged = [one for one in ballots if one.outcome is RegistrationOutcome.STAGED]
        own = [one for one in staged if one.reason != TransportReason.GROUP]
        return tuple(f"rank {one.rank}: {one.reason}" for one in own or staged)

    def _wait(self, voting: Span, seconds: float) -> Mapping[int, _Standing]:
        begun = self._clock()
        pauses = iter(POLL_SECONDS)
        wait, tell = POLL_SECONDS[0], TELL_SECONDS
        while True:
            standings = self._standings()
            waited = self._clock() - begun
            missing = {rank: one for rank, one in standings.items() if one.ballot is None}
            if not missing or self._against(standings):
                return standings
            if waited >= seconds or any(one.lost for one in missing.values()):
                named = _at_fault(missing)
                voting.add(missing=tuple(named))
                self._leave(_OVERDUE)
                raise self._overdue(named)
            if waited >= tell:
                tell += TELL_SECONDS
                voting.progress(VoteStillWaiting(missing=tuple(missing), waited_seconds=waited))
            wait = next(pauses, wait)
            self._pause(min(wait, max(0.0, seconds - waited)))

    def _overdue(self, named: Mapping[int, _Standing]) -> GroupVoteOverdue:
        problem = "; ".join(f"rank {rank} {one.why}{_in_what(one.operation)}" for rank, one in named.items())
        return GroupVoteOverdue(
            reason="lost" if any(one.lost for one in named.values()) else "overdue",
            rank=self._rank,
            size=self._size,
            waited=self._clock() - self._joined,
            problem=problem,
            ranks=list(named),
        )

    def _write(self, **changes: Any) -> None:
        """Replace this rank's ballot: whole, or not at all."""
        self._mine = replace(self._mine, written_ns=boot_ns(), **changes)
        if self._size == 1:
            return
        path, new = self._directory / self._file, self._directory / f".{self._file}.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            with os.fdopen(fd, "wb") as file:
                file.write(self._mine.to_json())
            os.rename(new, path)
        except OSError as error:
            problem = f"this rank cannot write its vote: {errno_text(error)}"
            details = {"rank": self._rank, "size": self._size, "waited": 0.0, "ranks": [self._rank]}
            raise GroupVoteOverdue(reason="unwritable", problem=problem, **details) from error

    # what the others wrote --------------------------------------------------------------------------------------

    def _standings(self) -> dict[int, _Standing]:
        standings = {rank: _Standing() for rank in range(self._size)}
        standings[self._rank] = _Standing(ballot=self._mine)
        if self._size == 1:
            return standings
        of_rank: dict[int, list[rundir.WorkerDirectory]] = {}
        for worker in self._workers():
            of_rank.setdefault(worker.rank, []).append(worker)
        for rank, workers in of_rank.items():
            standings[rank] = self._standing(workers)
        return standings

    def _workers(self) -> Iterator[rundir.WorkerDirectory]:
        for worker in rundir.worker_directories(self._directory.parent):
            if worker.path.parent == self._directory.parent and 0 <= worker.rank < self._size and worker.rank != self._rank:
                with contextlib.suppress(OSError):
                    if worker.path.lstat().st_uid == os.geteuid():
                        yield worker

    def _standing(self, workers: list[rundir.WorkerDirectory]) -> _Standing:
        """Judge the directories of one rank, the process that started last first."""
        told = _Standing()
        for worker in sorted(workers, key=lambda worker: worker.start_ns, reverse=True):
            name = f"{worker.rank}.{worker.pid}.{worker.start_ns}"
            lives = alive.is_held(worker.path) is True
            ballot = self._ballot(worker)  # after its life: what a dying process wrote last is seen
            if lives:
                self._seen_alive.add(name)
            if ballot is not None and (lives or self._counted_us(ballot) or self._died(worker, name, ballot)):
                newest = told.directory is None
                return self._of_this_start(worker, ballot, lives, newest)  # whatever older processes of this rank say is a relic
            if lives and (told.directory is None or told.lost):
                told = _Standing(None, f"(pid {worker.pid}) has not voted", worker.path)
            elif not lives and told.directory is None and self._died(worker, name, ballot):
                told = _Standing(None, f"(pid {worker.pid}) died before all had voted", worker.path, lost=True)
        return told

    def _of_this_start(self, worker: rundir.WorkerDirectory, ballot: Ballot, lives: bool, newest: bool) -> _Standing:
        follows = ballot.reason == _OVERDUE
        if ballot.outcome is RegistrationOutcome.FAILED and ballot.written_ns >= self._started_ns:
            return _Standing(None, f"(pid {worker.pid}) ended its start", worker.path, lost=True, follows=follows)
        if ballot.outcome is not None and (self._counted_us(ballot) or (lives and ballot.written_ns >= self._joined_ns)):
            return _Standing(ballot)
        if ballot.outcome is RegistrationOutcome.STAGED and lives and newest:  # it did not wait for us
            return _Standing(ballot)
        if not lives:
            return _Standing(None, f"(pid {worker.pid}) died before all had voted", worker.path, lost=True)
        if ballot.outcome is not None:  # it waits as we do, or is a relic
            return _Standing(None, f"(pid {worker.pid}) voted before this rank came, and has not counted it", worker.path, follows=True)
        return _Standing(None, f"(pid {worker.pid}) has not voted", worker.path, joined=ballot.process)

    def _counted_us(self, ballot: Ballot) -> bool:
        return self._mine.process in ballot.counted

    def _died(self, worker: rundir.WorkerDirectory, name: str, ballot: Ballot | None) -> bool:
        """Say whether a process that is gone belonged to this start: seen alive by us, or alive since we are."""
        if ballot is not None:
            return name in self._seen_alive or ballot.written_ns >= self._started_ns
        beat = alive.read_beat(worker.path)
        if name not in self._seen_alive and not (isinstance(beat, alive.Beat) and beat.mono_ns >= self._started_ns):
            return False
        # A tool, or a helper that ended in order, may have run as this rank before it or beside it.
        state = read_state(worker.path)
        return state.res.get("hwr.role") == Role.WORKER and (not state.exited or state.base_phase == Phase.FAILED)

    def _ballot(self, worker: rundir.WorkerDirectory) -> Ballot | None:
        try:
            fd = os.open(worker.path / self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size > MAX_BYTES:
                return None
            ballot = Ballot.from_json(os.read(fd, MAX_BYTES))
        except OSError:
            return None
        finally:
            os.close(fd)
        same = ballot is not None and (ballot.rank, ballot.pid, ballot.start_ns) == (worker.rank, worker.pid, worker.start_ns)
        return ballot if same else None


def file_vote(name: str, *, rank: int, world_size: int, deadline_seconds: float, run_dir: str | None = None) -> FileVote:
    """Make the default vote. Where telemetry writes nothing, this rank gets a worker directory all the same: a vote needs a place.

    `world_size` counts the ranks that share the run directory, those of one machine; `name` is one for all of them.

    Raises:
        OSError: no directory can be made.
    """
    directory = journal_directory()
    if world_size > 1 and (directory is None or not _is_of(directory, rank)):
        runs = rundir.run_directory(run_dir, os.environ)
        worker = rundir.create_worker_directory(runs, rundir.run_id(os.environ), rank, os.getpid(), process_start_ns())
        _hold_alive(worker.path)
        directory = worker.path
    return FileVote(name, directory or Path(os.devnull), rank=rank, world_size=world_size, deadline_seconds=deadline_seconds)


_alive_here: Final[dict[Path, alive.AliveFile]] = {}


def _hold_alive(directory: Path) -> None:
    """Hold the lock that says that this process lives, for as long as it does."""
    if directory not in _alive_here:
        _alive_here[directory] = alive.AliveFile(directory)


def _is_of(directory: Path, rank: int) -> bool:
    return directory.name.startswith(f"r{rank}.")


def _at_fault(missing: Mapping[int, _Standing]) -> dict[int, _Standing]:
    """Choose whom to name: who will never vote, else who has not; of those that left because of others only if there is nobody else.

    The first of them is the one to look at: in a driver call, while others wait for its turn to end.
    """
    own = {rank: one for rank, one in missing.items() if not one.follows}
    named = {rank: one for rank, one in own.items() if one.lost} or own or dict(missing)
    for one in named.values():
        one.operation = None if one.directory is None else read_state(one.directory).current_operation()
    return dict(sorted(named.items(), key=lambda item: (_place(item[1].operation), item[0])))


def _place(operation: OpenOperation | None) -> int:
    """Say how early to name a rank: in a driver call first, waiting for another process last."""
    if operation is None:
        return 1
    return 0 if operation.operation == Operation.REGISTER_CHUNK else 2 if operation.operation in _WAITS else 1


def _in_what(operation: OpenOperation | None) -> str:
    """Say what its journal has it in, for a rank that lives in a call or waits."""
    if operation is None:
        return ""
    words = ""
    if {"range", "ranges", "chunk", "chunks"} <= operation.attrs.keys():
        words = " range {range}/{ranges}, chunk {chunk}/{chunks}".format_map(operation.attrs)
    return f", in {operation.operation}{words} for {seconds_text((boot_ns() - operation.begun_ns) / 1e9)}"
