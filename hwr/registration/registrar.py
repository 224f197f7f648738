"""Registering what is mapped: all of it, or nothing.

Owns the order: plan, capability, budget, the turn of this process, one driver call a chunk, rollback, the vote of the group. Promises that
everything which can refuse does so before the first call (H2); a begin event before each call and its end after it (H3); a deadline that
is looked at between calls and after the last; a rollback in reverse on every way out but success, an interrupt included; and that
whatever may still be registered stays mapped. A clean rollback is `Staged`, an unclean one raises (H6). Refuses to cancel a call: the
events, stack.txt and the kernel's pin counters say where it is, whoever supervises the process ends it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hwr.errors import (
    GroupVoteOverdue,
    HostRegistrationBudgetError,
    HostRegistrationCleanupError,
    HostRegistrationDeadline,
    HostRegistrationError,
    HostRegistrationUnsupported,
    HwrError,
    PinAdmissionTimeout,
    StoreError,
)
from hwr.outcomes import BudgetSource, RegistrationOutcome, RollbackResult, TransportReason
from hwr.registration.admission import admitted
from hwr.registration.budget import Budget, Facts, budget, read_facts
from hwr.registration.drivers import Drain, Driver, DriverFailed
from hwr.registration.preflight import known_limits
from hwr.registration.ranges import CHUNK_BYTES, Chunk, Plan, Region, plan
from hwr.registration.registered import Export, Holding, Registered, Undone
from hwr.registration.stack import StackFile
from hwr.registration.vote import Vote
from hwr.telemetry import emit, journal_directory, span
from hwr.telemetry import events as E
from hwr.telemetry.hub import Span
from hwr.telemetry.process import sync
from hwr.units import one_line

# The vote goes on for a tenth of the deadline, and this at least: for a rank that began that much later, and whose turn never came.
GRACE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Staged:
    """Nothing is registered, and nothing stands in the way of serving staged; `failure` is absent where there was no failure."""

    reason: TransportReason
    detail: str
    failure: HwrError | None = None

    def __post_init__(self) -> None:
        if self.reason is TransportReason.REGISTERED:
            raise ValueError("what is staged is not registered")


def register(
    regions: Iterable[Region],
    *,
    driver: Driver,
    limit_bytes: int | None,
    deadline_seconds: float,
    files: Sequence[Path],
    exports: Iterable[Export] = (),
    vote: Vote | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    page_bytes: int = mmap.PAGESIZE,
    device: str = "cpu",
    facts: Callable[[], Facts] = read_facts,
    clock: Callable[[], float] = time.monotonic,
) -> Registered | Staged:
    """Register mapped payload files, all or nothing, and agree on it with the group.

    `files` are the payload files; each is locked while it is registered. `exports` hold the mappings; they are taken over: given back
    when nothing of them is registered any more, and never otherwise. `limit_bytes` None is no configured ceiling. The deadline counts
    from here, for the turn and the calls; the vote ends a tenth of it later, 2 s at least.

    Raises:
        WritableRegion: a mapping can be written; the driver was not called.
        HostRegistrationCleanupError: a rollback was not clean. Its `active_registration` is what is left; start-up must end.
        GroupVoteOverdue: the group did not agree in time; nothing is registered here any more.
    """
    work = _Registration(driver, tuple(exports), vote, device, limit_bytes, deadline_seconds, page_bytes, clock)
    try:
        if vote is not None:
            vote.join()
        return work.run(plan(regions, page_bytes=page_bytes, chunk_bytes=chunk_bytes), files, facts)
    except BaseException:
        if vote is not None:
            vote.leave()
        raise
    finally:
        work.end()


class _Registration:
    """One registration: what it was told, and what it holds so far."""

    def __init__(
        self,
        driver: Driver,
        exports: tuple[Export, ...],
        vote: Vote | None,
        device: str,
        limit_bytes: int | None,
        deadline_seconds: float,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._driver, self._vote, self._device, self._limit_bytes = driver, vote, device, limit_bytes
        self._deadline_seconds, self._clock = deadline_seconds, clock
        self._deadline = clock() + deadline_seconds
        self._plan = Plan((), ())
        self._done_bytes = 0
        self._rolled_back = False
        self._holding = Holding(driver, exports, page_bytes=page_bytes)
        self._stack = StackFile(journal_directory())

    def run(self, plan: Plan, files: Sequence[Path], facts: Callable[[], Facts]) -> Registered | Staged:
        self._plan = plan
        begun = E.MappingRegistering(
            driver=self._driver.name,
            device=self._device,
            ranges=len(plan.ranges),
            chunks=len(plan.chunks),
            planned_bytes=plan.nbytes,
            deadline_seconds=self._deadline_seconds,
            limit_bytes=self._limit_bytes,
        )
        told = {"driver": self._driver.name, "ranges": len(plan.ranges), "chunks": len(plan.chunks)}
        with span(begun, result=RegistrationOutcome.FAILED, **told) as mapping:
            try:
                staged = self._refusal(facts) or self._admit_and_call(files)
                staged = self._agree(staged)
            except BaseException:
                self._undo_all()  # an interrupt, or a failure that nobody foresaw
                raise
            _tell(mapping, staged, self._held_bytes())
        return staged or Registered(self._holding, plan)

    def end(self) -> None:
        """Close what was open; give the mappings back unless something of them is registered."""
        self._stack.close()
        if not self._holding.chunks:
            self._holding.undo()

    # before the first call --------------------------------------------------------------------------------------

    def _refusal(self, facts: Callable[[], Facts]) -> Staged | None:
        if not self._plan.chunks:
            return Staged(TransportReason.NO_REGIONS, "there is nothing to register")
        refused = self._driver.supported()
        if refused is not None:
            failure = HostRegistrationUnsupported(reason=refused.word, driver=self._driver.name, problem=refused.reason)
            return Staged(TransportReason(refused.word), refused.reason, failure)
        refusal = self._over_budget(budget(facts(), self._limit_bytes, memlock_applies=self._driver.memlock_applies))
        if refusal is None and self._driver.name == "cuda":
            for line in known_limits(self._plan, os.uname().release, None):
                emit(E.LimitRecorded(problem=line))
        return refusal

    def _over_budget(self, found: Budget) -> Staged | None:
        planned, failure = self._plan.nbytes, None
        try:
            found.check(planned)
        except HostRegistrationBudgetError as refusal:
            failure = refusal
        emit(
            E.BudgetRecorded(
                fits=failure is None,
                planned_bytes=planned,
                budget_bytes=found.bytes,
                source=found.source,
                **{f"{source.value}_bytes": size for source, size in found.candidates.items()},
            )
        )
        if failure is None:
            return None
        reason = TransportReason.MEMLOCK if found.source is BudgetSource.MEMLOCK else TransportReason.BUDGET
        return Staged(reason, failure.cause, failure)

    # the calls --------------------------------------------------------------------------------------------------

    def _admit_and_call(self, files: Sequence[Path]) -> Staged | None:
        left = self._deadline - self._clock()
        try:
            # The lock has its own clock; what is left until the deadline is the same on both.
            with admitted(files, deadline=time.monotonic() + left, seconds=left):
                sync()  # whatever takes the node down from here on, the journal says that this was begun
                return self._call_all()
        except PinAdmissionTimeout as failure:
            return Staged(TransportReason.ADMISSION_TIMEOUT, failure.cause, failure)
        except StoreError as failure:
            return Staged(TransportReason.PLATFORM, failure.cause, failure)

    def _call_all(self) -> Staged | None:
        for chunk in self._plan.chunks:
            if self._clock() >= self._deadline:
                return self._staged_after(TransportReason.DEADLINE, self._too_late())
            try:
                self._call(chunk)
            except HostRegistrationError as failure:
                return self._staged_after(TransportReason.DRIVER_ERROR, failure)
            self._done_bytes += chunk.nbytes
        # Others may have given up on a call that took this long.
        return self._staged_after(TransportReason.DEADLINE, self._too_late()) if self._clock() >= self._deadline else None

    def _call(self, chunk: Chunk) -> None:
        ordinals = {
            "range": chunk.range_number,
            "ranges": len(self._plan.ranges),
            "chunk": chunk.chunk_number,
            "chunks": chunk.chunks_of_range,
        }
        begun = E.ChunkRegistering(
            **ordinals,
            bytes=chunk.nbytes,
            file=chunk.file,
            driver=self._driver.name,
            done_bytes=self._done_bytes,
            planned_bytes=self._plan.nbytes,
            limit_bytes=self._limit_bytes,
        )
        where = "range {range}/{ranges}, chunk {chunk}/{chunks}".format_map(ordinals)
        with span(begun, **ordinals, bytes=chunk.nbytes) as calling:
            try:
                with self._stack.armed(f"{where}, {chunk.nbytes} bytes"):
                    self._holding.register(chunk)
            except DriverFailed as error:
                raise self._refused(calling, chunk, where, error.name, f"{error.name} ({error.number}): {error.text}") from error
            except Exception as error:  # a driver that breaks its promise; the chunk counts as registered until it is unregistered
                word = type(error).__name__
                raise self._refused(calling, chunk, where, word, f"{word}: {one_line(str(error))}") from error
            calling.add(done_bytes=self._done_bytes + chunk.nbytes)

    def _refused(self, calling: Span, chunk: Chunk, where: str, word: str, problem: str) -> HostRegistrationError:
        calling.add(problem=problem)
        return HostRegistrationError(
            reason=word, where=where, file=chunk.file, nbytes=chunk.nbytes, address=chunk.address, driver=self._driver.name, problem=problem
        )

    def _too_late(self) -> HostRegistrationDeadline:
        return HostRegistrationDeadline(
            reason="between_chunks",
            deadline=self._deadline_seconds,
            done=len(self._holding.chunks),
            chunks=len(self._plan.chunks),
            done_bytes=self._done_bytes,
            planned=self._plan.nbytes,
        )

    # undoing ----------------------------------------------------------------------------------------------------

    def _staged_after(self, reason: TransportReason, failure: HostRegistrationError) -> Staged:
        drain = self._roll_back(reason, failure.cause, failed=reason is TransportReason.DRIVER_ERROR)
        detail = failure.cause
        if drain is not None and not drain.clean:
            detail += f"; the pending error was not cleared ({drain.result.value}{f': {drain.detail}' if drain.detail else ''})"
        return Staged(reason, detail, failure)

    def _roll_back(self, cause: TransportReason | None, first: str, *, failed: bool) -> Drain | None:
        """Unregister in reverse; then consume the pending error, if a call failed.

        Raises:
            HostRegistrationCleanupError: something may still be registered.
        """
        size = self._held_bytes()
        with span(E.RollbackBegun(cause=cause, chunks=len(self._holding.chunks), bytes=size), result=RollbackResult.PARTIAL) as rolling:
            undone = self._holding.undo()
            self._rolled_back = True  # not before: an interrupt in the driver leaves chunks, and whoever catches it tries them again
            drain = self._driver.drain() if failed or undone.problems else None
            rolling.add(
                result=RollbackResult.PARTIAL if undone.kept else RollbackResult.CLEAN,
                chunks=len(undone.chunks),
                bytes=undone.nbytes,
                survivors=len(undone.kept),
                survivor_bytes=undone.kept_bytes,
                problem=undone.problems[0] if undone.problems else None,
            )
            if drain is not None:
                rolling.add(drain=drain.result, drain_detail=drain.detail or None)
            if undone.kept:
                raise self._unclean(undone, first)
        return drain

    def _unclean(self, undone: Undone, first: str) -> HostRegistrationCleanupError:
        error = HostRegistrationCleanupError(
            reason="survivors",
            count=len(undone.kept),
            chunks=len(self._plan.chunks),
            nbytes=undone.kept_bytes,
            problem=undone.problems[0],
            first=first,
        )
        error.active_registration = Registered(self._holding, self._plan, ends_when_dropped=False)
        return error

    def _undo_all(self) -> None:
        """Roll back on the way out of an exception that goes on; what is left is told by the event, and stays mapped."""
        if self._holding.chunks and not self._rolled_back:
            with contextlib.suppress(HostRegistrationCleanupError):
                self._roll_back(None, "the registration was broken off", failed=False)

    # the group --------------------------------------------------------------------------------------------------

    def _agree(self, staged: Staged | None) -> Staged | None:
        if self._vote is None:
            return staged
        mine = RegistrationOutcome.REGISTERED if staged is None else RegistrationOutcome.STAGED
        try:
            left = self._deadline + max(GRACE_SECONDS, self._deadline_seconds / 10) - self._clock()
            reason = TransportReason.REGISTERED if staged is None else staged.reason
            decision = self._vote.decide(mine, reason, seconds=max(0.0, left))
        except GroupVoteOverdue as overdue:
            if staged is None:
                self._roll_back(TransportReason.GROUP, overdue.cause, failed=False)
            raise
        if decision.registered or staged is not None:
            return staged
        others = "; ".join(decision.against)
        self._roll_back(TransportReason.GROUP, f"the group is served staged ({others})", failed=False)
        return Staged(TransportReason.GROUP, f"all ranks of a group are served alike: {others}")

    def _held_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._holding.chunks)


def _tell(mapping: Span, staged: Staged | None, registered_bytes: int) -> None:
    if staged is None:
        mapping.add(result=RegistrationOutcome.REGISTERED, reason=TransportReason.REGISTERED, registered_bytes=registered_bytes)
        return
    if staged.failure is not None:
        mapping.failed(staged.failure)
    mapping.add(result=RegistrationOutcome.STAGED, reason=staged.reason, registered_bytes=0, problem=staged.detail)
