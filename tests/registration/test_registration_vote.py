"""All registered or all staged: one answer for all ranks that get one, within a deadline, and nothing of an earlier start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_standin import REGISTER, UNREGISTER, Foundry
from hypothesis import given
from hypothesis import strategies as st
from registration_aids import MIB, children, in_operation, payload_file, state_of, until, worker

from hwr import telemetry
from hwr.errors import EXIT_TIMEOUT, GroupVoteOverdue
from hwr.outcomes import Outcome, RegistrationOutcome, TransportReason
from hwr.registration.vote import MAX_BYTES, Ballot, Decision, FileVote, file_vote
from hwr.telemetry import events as E
from hwr.telemetry.alive import AliveFile
from hwr.telemetry.clock import boot_ns
from hwr.telemetry.resource import process_start_ns

# arguments: rank, size, deadline; then one word a line on standard input: join, registered, budget, end
VOTER = """
from hwr import telemetry
from hwr.errors import GroupVoteOverdue
from hwr.outcomes import RegistrationOutcome, TransportReason
rank, size, deadline = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
telemetry.configure(rank=rank)
vote = file_vote("group", rank=rank, world_size=size, deadline_seconds=deadline)
stops = ["stop"] if "stop" in sys.argv else []
def pause(seconds):
    if stops:
        stops.pop()
        os.kill(os.getpid(), 19)
    time.sleep(seconds)
vote._pause = pause
for line in sys.stdin:
    reason = TransportReason(line.strip()) if line.strip() not in ("join", "leave") else None
    if reason is None:
        getattr(vote, line.strip())()
        print("done", flush=True)
        continue
    outcome = RegistrationOutcome.REGISTERED if reason is TransportReason.REGISTERED else RegistrationOutcome.STAGED
    begun = time.monotonic()
    try:
        decision = vote.decide(outcome, reason)
    except GroupVoteOverdue as error:
        print("overdue", error.reason, error.absent, round(time.monotonic() - begun, 1), error.cause, flush=True)
    else:
        print(decision.registered, decision.against, flush=True)
