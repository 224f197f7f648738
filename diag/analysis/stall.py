"""What holds a worker up, judged from two samples: the words.

Owns the verdict and (to come) `judge`. Promises a pure function of figures. Refuses to read anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwr.outcomes import Confidence, Stall


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What holds a worker up, and why we think so.

    `evidence` are whole sentences, the strongest first. `since_ns` (CLOCK_BOOTTIME) is the earliest moment that the evidence reaches back
    to. `blames` names who is waited for (`engine/rank`, or `pid N`), where somebody is. `runbook` is `<file>#<section>` below `runbooks/`,
    empty for `none`.
    """

    stall: Stall = Stall.NONE
    confidence: Confidence = Confidence.HIGH
    evidence: tuple[str, ...] = ()
    since_ns: int | None = None
    blames: tuple[str, ...] = ()
    runbook: str = ""
