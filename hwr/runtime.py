"""The runtime: `load` wires the stages, in order.

Owns resolution, its one report, and what happens next on each answer. Promises that every resolution ends in exactly one report event
whatever happens (F1), that preferred falls back to the ordinary load on retryable failures only (F2), that required never serves what it
could not verify (F3), and that disabled touches nothing (F4). Sits inside somebody else's server: no signal handlers, no logging set-up,
no global registry. Refuses to change a live model or a finished resolution because a publication failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hwr import telemetry
from hwr.checkpoint.digest_cache import SourceDigests, source_digests
from hwr.checkpoint.identity import Adaptation, ArtifactIdentity
from hwr.checkpoint.source import CheckpointSource, StatFacts, open_source
from hwr.errors import (
    ActiveLease,
    CanonicalLoadFailed,
    HwrError,
    LocalMiss,
    ProducerFailed,
    ResolutionFailed,
    RestorePreflightFailed,
    SourceChanged,
    SourceRejected,
    StoreIoError,
    errno_text,
)
from hwr.loader.factory import ModelFactory, as_factory
from hwr.loader.identity import compose_identity
from hwr.loader.plan import LayoutPlan
from hwr.loader.producer import PRODUCER, finalized_model
from hwr.loader.restore import plan_restore, unbind
from hwr.options import Options, refuse_unimplemented
from hwr.outcomes import (
    AttemptResult,
    Lifecycle,
    LoadStage,
    MemoryMoment,
    Phase,
    PublicationOutcome,
    ResolutionAction,
    ResolutionOutcome,
    ResolutionStage,
    RuntimeMode,
    SourceReason,
    StoreStatus,
)
from hwr.report import Attempt, Failure, Report
from hwr.store.domain import Domain, Limits, open_domain
from hwr.store.explain import Explanation, explain_miss
from hwr.store.lease import HostWeightLease, HostWeightLeaseCarrier
from hwr.store.lookup import lookup
from hwr.store.publish import Publication, publish
from hwr.telemetry import events as E
from hwr.telemetry import memory
from hwr.telemetry.failures import record_failure
from hwr.telemetry.hub import Span
from hwr.units import one_line, short_key


@dataclass(frozen=True, slots=True)
class AdaptedWeights:
    """An adaptation that is merged after a canonical load, never on a warm restore; its fingerprint is part of the identity."""

    kind: str
    fingerprint: str
    merge: Callable[[torch.nn.Module], None]


class Loaded:
    """A model that is ready, and what it stands on. Close it, or use it as a context manager.

    `carrier` holds the lease of a warm start until somebody takes it, None after a canonical load. `dlo` is None until there is an
    offload backend.
    """

    def __init__(self, module: torch.nn.Module, report: Report, lease: HostWeightLease | None, bound: tuple[str, ...]) -> None:
        self.module: torch.nn.Module | None = module
        self.report = report
        self.carrier = HostWeightLeaseCarrier(lease) if lease is not None else None
        self.dlo: None = None
        self._bound = bound

    def close(self) -> None:
        """Let go of the weights: the module loses its tensors, then the lease is closed.

        Raises:
            ActiveLease: somebody else still holds a tensor of it; drop it and close again.
        """
        module, self.module = self.module, None
        if module is not None and self._bound:
            unbind(module, self._bound)
        del module
        if self.carrier is not None:
            self.carrier.close()
        memory.sample(MemoryMoment.CLOSED)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ActiveLease:
            # While an exception travels, its traceback holds tensors: the lease goes with the last of them.
            if kind is None:
                raise


def load(
    module_factory: ModelFactory | Callable[[], torch.nn.Module],
    checkpoint: str | os.PathLike[str],
    options: Options,
    *,
    adaptation: AdaptedWeights | None = None,
    plan: LayoutPlan | None = None,
) -> Loaded:
    """Load a model: from the store if it has the final bytes, else the ordinary way.

    `module_factory` is a callable that builds the module (its names are the checkpoint's), or a `ModelFactory`.

    Raises:
        ResolutionFailed: required could not be met, or a failure that preferred must not hide. It is a RuntimeError.
        SourceRejected, CanonicalLoadFailed: the checkpoint cannot be loaded the ordinary way either.
        NotImplementedYet: an option that this version models and does not have.
    """
    refuse_unimplemented(options)
    if options.telemetry.enabled:
        telemetry.ensure_configured()
    return _Load(as_factory(module_factory), Path(checkpoint), options, adaptation, plan or LayoutPlan()).run()


def publish_checkpoint(
    module_factory: ModelFactory | Callable[[], torch.nn.Module], checkpoint: str | os.PathLike[str], options: Options
) -> tuple[Publication, Report]:
    """Load the ordinary way and publish, unless the artifact is there; nothing is leased.

    Raises:
        HwrError: the checkpoint or the store cannot be used, or the publication failed.
    """
    refuse_unimplemented(options)
    if options.telemetry.enabled:
        telemetry.ensure_configured()
    work = _Load(as_factory(module_factory), Path(checkpoint), options, None, LayoutPlan())
    return work.publish_only(), work.report


def explain(
    module_factory: ModelFactory | Callable[[], torch.nn.Module], checkpoint: str | os.PathLike[str], options: Options
) -> tuple[str, Explanation | None]:
    """Return the key that a load would look up, and why it would miss (None: it is stored).

    Raises:
        HwrError: the checkpoint or the store cannot be used.
    """
    work = _Load(as_factory(module_factory), Path(checkpoint), options, None, LayoutPlan())
    source = work.inspect()
    domain = work.open_store(create=False)
    identity = work.identify(source, domain)
    if domain.layout.artifact(identity.key).is_dir():
        return identity.key, None
    return identity.key, explain_miss(domain.root, identity.to_json())


class _Load:
    """One load: what is known so far, and the stages that find out more."""

    def __init__(
        self, factory: ModelFactory, directory: Path, options: Options, adaptation: AdaptedWeights | None, plan: LayoutPlan
    ) -> None:
        self.factory, self.directory, self.adaptation, self.plan = factory, directory, adaptation, plan
        self.options = options.host_weight_runtime
        self.mode = self.options.mode
        self.report = Report(mode=self.mode, validation=self.options.validation)
        self.source: CheckpointSource | None = None
        self.domain: Domain | None = None
        self.identity: ArtifactIdentity | None = None

    # the whole --------------------------------------------------------------------------------------------------

    def run(self) -> Loaded:
        telemetry.emit(E.PhaseChanged(phase=Phase.RESOLVING))
        memory.sample(MemoryMoment.BEFORE_LOAD)
        begun = E.ResolutionBegun(mode=self.mode, validation=self.options.validation)
        try:
            with telemetry.span(begun, mode=self.mode, result=ResolutionOutcome.FAILED) as resolution:
                try:
                    loaded = self._resolve()
                finally:
                    self.report.seconds = resolution.elapsed
                    resolution.add(result=self.report.outcome, attempts=tuple(_said(attempt) for attempt in self.report.attempts))
        except Exception as error:  # an exit or an interrupt is no failure: whoever asked for it says what comes next
            if isinstance(error, HwrError):
                record_failure(error, fatal=True)
            telemetry.emit(E.PhaseChanged(phase=Phase.FAILED))
            raise
        telemetry.emit(E.PhaseChanged(phase=Phase.READY))
        return loaded

    def publish_only(self) -> Publication:
        source = self.inspect()
        domain = self.open_store()
        identity = self.identify(source, domain)
        if domain.layout.artifact(identity.key).is_dir():
            found = lookup(domain, identity.key, identity.to_json(), self.options.validation)
            if found.lease is not None:
                digest, size = found.lease.manifest.content_digest, found.lease.manifest.payload_bytes
                found.lease.close()
                return Publication(PublicationOutcome.ALREADY_PRESENT, identity.key, digest, size)
        module = self._canonical()
        result = self._publish(module)
        if result.failure is not None:
            raise result.failure
        return result

    def _resolve(self) -> Loaded:
        if self.mode is RuntimeMode.DISABLED:
            module = self._canonical()
            self.report.outcome = ResolutionOutcome.CANONICAL_DIRECT
            return self._canonical_loaded(module)
        try:
            loaded = self._from_store()
        except HwrError as failure:
            return self._after_failure(failure)
        except OSError as error:
            return self._after_failure(self._store_io(error))
        if loaded is not None:
            return loaded
        if self.mode is RuntimeMode.REQUIRED:
            assert self.identity is not None
            assert self.domain is not None
            miss = LocalMiss(reason="miss", key=short_key(self.identity.key), root=str(self.domain.root), problem=str(self.report.miss))
            raise ResolutionFailed(failure=miss)
        return self._fall_back(publishing=True)

    def _after_failure(self, failure: HwrError) -> Loaded:
        """Judge a failure before anything was restored."""
        if self.mode is RuntimeMode.REQUIRED or not failure.retryable:
            raise ResolutionFailed(failure=failure) from failure
        if isinstance(failure, SourceRejected):
            try:
                loaded = self._fall_back(publishing=False)
            except CanonicalLoadFailed as second:
                raise failure from second  # our reason says more than a library's
            record_failure(failure, fatal=False)
            return loaded
        record_failure(failure, fatal=False)
        # Only what can be built is published: a denied or corrupt artifact is replaced, a broken store is left alone.
        return self._fall_back(publishing=self.identity is not None and self.domain is not None)

    def _store_io(self, error: OSError) -> StoreIoError:
        """Name an error that no room named: it must not stop an ordinary load (F2)."""
        path = error.filename if isinstance(error.filename, str) else str(self.options.root)
        failure = StoreIoError(
            reason="os_error", root=str(self.options.root), path=path, operation="using the store", problem=errno_text(error)
        )
        failure.__cause__ = error
        return failure

    # the warm way -----------------------------------------------------------------------------------------------

    def _from_store(self) -> Loaded | None:
        """Restore from the store; None is a miss."""
        source = self.inspect()
        domain = self.open_store()
        identity = self.identify(source, domain)
        with self._attempt(ResolutionStage.LOOKUP) as attempt, self._stage(LoadStage.LOOKUP):
            found = lookup(domain, identity.key, identity.to_json(), self.options.validation)
            if found.failure is not None:
                if found.status is StoreStatus.INVALID:
                    attempt.action = ResolutionAction.QUARANTINE_THEN_PRODUCE
                raise found.failure
            if found.lease is None:
                attempt.result, attempt.action = AttemptResult.MISS, ResolutionAction.TRY_PRODUCER
                self._explain(domain, identity)
                return None
            attempt.result, attempt.action = AttemptResult.HIT, ResolutionAction.RETURN_LEASE
        return self._restore(found.lease)

    def _restore(self, lease: HostWeightLease) -> Loaded:
        self._advance(Lifecycle.LEASE_OWNED_BY_LOADER)
        memory.sample(MemoryMoment.AFTER_MAP, [lease.mapped()])
        try:
            with self._attempt(ResolutionStage.RESTORATION):
                with self._stage(LoadStage.SKELETON), _building():
                    module = self.factory.skeleton()
                with self._stage(LoadStage.RESTORE), telemetry.span(E.RestoreBegun(key=lease.key)) as restoring:
                    plan = plan_restore(module, lease)
                    self._advance(Lifecycle.RESTORE_PLANNED)
                    self._advance(Lifecycle.COMMIT_STARTED)
                    restored = plan.commit()
                    restoring.add(tensors=len(lease.manifest.tensors), bytes=restored.bytes, copied_bytes=0)
        except BaseException:
            module = plan = None  # type: ignore[assignment]  # the only references to the views: without them the lease can go
            _close_quietly(lease)
            raise
        if self.adaptation is not None:
            telemetry.emit(E.AdaptationSkipped(kind=self.adaptation.kind))
        memory.sample(MemoryMoment.AFTER_RESTORE, [lease.mapped()])
        self.report.outcome = ResolutionOutcome.LOCAL_HIT
        self.report.bytes, self.report.tensors = lease.manifest.payload_bytes, len(lease.manifest.tensors)
        self._advance(Lifecycle.CARRIER_OWNED)
        return Loaded(module, self.report, lease, restored.bound)

    # the cold way -----------------------------------------------------------------------------------------------

    def _fall_back(self, *, publishing: bool) -> Loaded:
        module = self._canonical()
        self.report.outcome = ResolutionOutcome.CANONICAL_FALLBACK
        if publishing:
            result = self._publish(module)
            self.report.publication = result.outcome
            if result.failure is not None:
                self.report.publication_failure = Failure.of(result.failure)
                record_failure(result.failure, fatal=False)
        return self._canonical_loaded(module)

    def _canonical_loaded(self, module: torch.nn.Module) -> Loaded:
        memory.sample(MemoryMoment.AFTER_RESTORE)
        self._advance(Lifecycle.BACKEND_READY)
        return Loaded(module, self.report, None, ())

    def _canonical(self) -> torch.nn.Module:
        with self._attempt(ResolutionStage.CANONICAL_LOADING, quiet=self.mode is RuntimeMode.DISABLED, last=True):
            try:
                self._import()
                with self._stage(LoadStage.CANONICAL):
                    module = self.factory.canonical(self.directory, self.source)
            except CanonicalLoadFailed as error:
                self._say_why(error)
                raise
            if self.adaptation is not None:
                with self._stage(LoadStage.ADAPT):
                    self.adaptation.merge(module)
        return module

    def _say_why(self, error: CanonicalLoadFailed) -> None:
        """A library's loader failed on a checkpoint that was not looked at: look now, our reason says more."""
        if self.source is None and not self.report.attempts:
            try:
                open_source(self.directory)
            except SourceRejected as rejected:
                self._rejected(rejected)
                raise rejected from error

    def _publish(self, module: torch.nn.Module) -> Publication:
        assert self.domain is not None
        assert self.identity is not None
        key = self.identity.key
        with self._stage(LoadStage.PUBLISH):
            try:
                with telemetry.span(E.ProductionBegun(key=key, producer=PRODUCER)) as producing:
                    produced = finalized_model(module, self.plan)
                    producing.add(tensors=len(produced.tensors), bytes=produced.bytes)
                result = publish(self.domain, self.identity, produced.tensors, aliases=produced.aliases, unchanged=self._source_unchanged)
            except HwrError as failure:
                return Publication(PublicationOutcome.FAILED, key, failure=failure)
            except Exception as error:  # noqa: BLE001  (a tensor of a kind that cannot be read as bytes; the model is loaded all the same)
                failed = ProducerFailed(
                    reason=type(error).__name__,
                    key=short_key(key),
                    problem=f"{type(error).__name__}: {one_line(str(error))}",
                    remedy="The model was loaded the ordinary way; report what kind of tensors it holds.",
                )
                return Publication(PublicationOutcome.FAILED, key, failure=failed)
        self.report.bytes, self.report.tensors = result.payload_bytes, len(produced.tensors)
        return result

    def _source_unchanged(self) -> None:
        assert self.source is not None
        for shard in self.source.shards:
            try:
                facts = StatFacts.of(os.stat(shard.path))
            except OSError as error:
                raise SourceChanged(reason="gone", file=shard.name) from error
            if facts != shard.facts:
                raise SourceChanged(reason="facts", file=shard.name)

    # the stages -------------------------------------------------------------------------------------------------

    def inspect(self) -> CheckpointSource:
        with self._attempt(ResolutionStage.CANONICAL_LOADING, quiet=True), self._stage(LoadStage.INSPECT):
            try:
                self.source = open_source(self.directory)
            except SourceRejected as rejected:
                self._rejected(rejected)
                raise
        if self.source.unlisted:
            telemetry.emit(E.ShardsIgnored(names=self.source.unlisted))
        return self.source

    def open_store(self, *, create: bool = True) -> Domain:
        options = self.options
        assert options.root is not None
        limits = Limits(
            max_artifact_bytes=options.max_artifact_bytes,
            max_store_bytes=options.max_store_bytes,
            min_free_bytes=None if options.min_free_gib is None else int(options.min_free_gib * 2**30),
        )
        with self._attempt(ResolutionStage.DOMAIN, quiet=True), self._stage(LoadStage.DOMAIN):
            self.domain = open_domain(
                options.root, limits=limits, coordination_timeout_seconds=options.coordination_timeout_seconds, create=create
            )
        return self.domain

    def identify(self, source: CheckpointSource, domain: Domain) -> ArtifactIdentity:
        self._import()
        with self._attempt(ResolutionStage.LOOKUP, quiet=True), self._stage(LoadStage.IDENTITY):
            digests: SourceDigests = source_digests(source, domain.layout.digests)
            adaptation = Adaptation(self.adaptation.kind, self.adaptation.fingerprint) if self.adaptation is not None else None
            with _building():  # what gives the tensors their meaning may have to be asked of a skeleton
                self.identity = compose_identity(self.factory, digests.content_ids, self.plan, adaptation)
        self.report.key = self.identity.key
        return self.identity

    def _import(self) -> None:
        """Import the model's code, which can take longer than loading it."""
        if LoadStage.IMPORT not in self.report.stage_seconds:
            with self._stage(LoadStage.IMPORT):
                _ = self.factory.name

    def _explain(self, domain: Domain, identity: ArtifactIdentity) -> None:
        explanation = explain_miss(domain.root, identity.to_json())
        self.report.miss = explanation.text()
        telemetry.emit(
            E.MissExplained(
                key=identity.key,
                sections=explanation.sections,
                candidates=explanation.candidates,
                nearest=explanation.nearest,
                detail=", ".join(explanation.fields) or None,
            )
        )

    # telling ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, stage: LoadStage) -> Iterator[Span]:
        running = telemetry.span(E.StageBegun(stage=stage), stage=stage)
        try:
            with running:
                yield running
        finally:
            self.report.stage_seconds[stage] = self.report.stage_seconds.get(stage, 0.0) + running.seconds

    @contextmanager
    def _attempt(self, stage: ResolutionStage, *, quiet: bool = False, last: bool = False) -> Iterator[_Attempt]:
        """Note an attempt; `quiet` ones are noted only if they fail, and after the `last` there is nothing else to try."""
        attempt = _Attempt()
        begun = time.monotonic()
        try:
            yield attempt
        except HwrError as error:
            attempt.result = AttemptResult.TIMEOUT if error.exit_code == 4 else AttemptResult.ERROR
            attempt.failure = Failure.of(error)
            if self.mode is not RuntimeMode.PREFERRED or not error.retryable or last:
                attempt.action = ResolutionAction.FAIL_STARTUP
            elif attempt.action is ResolutionAction.SKIP:
                attempt.action = ResolutionAction.CANONICAL_FALLBACK
            self._note(attempt, stage, begun)
            raise
        if not quiet:
            self._note(attempt, stage, begun)

    def _note(self, attempt: _Attempt, stage: ResolutionStage, begun: float) -> None:
        failure = attempt.failure
        done = Attempt(stage, attempt.result, attempt.action, time.monotonic() - begun, failure)
        self.report.attempts.append(done)
        telemetry.emit(
            E.AttemptRecorded(
                stage=stage,
                result=done.result,
                action=done.action,
                seconds=done.seconds,
                error_code=failure.code if failure else None,
                error_reason=(failure.reason or None) if failure else None,
            )
        )

    def _rejected(self, error: SourceRejected) -> None:
        sizes = {name: error.details[name] for name in _SIZES if isinstance(error.details.get(name), int)}
        telemetry.emit(
            E.SourceRejected(
                reason=SourceReason(error.code.value),
                file=str(error.details.get("file") or error.details.get("directory") or self.directory.name),
                problem=error.cause,
                **sizes,
            )
        )

    def _advance(self, state: Lifecycle) -> None:
        self.report.lifecycle = state
        telemetry.emit(E.LifecycleAdvanced(state=state))


_SIZES = ("file_bytes", "expected_bytes", "declared_header_bytes", "missing_bytes", "extra_bytes")


@dataclass(slots=True)
class _Attempt:
    result: AttemptResult = AttemptResult.SUCCESS
    action: ResolutionAction = ResolutionAction.SKIP  # nothing else was needed
    failure: Failure | None = None


@contextmanager
def _building() -> Iterator[None]:
    """Name what a module's constructor raises: some cannot do without values, which the ordinary load gives them (F2)."""
    try:
        yield
    except (HwrError, OSError):
        raise
    except Exception as error:
        problem = f"it cannot be built without its parameters: {type(error).__name__}: {one_line(str(error))}"
        raise RestorePreflightFailed(reason=type(error).__name__, problem=problem) from error


def _said(attempt: Attempt) -> str:
    code = f":{attempt.failure.code}" if attempt.failure else ""
    return f"{attempt.stage}:{attempt.result}{code}"


def _close_quietly(lease: HostWeightLease) -> None:
    with suppress(ActiveLease):  # the traceback of the failure still holds tensors; the mapping goes with the last of them
        lease.close()