"""


class Group:
    """Ranks that do what they are told, as processes of one run."""

    def __init__(self, start: object, run_dir: Path) -> None:
        self._start, self.run_dir = start, run_dir

    def rank(self, rank: int, size: int, deadline: float = 75.0, *more: str) -> subprocess.Popen[str]:
        environ = {"HWR_RUN_DIR": str(self.run_dir), "HWR_RUN_ID": "run", "HWR_RANK": str(rank)}
        process: subprocess.Popen[str] = self._start(VOTER, rank, size, deadline, *more, **environ)  # type: ignore[operator]
        tell(process, "join")
        assert said(process) == "done"
        return process


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with children() as start:
        yield Group(start, tmp_path / "run")


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    return line.strip()


def after(answer: str) -> float:
    """Return the seconds that an error says it waited."""
    return float(answer.partition(": after ")[2].split()[0])


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=10) == 0


def test_all_ranks_get_one_answer(group: Group) -> None:
    """Registered only if all are; otherwise everybody hears who was against it, and why."""
    ranks = [group.rank(rank, 3) for rank in range(3)]
    for process in ranks:
        tell(process, "registered")
    assert [said(process) for process in ranks] == ["True ()"] * 3
    for process in ranks:
        end(process)


def test_one_that_is_staged_stages_all(group: Group) -> None:
    ranks = [group.rank(rank, 3) for rank in range(3)]
    for process, word in zip(ranks, ["registered", "budget", "registered"], strict=True):
        tell(process, word)
    assert [said(process) for process in ranks] == ["False ('rank 1: budget',)"] * 3


def test_a_rank_that_does_not_vote_is_named_by_all_others_at_the_deadline(group: Group) -> None:
    ranks = [group.rank(rank, 3, 2.5) for rank in range(3)]
    tell(ranks[0], "registered")
    tell(ranks[2], "registered")
    for process in (ranks[0], ranks[2]):
        answer = said(process)
        assert answer.startswith("overdue overdue (1,) ")
        assert f"rank 1 (pid {ranks[1].pid}) has not voted" in answer
    tell(ranks[1], "registered")  # too late: it hears so, at once
    assert said(ranks[1]).startswith("overdue lost (0, 2) ")


@pytest.mark.parametrize("voted", [False, True])
def test_a_rank_that_dies_is_named_at_once(group: Group, voted: bool) -> None:
    """Not at the deadline; also if it had voted, since it cannot serve any more."""
    first, second = group.rank(0, 3), group.rank(1, 3)
    third = group.rank(2, 3)
    tell(first, "registered")
    if voted:
        tell(second, "registered")
        until(lambda: in_operation(group.run_dir, 1, "vote"))
    second.kill()
    second.wait()
    for process in (first, third):
        if process is third:
            tell(third, "registered")
        answer = said(process)
        # The third may have come to look after the death: then it knows of no such process, and names the rank all the same.
        assert answer.startswith("overdue lost (1,) " if process is first else ("overdue lost (1,) ", "overdue overdue (1,) "))
        assert float(answer.split(")")[1].split()[0]) < 30
        assert process is third or f"rank 1 (pid {second.pid}) died before all had voted" in answer


def test_a_rank_that_leaves_ends_the_vote_for_all(group: Group) -> None:
    """Its start ends: nobody serves, neither registered nor staged."""
    ranks = [group.rank(rank, 2) for rank in range(2)]
    tell(ranks[0], "leave")
    tell(ranks[1], "registered")
    assert said(ranks[1]).startswith("overdue lost (0,) ")


def test_what_is_staged_waits_for_nobody_and_stages_whoever_comes(group: Group) -> None:
    """Neither for one that has not voted, nor for one that came after it, died or left; these read its vote."""
    first, second, dead = group.rank(0, 5), group.rank(1, 5), group.rank(2, 5)
    tell(second, "registered")
    until(lambda: in_operation(group.run_dir, 1, "vote"))
    tell(dead, "leave")
    assert said(dead) == "done"
    assert said(second).startswith("overdue lost (2,) ")
    dead.kill()
    dead.wait()
    tell(first, "budget")
    assert said(first) == "False ('rank 0: budget',)"
    late, later = group.rank(3, 5), group.rank(4, 5)
    tell(late, "budget")
    assert said(late) == "False ('rank 0: budget', 'rank 3: budget')"
    tell(later, "registered")
    assert said(later) == "False ('rank 0: budget', 'rank 3: budget')"


def test_one_vote_against_decides_for_those_that_wait(group: Group) -> None:
    """The third never votes."""
    ranks = [group.rank(rank, 3) for rank in range(3)]
    tell(ranks[0], "registered")
    until(lambda: in_operation(group.run_dir, 0, "vote"))
    tell(ranks[1], "memlock")
    assert said(ranks[1]) == said(ranks[0]) == "False ('rank 1: memlock',)"
    end(ranks[1])
    end(ranks[0])
    tell(ranks[2], "registered")  # they have gone, and had counted it
    assert said(ranks[2]) == "False ('rank 1: memlock',)"


@pytest.mark.parametrize("word", ["registered", "budget"])
def test_an_answer_is_not_taken_back(group: Group, word: str) -> None:
    """Whoever leaves after it, as with a rollback that is not clean, ends alone."""
    first, second = group.rank(0, 2), group.rank(1, 2, 75.0, "stop")
    tell(second, "registered")
    os.waitid(os.P_PID, second.pid, os.WSTOPPED)
    tell(first, word)
    answer = said(first)
    tell(first, "leave")
    assert said(first) == "done"
    os.kill(second.pid, signal.SIGCONT)
    assert said(second) == answer == ("True ()" if word == "registered" else "False ('rank 0: budget',)")


def test_a_rank_that_reads_late_hears_the_answer_of_those_that_have_gone(group: Group) -> None:
    """It is stopped right after its vote; the others decide with it and end; woken, it comes to the same answer."""
    first = group.rank(0, 2)
    second = group.rank(1, 2, 75.0, "stop")
    tell(second, "registered")
    os.waitid(os.P_PID, second.pid, os.WSTOPPED)
    tell(first, "registered")
    assert said(first) == "True ()"
    end(first)
    os.kill(second.pid, signal.SIGCONT)
    assert said(second) == "True ()"


def test_votes_of_an_earlier_start_are_not_believed(group: Group) -> None:
    """Same run, same ranks: neither those of the dead, nor those of a process that lingers on."""
    old = [group.rank(rank, 3) for rank in range(3)]
    for process in old:
        tell(process, "registered")
    assert [said(process) for process in old] == ["True ()"] * 3
    end(old[0])
    old[1].kill()
    old[1].wait()  # rank 2 lingers
    new = group.rank(0, 3, 2.0)
    tell(new, "registered")
    answer = said(new)
    assert answer.startswith("overdue overdue (1,) ")
    assert answer.endswith("rank 1 never came")
    again = group.rank(1, 3, 2.0)
    tell(again, "registered")
    assert f"rank 2 (pid {old[2].pid}) voted before this rank came, and has not counted it" in said(again)


@pytest.mark.parametrize("seen", [True, False], ids=["before it is replaced", "after it was replaced"])
def test_a_vote_against_of_an_earlier_start_stages_all_or_none(group: Group, seen: bool) -> None:
    """Its process lingers on: whoever meets it before the new process of that rank votes against, so that all end alike."""
    old = group.rank(1, 2)
    tell(old, "budget")
    assert said(old) == "False ('rank 1: budget',)"
    first = group.rank(0, 2)
    new = None if seen else group.rank(1, 2)
    tell(first, "registered")
    if seen:
        assert said(first) == "False ('rank 1: budget',)"
    new = new or group.rank(1, 2)
    tell(new, "registered")
    if seen:
        assert said(new) == "False ('rank 0: group',)"
    else:
        assert said(first) == said(new) == "True ()"


def test_who_waits_is_not_named_beside_the_one_that_it_waits_for(group: Group) -> None:
    """A rank that voted before we came cannot be counted yet; it is the silent one that holds all up."""
    first, silent = group.rank(0, 3), group.rank(1, 3)
    tell(first, "registered")
    until(lambda: in_operation(group.run_dir, 0, "vote"))
    last = group.rank(2, 3, 2.0)
    tell(last, "registered")
    answer = said(last)
    assert answer.startswith("overdue overdue (1,) ")
    assert answer.endswith(f"registration: rank 1 (pid {silent.pid}) has not voted")


def test_a_vote_from_before_we_joined_counts_too(group: Group) -> None:
    """Ranks that come minutes apart, each after the vote of the one before: the first can count all, then the second, then the last."""
    ranks = []
    for rank in range(3):
        ranks.append(group.rank(rank, 3))
        tell(ranks[rank], "registered")
        until(lambda rank=rank: in_operation(group.run_dir, rank, "vote") or rank == 2, "it waits")
    assert [said(process) for process in ranks] == ["True ()"] * 3


def directory(run: Path, rank: int, pid: int = 0) -> Path:
    made = run / f"r{rank}.{pid or os.getpid()}.{process_start_ns()}"
    made.mkdir(parents=True)
    return made


def lone(tmp_path: Path, size: int, name: str, seconds: float = 5.0) -> FileVote:
    now = iter(range(10_000))
    clock, place = (lambda: float(next(now))), directory(tmp_path, 0)
    return FileVote(name, place, rank=0, world_size=size, deadline_seconds=seconds, clock=clock, pause=lambda _: None)


def test_whoever_waits_says_for_whom(tmp_path: Path) -> None:
    vote = lone(tmp_path, 3, "waits")
    with telemetry.record() as told, pytest.raises(GroupVoteOverdue) as caught:
        vote.decide(RegistrationOutcome.REGISTERED, TransportReason.REGISTERED)
    assert [one.missing for one in told.of(E.VoteStillWaiting)] == [(1, 2), (1, 2)]
    (ended,) = told.of(E.VoteEnded)
    assert (ended.missing, ended.outcome) == ((1, 2), Outcome.TIMEOUT)
    assert caught.value.absent == (1, 2)
    assert not caught.value.retryable
    assert caught.value.exit_code == EXIT_TIMEOUT


def test_alone_there_is_nobody_to_wait_for_and_nothing_is_written(tmp_path: Path) -> None:
    vote = file_vote("alone", rank=0, world_size=1, deadline_seconds=0)
    vote.join()
    assert vote.decide(RegistrationOutcome.REGISTERED, TransportReason.REGISTERED) == Decision(True)
    assert vote.decide(RegistrationOutcome.STAGED, TransportReason.BUDGET) == Decision(False, ("rank 0: budget",))
    assert not list(tmp_path.iterdir())


def planted(tmp_path: Path, vote: FileVote) -> tuple[Path, Path]:
    """Put a good vote of rank 1 there, as a live process; return its directory and its file."""
    there = directory(tmp_path, 1)
    file = there / vote._file
    now = boot_ns()
    ballot = Ballot(1, os.getpid(), process_start_ns(), now, RegistrationOutcome.REGISTERED, "registered")
    file.write_bytes(ballot.to_json())
    return there, file


SPOILED = ["nothing", "a link", "too large", "garbage", "another process", "nobody's", "a pipe", "a foreign file", "a foreign directory"]


@pytest.mark.parametrize("how", SPOILED)
def test_only_a_file_of_ours_by_a_process_that_lives_is_a_vote(tmp_path: Path, how: str) -> None:
    if how.startswith("a foreign") and os.geteuid() != 0:
        pytest.skip("needs root")
    vote = lone(tmp_path, 2, how.replace(" ", "-").replace("'", ""), 3.0)
    there, file = planted(tmp_path, vote)
    living = None if how == "nobody's" else AliveFile(there)
    if how == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif how == "too large":
        file.write_bytes(file.read_bytes() + b" " * MAX_BYTES)
    elif how == "garbage":
        file.write_bytes(b"[" * 1000)
    elif how == "another process":
        file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 1}))
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif how.startswith("a foreign"):
        os.chown(file if how.endswith("file") else there, 65534, 65534)
    try:
        if how == "nothing":
            assert vote.decide(RegistrationOutcome.REGISTERED, TransportReason.REGISTERED).registered
        else:
            with pytest.raises(GroupVoteOverdue):
                vote.decide(RegistrationOutcome.REGISTERED, TransportReason.REGISTERED)
    finally:
        if living is not None:
            living.close()


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_a_ballot_of_any_bytes_is_read_or_none(text: bytes) -> None:
    Ballot.from_json(text)


def test_a_vote_that_cannot_be_written_is_typed(tmp_path: Path) -> None:
    vote = FileVote("unwritable", tmp_path / "r0.1.1", rank=0, world_size=2, deadline_seconds=1)
    with pytest.raises(GroupVoteOverdue, match="ENOENT"):
        vote.join()
    vote.leave()


def test_without_telemetry_a_rank_that_votes_has_a_place_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWR_RUN_ID", "off")
    vote = file_vote("off", rank=1, world_size=2, deadline_seconds=1, run_dir=str(tmp_path))
    vote.join()
    there = worker(tmp_path, 1)
    assert there is not None
    assert there.run_id == "off"
    assert telemetry.journal_directory() is None


REGISTERS = """
from hwr.errors import HwrError
try:
    outcome = rank_of_a_group(*sys.argv[1:])
