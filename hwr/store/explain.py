"""Why a lookup missed.

Owns the comparison of an identity with what is stored. Promises the sections, and the fields in them, in which the nearest stored artifact
differs. Refuses to read more than the newest thousand manifests: a miss must not cost more than the load that follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hwr.checkpoint.identity import differences
from hwr.errors import Unavailable
from hwr.outcomes import IdentitySection, InventoryState
from hwr.store import inventory
from hwr.units import short_key

MAX_CANDIDATES: Final = 1000
NOTHING_STORED: Final = "none"


@dataclass(frozen=True, slots=True)
class Explanation:
    """`sections` in which the nearest artifact differs, `fields` as `section.field`; `nearest` is None if nothing is stored."""

    sections: tuple[str, ...]
    fields: tuple[str, ...]
    candidates: int
    nearest: str | None

    def text(self) -> str:
        """Say it to a person."""
        if self.nearest is None:
            return "an artifact of this key is there, but unfinished or unreadable" if self.candidates else "nothing is stored yet"
        return f"the nearest of {self.candidates} stored, {short_key(self.nearest)}, differs in {', '.join(self.fields)}"


def explain_miss(root: Path, wanted: Mapping[str, Any]) -> Explanation:
    """Compare an identity (JSON form) with the stored ones."""
    found = inventory.entries(root)
    stored = [] if isinstance(found, Unavailable) else [e for e in found if e.state in (InventoryState.READY, InventoryState.DENIED)]
    stored.sort(key=lambda entry: entry.modified_ns, reverse=True)
    best: tuple[tuple[int, int], str, tuple[str, ...]] | None = None
    compared = 0
    for entry in stored[:MAX_CANDIDATES]:
        identity = inventory.identity(entry.path)
        if identity is None:
            continue
        compared += 1
        fields = differences(wanted, identity)
        # The nearest is the same component of the same model first, then whatever differs least; newer ones win ties.
        other_model = any(field.startswith((f"{IdentitySection.COMPONENT}.name", f"{IdentitySection.SOURCE}.model_id")) for field in fields)
        rank = (int(other_model), len(fields))
        if fields and (best is None or rank < best[0]):
            best = (rank, entry.key, fields)
    if best is None:
        return Explanation((NOTHING_STORED,), (), compared, None)
    sections = tuple(dict.fromkeys(field.partition(".")[0] for field in best[2]))
    return Explanation(sections, best[2], compared, best[1])
