"""The identity of an artifact: what its bytes mean, and nothing else.

Owns the sections, their exact keys and the key derived from them: the SHA-256 of their canonical JSON.
Promises that equal content gives an equal key whatever the path, device, transport, validation level, DP or SP rank (I1), and that
two identities can be compared section by section. Refuses unknown and missing keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hwr.outcomes import IdentitySection
from hwr.units import canonical_json

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Source:
    """The canonical checkpoint: a fingerprint over the content of its weight files, not over their names or place."""

    model_id: str
    fingerprint: str
    revision: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Component:
    """The part of the model, and the code and configuration that give the tensors their meaning."""

    name: str
    ownership: str = "replicated"
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Representation:
    """The form of the bytes: the data type that the model is loaded in."""

    name: str
    dtype: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors are cut. SP size and backend stand here as a guard; the SP rank does not, since the bytes are the same."""

    name: str
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    sequence_parallel_size: int = 1
    sequence_parallel_backend: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What was merged into the weights; `base` is nothing, anything else needs a fingerprint."""

    kind: str = "base"
    fingerprint: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind != "base" and not self.fingerprint:
            raise ValueError("an adaptation other than base needs a fingerprint")


@dataclass(frozen=True, slots=True)
class Producer:
    """The plan and the format by which the bytes were made; not which kind of producer ran."""

    producer_id: str
    version: str
    implementation_fingerprint: str
    manifest_schema: int
    restorer_schema: int


@dataclass(frozen=True, slots=True)
class ArtifactIdentity:
    """All sections; `key` is the artifact's name in every store."""

    source: Source
    component: Component
    representation: Representation
    layout: Layout
    adaptation: Adaptation
    producer: Producer
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return asdict(self)

    @property
    def key(self) -> str:
        """64 hex digits."""
        return hashlib.sha256(canonical_json(self.to_json())).hexdigest()

    @classmethod
    def from_json(cls, value: Any) -> ArtifactIdentity:
        """Rebuild an identity.

        Raises:
            ValueError, TypeError: a key is missing, unknown or of another type.
        """
        if not isinstance(value, dict) or set(value) != {"schema_version", *IdentitySection}:
            raise ValueError("identity: wrong sections")
        identity = cls(
            schema_version=value["schema_version"],
            **{section: _section(kind, value[section]) for section, kind in _SECTIONS.items()},
        )
        if identity.schema_version != SCHEMA_VERSION:
            raise ValueError(f"identity: schema {identity.schema_version!r}, not {SCHEMA_VERSION}")
        return identity


_SECTIONS: Final[dict[str, Any]] = {
    IdentitySection.SOURCE.value: Source,
    IdentitySection.COMPONENT.value: Component,
    IdentitySection.REPRESENTATION.value: Representation,
    IdentitySection.LAYOUT.value: Layout,
    IdentitySection.ADAPTATION.value: Adaptation,
    IdentitySection.PRODUCER.value: Producer,
}


def differences(ours: Mapping[str, Any], theirs: Any) -> tuple[str, ...]:
    """Name what differs between two identities in JSON form, as `section.field`, deepest first difference only."""
    found: list[str] = []
    for section in IdentitySection:
        mine, other = ours.get(section), theirs.get(section) if isinstance(theirs, Mapping) else None
        if mine == other:
            continue
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            found += [f"{section}.{name}" for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
        else:
            found.append(section.value)
    return tuple(found)


def _section(kind: Any, value: Any) -> Any:
    names = set(kind.__slots__)
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"identity: wrong keys in {kind.__name__.lower()}")
    for name, wanted in kind.__annotations__.items():
        if type(value[name]) is not _TYPES[wanted]:
            raise TypeError(f"identity: {kind.__name__.lower()}.{name} is of type {type(value[name]).__name__}")
    return kind(**value)


_TYPES: Final = {"str": str, "int": int, "Mapping[str, Any]": dict}
