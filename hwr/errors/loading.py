"""Production, restoration, resolution."""

from __future__ import annotations

from hwr.errors.base import HwrError
from hwr.outcomes import FailureCode, ResolutionStage


class ProducerFailed(HwrError):
    """the producer of artifact {key} failed: {problem}
    {remedy}"""

    code = FailureCode.PRODUCER_FAILED
    stage = ResolutionStage.PRODUCTION


class ProducerUnsupported(HwrError):
    """{what} cannot be published: {problem}
    {remedy}"""

    code = FailureCode.PRODUCER_UNSUPPORTED
    stage = ResolutionStage.PRODUCTION


class RestorePreflightFailed(HwrError):
    """the artifact does not fit the model: {problem}
    The model was not touched; check that model code and artifact belong together."""

    code = FailureCode.RESTORE_PREFLIGHT_FAILED
    stage = ResolutionStage.RESTORATION
    retryable = True


class RestoreCommitFailed(HwrError):
    """restoring broke off: {problem}
    The model is unusable and was discarded; start again."""

    code = FailureCode.RESTORE_COMMIT_FAILED
    stage = ResolutionStage.RESTORATION
    retryable = True


class ForwardFailed(HwrError):
    """{model}: a forward pass on synthetic input failed: {problem}
    The weights are loaded; give --steps 0 to leave the forward pass out."""

    code = FailureCode.FORWARD_FAILED
    stage = ResolutionStage.RESTORATION


class ResolutionFailed(HwrError, RuntimeError):
    """Host Weight Runtime resolution failed: {cause}
    {remedy}"""

    def __init__(self, *, failure: HwrError) -> None:
        """Wrap the typed failure that ended the resolution; its code, stage and exit code show through."""
        super().__init__(reason=failure.reason, cause=failure.cause, remedy=failure.way_out, failure=failure)
        self.failure = failure
        self.details = {"failure": failure}

    # The instance speaks for its failure; the class keeps the defaults of the tree.
    @property
    def code(self) -> FailureCode:  # type: ignore[override]
        return self.failure.code

    @property
    def stage(self) -> ResolutionStage:  # type: ignore[override]
        return self.failure.stage

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return self.failure.retryable

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.failure.exit_code