except HwrError as error:
    print(type(error).__name__, error.cause, flush=True)
else:
    print(type(outcome).__name__, getattr(outcome, "reason", ""), getattr(outcome, "detail", ""), flush=True)
print(len(held_chunks()), flush=True)
sys.stdin.read()
"""


def ranks_of(start: object, runs: Path, size: int, deadline: float) -> object:
    """Return what starts a rank of a group that registers a file."""

    def rank(number: int, runtime: Path, path: Path, seconds: float = deadline) -> subprocess.Popen[str]:
        environ = {"HWR_RUN_DIR": str(runs), "HWR_RUN_ID": "run", "HWR_RANK": str(number)}
        return start(REGISTERS, runtime, path, number, size, seconds, **environ)  # type: ignore[operator, no-any-return]

    return rank


def test_a_rank_stuck_in_a_chunk_ends_those_that_registered_and_is_named_first(foundry: Foundry, tmp_path: Path) -> None:
    """Typed, at the deadline and a grace, naming it and what it is in before the one that waits for its turn; nothing stays registered."""
    path, other = payload_file(tmp_path / "payload", 2 * MIB), payload_file(tmp_path / "other", 2 * MIB)
    runs, log = tmp_path / "run", tmp_path / "calls"
    stuck, fine = foundry.standin(tmp_path / "stuck", log=log), foundry.standin(tmp_path / "fine", log=log)
    stuck.configure("register 2 hang")
    with children() as start:
        rank = ranks_of(start, runs, 4, 5.0)
        last = rank(3, stuck.path, path, 120)  # type: ignore[operator]
        until(lambda: len(stuck.inside(REGISTER)) == 1 and len(stuck.calls(REGISTER)) == 2, "rank 3 is stuck")
        first = rank(0, fine.path, path, 120)  # type: ignore[operator]
        until(lambda: in_operation(runs, 0, "lock"), "rank 0 waits")
        others = [rank(number, fine.path, other) for number in (1, 2)]  # type: ignore[operator]
        for process in others:
            answer = said(process)
            assert answer.startswith("GroupVoteOverdue rank ")
            named = [
                f"rank 3 (pid {last.pid}) has not voted, in register_chunk range 1/1, chunk 2/2 for ",
                f"rank 0 (pid {first.pid}) has not voted, in lock for ",
            ]
            assert 0 < answer.index(named[0]) < answer.index(named[1])
            assert 6.5 < after(answer) < 15  # of the registration: 5 s, and 2 s more
            assert said(process) == "0"
        assert state_of(runs, 1).registrations == {"failed": 1}


def test_ranks_whose_turn_does_not_come_are_all_staged_at_their_deadline(foundry: Foundry, tmp_path: Path) -> None:
    """Nobody waits for the rank that is stuck: one vote against decides, also that of a rank that came later or registered."""
    path, other = payload_file(tmp_path / "payload", 2 * MIB), payload_file(tmp_path / "other", 2 * MIB)
    runs, log = tmp_path / "run", tmp_path / "calls"
    stuck, fine = foundry.standin(tmp_path / "stuck", log=log), foundry.standin(tmp_path / "fine", log=log)
    stuck.configure("register 2 hang")
    with children() as start:
        rank = ranks_of(start, runs, 4, 2.0)
        rank(0, stuck.path, path, 120)  # type: ignore[operator]
        until(lambda: len(stuck.inside(REGISTER)) == 1 and len(stuck.calls(REGISTER)) == 2, "rank 0 is stuck")
        waits, registers = rank(1, fine.path, path), rank(2, fine.path, other, 60)  # type: ignore[operator]
        assert said(waits).startswith("Staged admission_timeout ")
        assert said(registers) == "Staged group all ranks of a group are served alike: rank 1: admission_timeout"
        late = rank(3, fine.path, other, 60)  # type: ignore[operator]
        assert said(late) == "Staged group all ranks of a group are served alike: rank 1: admission_timeout"
        assert [said(process) for process in (waits, registers, late)] == ["0"] * 3


def test_one_failing_rank_stages_the_group_and_nothing_stays_registered(foundry: Foundry, tmp_path: Path) -> None:
    path, log = payload_file(tmp_path / "payload", 2 * MIB), tmp_path / "calls"
    failing, fine = foundry.standin(tmp_path / "failing", log=log), foundry.standin(tmp_path / "fine", log=log)
    failing.configure("register 2 fail 2")
    with children() as start:
        environ = {"HWR_RUN_DIR": str(tmp_path / "run"), "HWR_RUN_ID": "run"}
        runtimes = [failing.path if rank == 1 else fine.path for rank in range(3)]
        ranks = [start(REGISTERS, runtimes[rank], path, rank, 3, 75, HWR_RANK=str(rank), **environ) for rank in range(3)]
        answers = [said(process) for process in ranks]
        assert [said(process) for process in ranks] == ["0"] * 3
    assert answers[1].startswith("Staged driver_error range 1/1, chunk 2/2")
    assert {answers[0], answers[2]} == {"Staged group all ranks of a group are served alike: rank 1: driver_error"}
    done = [call for call in fine.calls(REGISTER) if call.result == 0]
    assert len(done) == len(fine.calls(UNREGISTER)) == 5
    assert fine.most_inside(REGISTER) == 1
    assert fine.lost() == 0


def test_a_rank_whose_rollback_is_not_clean_ends_the_others_at_once(foundry: Foundry, tmp_path: Path) -> None:
    """It keeps what it could not undo; the others need no deadline to hear that it will never serve."""
    path = payload_file(tmp_path / "payload", 2 * MIB)
    unclean, fine = foundry.standin(tmp_path / "unclean"), foundry.standin(tmp_path / "fine")
    unclean.configure("register 2 fail 2", "unregister 1 fail 1")
    with children() as start:
        environ = {"HWR_RUN_DIR": str(tmp_path / "run"), "HWR_RUN_ID": "run"}
        runtimes = [unclean.path if rank == 1 else fine.path for rank in range(3)]
        ranks = [start(REGISTERS, runtimes[rank], path, rank, 3, 75, HWR_RANK=str(rank), **environ) for rank in range(3)]
        answers = [said(process) for process in ranks]
        assert [said(process) for process in ranks] == ["0", "1", "0"]
    assert answers[1].startswith("HostRegistrationCleanupError 1 of 2 chunks")
    for rank in (0, 2):
        assert answers[rank].startswith(f"GroupVoteOverdue rank {rank} of 3: ")
        assert f"rank 1 (pid {ranks[1].pid}) ended its start" in answers[rank]
        assert after(answers[rank]) < 30
    assert len(fine.calls(REGISTER)) == len(fine.calls(UNREGISTER)) == 4


def test_a_rank_whose_vote_is_overdue_rolls_back(foundry: Foundry, tmp_path: Path) -> None:
    """It had registered; it ends typed, and nothing is left registered."""
    path = payload_file(tmp_path / "payload", 2 * MIB)
    fine = foundry.standin(tmp_path / "fine")
    with children() as start:
        environ = {"HWR_RUN_DIR": str(tmp_path / "run"), "HWR_RUN_ID": "run", "HWR_RANK": "0"}
        process = start(REGISTERS, fine.path, path, 0, 2, "4", **environ)
        answer = said(process)
        assert answer.startswith("GroupVoteOverdue rank 0 of 2: after ")
        assert answer.endswith(" s the group has not agreed on registration: rank 1 never came")
        assert 5.5 < after(answer) < 15  # 4 s, and 2 s more: not 8
        assert said(process) == "0"
    assert len(fine.calls(REGISTER)) == len(fine.calls(UNREGISTER)) == 2
    assert state_of(tmp_path / "run", 0).registration_rollbacks == {"clean": 1}
