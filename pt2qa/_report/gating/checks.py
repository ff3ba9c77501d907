"""One check of a gate, of one number or many: passed if there is at least one and all are good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from pt2qa._report.formats import exact
from pt2qa._report.prose import LISTED
from pt2qa._report.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class GateCheck(Row):
    """One requirement, or one comparison with the baseline, and whether it was met.

    Args:
        what: what was measured: ``sqnr``, ``rows.isolated_sqnr``, ``layer1.*:rows.sqnr``; against a baseline ``drop of
            rows.isolated_sqnr``.
        limit: what it must be: ``>= 20 dB``.
        measured: the number; for rows, the worst row's; nan if there is none.
        unit: of ``measured``: ``dB`` or empty.
        passed: whether all checked numbers meet the limit.  Without a number it is missed.
        rows: how many rows are checked; 0 for a number of the whole report.
        where: the rows that miss it, worst first, each with its number or why it has none; if passed, the row closest
            to the limit.
    """

    what: str
    limit: str
    measured: float
    unit: str
    passed: bool
    rows: int
    where: tuple[str, ...]

    @property
    def title(self) -> str:
        """The requirement in one line."""
        return f"{self.what} {self.limit}"

    @property
    def outcome(self) -> str:
        """What was measured, in one sentence."""
        if not self.rows:
            shown = "no number" if isnan(self.measured) else exact(self.measured, self.unit)
            return ", ".join((shown, *self.where))
        if self.passed:
            return self.where[0] if self.rows == 1 else f"worst of {self.rows} rows is {self.where[0]}"
        if len(self.where) == 1:
            return self.where[0] if self.rows == 1 else f"1 of {self.rows} rows misses it, {self.where[0]}"
        return f"{len(self.where)} of {self.rows} rows miss it"

    @property
    def places(self) -> tuple[str, ...]:
        """The first of several rows that miss it, and how many more there are; empty if the outcome says it."""
        if len(self.where) <= 1:
            return ()
        rest = len(self.where) - LISTED
        return (*self.where[:LISTED], *([f"and {rest} more"] if rest > 0 else []))


@dataclass(frozen=True, slots=True)
class Item:
    """One number of a check.

    Args:
        place: whose number it is.
        number: its value; nan if there is none.
        good: whether it meets the limit.
        badness: sort key within a check, larger is worse; nan if there is none.
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
        items: one for each row.
        nothing: why the check is missed if there is no row.
    """
    if not items:
        return GateCheck(what, limit, nan, unit, False, 0, (nothing,))
    bad = [item for item in items if not item.good]
    # Numbers first, worst first; then rows without one.
    ordered = sorted(bad or items, key=lambda item: (isnan(item.badness), -item.badness))
    where = tuple(f"{item.place}: {item.shown}" for item in (ordered if bad else ordered[:1]))
    return GateCheck(what, limit, ordered[0].number, unit, not bad, len(items), where)


def limit_text(value: float, unit: str) -> str:
    """A limit as it was written, with its unit."""
    return f"{value:.12g} {unit}".rstrip()
