"""Registration of mapped weights.

A refusal, or a failure after which everything was undone, may be served staged (`retryable`). The rest ends the start: memory that the
platform still owns, a group whose members would differ, or a registration that was required.
"""

from __future__ import annotations

from hwr.errors.base import EXIT_TIMEOUT, HwrError
from hwr.outcomes import FailureCode, ResolutionStage


class HostRegistrationError(HwrError):
    """{where} of {file} ({nbytes} bytes at {address:#x}) was not registered by {driver}: {problem}
    Everything before it was unregistered, so the weights can be served staged; look up the driver's words to register them."""

    code = FailureCode.REGISTRATION_FAILED
    stage = ResolutionStage.LIFECYCLE
    retryable = True


class WritableRegion(HostRegistrationError):
    """{file}: is mapped writable, and only read-only mappings are registered.
    Map the payload files of a lease as they are; a copy that can be written is never pinned."""

    code = FailureCode.WRITABLE_REGION
    retryable = False


class HostRegistrationBudgetError(HostRegistrationError):
    """{planned} bytes are to be registered, and {source} leaves {budget}.
    {remedy}"""

    code = FailureCode.REGISTRATION_BUDGET


class HostRegistrationUnsupported(HostRegistrationError):
    """{driver} cannot register read-only mappings here: {problem}
    The weights can be served staged; nothing was registered."""

    code = FailureCode.REGISTRATION_UNSUPPORTED


class HostRegistrationDeadline(HostRegistrationError):
    """the deadline of {deadline:.1f} s passed after {done} of {chunks} chunks ({done_bytes} of {planned} bytes).
    Everything was unregistered, so the weights can be served staged; look at the seconds of each chunk in the journal."""

    code = FailureCode.REGISTRATION_DEADLINE
    exit_code = EXIT_TIMEOUT


class PinAdmissionTimeout(HostRegistrationError):
    """{file}: waited {waited:.1f} s for another process to register it, held by {holder}.
    The weights can be served staged; look at the holder, whose journal names the driver call that it is in."""

    code = FailureCode.PIN_ADMISSION_TIMEOUT
    exit_code = EXIT_TIMEOUT


class HostRegistrationCleanupError(HostRegistrationError):
    """{count} of {chunks} chunks ({nbytes} bytes) could not be unregistered: {problem}
    Restart this worker: the memory stays mapped and registered until the process ends (it failed first with: {first})."""

    code = FailureCode.REGISTRATION_CLEANUP_FAILED
    retryable = False

    # What is still registered, as the registrar's own object; set by whoever raises it, absent in a copy from another process.
    active_registration: object | None = None


class RegistrationRequired(HostRegistrationError):
    """registration is required, and the weights would be served by {transport} ({word}): {problem}
    Remove the cause, or start with --dlo-host-registration-mode auto to be served staged."""

    code = FailureCode.REGISTRATION_REQUIRED
    retryable = False


class GroupVoteOverdue(HostRegistrationError):
    """rank {rank} of {size}: after {waited:.1f} s the group has not agreed on registration: {problem}
    Restart the group: no rank may serve before all agree, and the journal of a rank that is named says what it was in."""

    code = FailureCode.REGISTRATION_VOTE_OVERDUE
    retryable = False
    exit_code = EXIT_TIMEOUT

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that are named: they did not vote, died, or failed."""
        return tuple(self.details.get("ranks", ()))
