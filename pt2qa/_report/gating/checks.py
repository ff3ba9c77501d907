"""One check of many numbers: passed if all are good, and there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from pt2qa._report.gating.result import GateCheck


@dataclass(frozen=True, slots=True)
class Item:
    """One number that a check is about.

    Args:
        place: whose number it is.
        number: it; nan where there is none.
        good: whether it meets the limit.
        badness: orders the numbers of a check, the largest is the worst; nan where there is none.
        shown: the number as text, or why there is none.
    """

    place: str
    number: float
    good: bool
    badness: float
    shown: str


def check_of(what: str, limit: str, unit: str, items: Sequence[Item], *, nothing: str) -> GateCheck:
    """A check of the rows of a table.

    Args:
        what: what is measured.
        limit: what it must be.
        unit: ``dB`` or empty.
        items: what each row says.
        nothing: why the check is missed where there is no row.
    """
    if not items:
        return GateCheck(what, limit, nan, unit, False, 0, (nothing,))
    bad = [item for item in items if not item.good]
    # Numbers first, the worst of them first; then what has none.
    ordered = sorted(bad or items, key=lambda item: (isnan(item.badness), -item.badness))
    where = tuple(f"{item.place}: {item.shown}" for item in (ordered if bad else ordered[:1]))
    return GateCheck(what, limit, ordered[0].number, unit, not bad, len(items), where)
