"""From a checkpoint, a model and a plan to the identity of the artifact that they make.

Owns the composition of the sections. Promises that a publisher and a reader with the same directory and options get the same key, whichever
kind of producer writes. Refuses paths, devices, levels and ranks that do not change a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hwr.checkpoint.digest_cache import fingerprint
from hwr.checkpoint.identity import Adaptation, ArtifactIdentity, Component, Layout, Producer, Representation, Source
from hwr.digest import ALGORITHM
from hwr.loader.plan import LayoutPlan
from hwr.store.manifest import SCHEMA_VERSION

PRODUCER_ID = "hwr.final_layout"
RESTORER_SCHEMA = 1


class Described(Protocol):
    """What of a model belongs to an identity."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


def compose_identity(
    model: Described,
    content_ids: tuple[str, ...],
    plan: LayoutPlan,
    adaptation: Adaptation | None = None,
) -> ArtifactIdentity:
    """Compose the identity. The model's path is not in it: content decides."""
    return ArtifactIdentity(
        source=Source(model_id=model.name, fingerprint=fingerprint(content_ids)),
        component=Component(name=model.name, metadata=dict(model.metadata)),
        representation=Representation(name="safetensors", dtype=plan.cast or model.dtype),
        layout=Layout(name=plan.name),
        adaptation=adaptation or Adaptation(),
        producer=Producer(
            producer_id=PRODUCER_ID,
            version=ALGORITHM,
            implementation_fingerprint=plan.fingerprint,
            manifest_schema=SCHEMA_VERSION,
            restorer_schema=RESTORER_SCHEMA,
        ),
    )
