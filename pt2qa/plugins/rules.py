"""Rules of the structure check: what a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
"""``error``: fails, stays in float, or gives wrong numbers; ``warning``: costs accuracy or speed; ``note``: know it."""

Need = Literal["model", "program", "capture", "graph", "annotations", "prepared", "pair", "layers"]
"""What a rule looks at; see :class:`pt2qa._check.context.CheckContext`."""


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that a rule found.

    Attributes:
        name: the op, module, input or site, as reports show it; empty for the model as a whole.
        why: what is wrong there, with the numbers; one sentence without the name.
        severity: if it differs from the rule's.
        fix: what to do, if it differs from the rule's.
        value: sort key for the findings of a rule, largest first; findings without it keep their order.
        source: ``file.py:12``; if empty, the line of the op called ``name``.
    """

    name: str
    why: str
    severity: Severity | None = None
    fix: str = ""
    value: float = nan
    source: str = ""


class DoesNotApplyError(Exception):
    """Raised by a rule that has nothing to check; its message says what is missing, as in ``no convolution``."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong with a model, an annotation, or the numbers.

    Attributes:
        id: short unique name in lower case with dashes, by which users can silence the rule.
        severity: how bad it usually is.
        title: what is wrong, as the heading of a list: ``modules that forward never calls``.
        why: the consequences, in a sentence or two.
        fix: what to do.
        find: takes a :class:`pt2qa._check.context.CheckContext`, edits nothing, and returns what it found.  It raises
            :class:`DoesNotApplyError` if the context has nothing that the rule is about.
        needs: what the rule looks at.  If any of it is missing, the rule is reported as not applied.
    """

    id: str
    severity: Severity
    title: str
    why: str
    fix: str
    find: Callable[[Any], Iterable[Found]] = field(repr=False)
    needs: tuple[Need, ...] = ()


def rule(
    *, severity: Severity, title: str, why: str, fix: str, needs: tuple[Need, ...] = ()
) -> Callable[[Callable[[Any], Iterable[Found]]], Rule]:
    """Makes a :class:`Rule` of the function below, whose name with dashes is the rule's id."""
    return lambda find: Rule(find.__name__.replace("_", "-"), severity, title, why, fix, find, needs)
