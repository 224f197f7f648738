"""What a verb found.

Owns the finding: one thing that is not as it should be, with what shows it. Promises that its code is stable and its text one printable
line. Refuses what is merely good to know: that belongs to the report's own facts, and changes no exit status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hwr.outcomes import Severity
from hwr.units import one_line

_CODE: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SEVERITIES: Final = (Severity.WARN, Severity.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. `code` is what scripts compare, `subject` what it is about, `evidence` plain JSON values in base units."""

    code: str
    subject: str
    text: str
    severity: Severity = Severity.WARN
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise ValueError(f"{self.code!r}: a code is words of a-z and 0-9 joined by underscores")
        if self.severity not in _SEVERITIES:
            raise ValueError(f"{self.severity}: what is neither a warning nor an error is no finding")
        # Frozen for everyone else: what comes from outside is escaped where it enters, once.
        for name in ("subject", "text"):
            object.__setattr__(self, name, one_line(getattr(self, name), 1000))

    def line(self) -> str:
        """Return it for people: severity, code, subject and text."""
        return f"{self.severity} {self.code}  {self.subject}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "subject": self.subject,
            "text": self.text,
            "evidence": dict(self.evidence),
        }
