"""What a campaign counted, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a campaign.

    Args:
        campaign: what ran.
        counts: how many trials ended how.
        violations: what must not be, one line each; empty where all is well.
    """

    campaign: str
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
