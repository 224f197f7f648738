"""The runtime: `load` wires the stages, in order.

Owns resolution, its one report, and what happens next on each answer. Promises that every resolution ends in exactly one report event
whatever happens (F1), that preferred falls back to the ordinary load on retryable failures only (F2), that required never serves what it
could not verify (F3), and that disabled touches nothing (F4). Sits inside somebody else's server: no signal handlers, no logging set-up,
no global registry. Refuses to change a live model or a finished resolution because a publication failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hwr import telemetry
from hwr.checkpoint.digest_cache import SourceDigests, source_digests
from hwr.checkpoint.identity import Adaptation, ArtifactIdentity
from hwr.checkpoint.source import CheckpointSource, StatFacts, open_source
from hwr.errors import (
    ActiveLease,
    CanonicalLoadFailed,
    DomainUnavailable,
    HwrError,
    LocalMiss,
    ProducerFailed,
    ProducerUnsupported,
    ResolutionFailed,
    RestorePreflightFailed,
    SourceChanged,
    SourceRejected,
    StoreIoError,
    Unavailable,
    errno_text,
)
from hwr.loaded import AdaptedWeights, Loaded
from hwr.loader.factory import ModelFactory, as_factory
from hwr.loader.identity import compose_identity
from hwr.loader.plan import LayoutPlan
from hwr.loader.producer import PRODUCER, finalized_model
from hwr.loader.restore import plan_restore
from hwr.notes import Notes
from hwr.options import Options, refuse_unimplemented
from hwr.outcomes import (
    AttemptResult,
    InventoryState,
    Lifecycle,
    LoadStage,
    MemoryMoment,
    Phase,
    PublicationOutcome,
    ResolutionAction,
    ResolutionOutcome,
    ResolutionStage,
    RuntimeMode,
    StoreStatus,
    ValidationLevel,
)
from hwr.report import Failure, Report
from hwr.store import inventory
from hwr.store.domain import Domain, Limits, open_domain
from hwr.store.explain import Explanation, explain_miss
from hwr.store.layout import StoreLayout
from hwr.store.lease import HostWeightLease
from hwr.store.lookup import judge, lookup, refuse_denied
from hwr.store.publish import Publication, publish
from hwr.telemetry import events as E
from hwr.telemetry import memory
from hwr.telemetry.failures import record_failure
from hwr.units import one_line, short_key


def load(
    module_factory: ModelFactory | Callable[[], torch.nn.Module],
    checkpoint: str | os.PathLike[str],
    options: Options,
    *,
    adaptation: AdaptedWeights | None = None,
) -> Loaded:
    """Load a model: from the store if it has the final bytes, else the ordinary way.

    `module_factory` is a callable that builds the module (its names are the checkpoint's), or a `ModelFactory`.

    Raises:
        ResolutionFailed: required could not be met, or a failure that preferred must not hide. It is a RuntimeError.
        SourceRejected, CanonicalLoadFailed: the checkpoint cannot be loaded the ordinary way either.
        NotImplementedYet: an option that this version models and does not have.
    """
    refuse_unimplemented(options)
    _tell(options)
    return _Load(as_factory(module_factory), Path(checkpoint), options, adaptation).run()


def publish_checkpoint(
    module_factory: ModelFactory | Callable[[], torch.nn.Module], checkpoint: str | os.PathLike[str], options: Options
) -> tuple[Publication, Report]:
    """Load the ordinary way and publish, unless the artifact is there; nothing is leased.

    Raises:
        HwrError: the checkpoint or the store cannot be used, or the publication failed.
    """
    refuse_unimplemented(options)
    work = _Load(as_factory(module_factory), Path(checkpoint), options, None)
    return work.publish_only(), work.report


def explain(
    module_factory: ModelFactory | Callable[[], torch.nn.Module], checkpoint: str | os.PathLike[str], options: Options
) -> tuple[str, Explanation | None]:
    """Return the key that a load would look up, and why it would miss; None: it would hit, as far as the metadata level sees.

    Nothing is written, locked or mapped.

    Raises:
        ArtifactDenied, ArtifactInvalid: it is there, and would not be served.
        HwrError: the checkpoint or the store cannot be used.
    """
    root = options.host_weight_runtime.root
    assert root is not None, "an enabled mode has a root"
    layout = StoreLayout(root)
    work = _Load(as_factory(module_factory), Path(checkpoint), options, None)
    identity = work.identify(work.inspect(), layout, keep=False)
    if isinstance(found := inventory.entries(root), Unavailable):
        raise DomainUnavailable(reason="no_store", root=str(root), problem=found.reason)
    if not any(entry.key == identity.key and entry.state in (InventoryState.READY, InventoryState.DENIED) for entry in found):
        return identity.key, explain_miss(root, identity.to_json())
    refuse_denied(layout, identity.key)
    judge(layout.artifact(identity.key), identity.key, identity.to_json(), ValidationLevel.MANIFEST_AND_METADATA).close()
    return identity.key, None


def _tell(options: Options) -> None:
    """Start what the telemetry options of a server ask for, and say what a watcher has to know; what the host configured itself stays."""
    told = options.telemetry
    if told.enabled:
        telemetry.ensure_configured(told.run_dir, told.engine)
    if told.metrics_port is not None and not telemetry.asked_to_serve():  # whoever serves at a port of its own is not second-guessed
        telemetry.serve_metrics(told.metrics_port)  # a taken port is an event and no reason to stop
    telemetry.emit(E.PolicyRecorded(stall_after_seconds=options.host_weight_runtime.stall_after_seconds))


class _Load:
    """One load: what is known so far, and the stages that find out more."""

    def __init__(self, factory: ModelFactory, directory: Path, options: Options, adaptation: AdaptedWeights | None) -> None:
        self.factory, self.directory, self.adaptation = factory, directory, adaptation
        self.plan = LayoutPlan()  # as loaded; richer plans have no option yet
        self.options = options.host_weight_runtime
        self.mode = self.options.mode
        self.report = Report(mode=self.mode, validation=self.options.validation)
        self.notes = Notes(self.report)
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
                    resolution.add(result=self.report.outcome, attempts=self.notes.said())
        except Exception as error:  # an exit or an interrupt is no failure: whoever asked for it says what comes next
            if isinstance(error, HwrError):
                record_failure(error, fatal=True)
            telemetry.emit(E.PhaseChanged(phase=Phase.FAILED))
            raise
        telemetry.emit(E.PhaseChanged(phase=Phase.READY))
        return loaded

    def publish_only(self) -> Publication:
        telemetry.emit(E.PhaseChanged(phase=Phase.RESOLVING))
        source = self.inspect()
        domain = self.open_store()
        identity = self.identify(source, domain.layout)
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
        # Where there is a key and an opened store a publication is tried: a denied or corrupt artifact is replaced by it.
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
        identity = self.identify(source, domain.layout)
        with self.notes.attempt(ResolutionStage.LOOKUP) as attempt, self.notes.stage(LoadStage.LOOKUP):
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
        self.notes.advance(Lifecycle.LEASE_OWNED_BY_LOADER)
        memory.sample(MemoryMoment.AFTER_MAP, [lease.mapped()])
        try:
            with self.notes.attempt(ResolutionStage.RESTORATION):
                with self.notes.stage(LoadStage.SKELETON), _building():
                    module = self.factory.skeleton()
                with self.notes.stage(LoadStage.RESTORE), telemetry.span(E.RestoreBegun(key=lease.key)) as restoring:
                    plan = plan_restore(module, lease)
                    self.notes.advance(Lifecycle.RESTORE_PLANNED)
                    self.notes.advance(Lifecycle.COMMIT_STARTED)
                    restored = plan.commit()
                    lease.recheck()
                    restoring.add(tensors=len(lease.manifest.tensors), bytes=restored.bytes, copied_bytes=restored.copied_bytes)
        except BaseException:
            module = plan = None  # type: ignore[assignment]  # the only references to the views: without them the lease can go
            _close_quietly(lease)
            raise
        if self.adaptation is not None:
            telemetry.emit(E.AdaptationSkipped(kind=self.adaptation.kind))
        memory.sample(MemoryMoment.AFTER_RESTORE, [lease.mapped()])
        self.report.outcome = ResolutionOutcome.LOCAL_HIT
        self.report.bytes, self.report.tensors = lease.manifest.payload_bytes, len(lease.manifest.tensors)
        self.notes.advance(Lifecycle.CARRIER_OWNED)
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
        self.notes.advance(Lifecycle.BACKEND_READY)
        return Loaded(module, self.report, None, ())

    def _canonical(self) -> torch.nn.Module:
        with self.notes.attempt(ResolutionStage.CANONICAL_LOADING, quiet=self.mode is RuntimeMode.DISABLED, last=True):
            try:
                self._import()
                with self.notes.stage(LoadStage.CANONICAL):
                    module = self.factory.canonical(self.directory, self.source)
            except CanonicalLoadFailed as error:
                self._say_why(error)
                raise
            if self.adaptation is not None:
                with self.notes.stage(LoadStage.ADAPT):
                    self.adaptation.merge(module)
        return module

    def _say_why(self, error: CanonicalLoadFailed) -> None:
        """A library's loader failed on a checkpoint that was not looked at: look now, our reason says more."""
        if self.source is None and not self.report.attempts:
            try:
                open_source(self.directory)
            except SourceRejected as rejected:
                self.notes.rejected(rejected, self.directory.name)
                raise rejected from error

    def _publish(self, module: torch.nn.Module) -> Publication:
        assert self.domain is not None
        assert self.identity is not None
        key = self.identity.key
        with self.notes.stage(LoadStage.PUBLISH):
            try:
                with telemetry.span(E.ProductionBegun(key=key, producer=PRODUCER)) as producing:
                    self._refuse_made_up()
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

    def _refuse_made_up(self) -> None:
        """Values that a library made up differ from node to node: they are no final bytes of this checkpoint."""
        names = getattr(self.factory, "uninitialised", ())
        if names:
            raise ProducerUnsupported(
                reason="uninitialised",
                what=f"{self.factory.name}",
                problem=f"{len(names)} tensors are not in the checkpoint and were initialised at random: {', '.join(names[:3])}",
                remedy="Fine-tune and save the whole model, or load it with the class that wrote it.",
            )

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
        with self.notes.attempt(ResolutionStage.CANONICAL_LOADING, quiet=True), self.notes.stage(LoadStage.INSPECT):
            try:
                self.source = open_source(self.directory)
            except SourceRejected as rejected:
                self.notes.rejected(rejected, self.directory.name)
                raise
        if self.source.unlisted:
            telemetry.emit(E.ShardsIgnored(names=self.source.unlisted))
        return self.source

    def open_store(self) -> Domain:
        options = self.options
        assert options.root is not None
        limits = Limits(
            max_artifact_bytes=options.max_artifact_bytes,
            max_store_bytes=options.max_store_bytes,
            min_free_bytes=options.min_free_bytes,
        )
        with self.notes.attempt(ResolutionStage.DOMAIN, quiet=True), self.notes.stage(LoadStage.DOMAIN):
            self.domain = open_domain(options.root, limits=limits, coordination_timeout_seconds=options.coordination_timeout_seconds)
        return self.domain

    def identify(self, source: CheckpointSource, layout: StoreLayout, *, keep: bool = True) -> ArtifactIdentity:
        self._import()
        with self.notes.attempt(ResolutionStage.LOOKUP, quiet=True), self.notes.stage(LoadStage.IDENTITY):
            digests: SourceDigests = source_digests(source, layout.digests, keep=keep)
            adaptation = Adaptation(self.adaptation.kind, self.adaptation.fingerprint) if self.adaptation is not None else None
            with _building():  # what gives the tensors their meaning may have to be asked of a skeleton
                self.identity = compose_identity(self.factory, digests.content_ids, self.plan, adaptation)
        self.report.key = self.identity.key
        return self.identity

    def _import(self) -> None:
        """Import the model's code, which can take longer than loading it."""
        if LoadStage.IMPORT not in self.report.stage_seconds:
            with self.notes.stage(LoadStage.IMPORT):
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


def _close_quietly(lease: HostWeightLease) -> None:
    with suppress(ActiveLease):  # the traceback of the failure still holds tensors; the mapping goes with the last of them
        lease.close()
