"""Rules of the structure check: what one is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any, Final, Literal

Severity = Literal["error", "warning", "note"]
"""``error``: fails, stays in float, or gives wrong numbers; ``warning``: costs accuracy or speed; ``note``: know it."""

Need = Literal["model", "program", "capture", "graph", "annotations", "prepared", "pair", "layers"]
"""What a rule looks at; see :class:`pt2qa._check.context.CheckContext`."""

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that a rule found.

    Attributes:
        name: the op, module, input or site, as reports call it; empty for the model as a whole.
        why: what is wrong there, with the numbers; one sentence without the name.
        severity: where it differs from the rule's.
        fix: what to do, where it differs from the rule's.
        value: what orders the findings of a rule, the largest first; those without keep the rule's order.
        source: ``file.py:12``; where it is empty, the line that made the op called ``name``.
    """

    name: str
    why: str
    severity: Severity | None = None
    fix: str = ""
    value: float = nan
    source: str = ""


class DoesNotApplyError(Exception):
    """Raised by a rule that has nothing to look at; its text says what is missing, as in ``no convolution``."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong with a model, an annotation, or the numbers.

    Attributes:
        id: short name in lower case with dashes, unique; users silence a rule by it.
        severity: how bad it usually is.
        title: what is wrong, as the head of a list of places: ``modules that forward never calls``.
        why: what comes of it, in a sentence or two.
        fix: what to do.
        find: from the :class:`pt2qa._check.context.CheckContext` to what was found; edits nothing.  It raises
            :class:`DoesNotApplyError` where the context holds nothing that the rule is about.
        needs: what the rule looks at.  Where something of it is not there, the rule is reported as not applied.
    """

    id: str
    severity: Severity
    title: str
    why: str
    fix: str
    find: Callable[[Any], Iterable[Found]] = field(repr=False)
    needs: tuple[Need, ...] = ()
