"""Tables that fit a screen: the least important columns go first, then long names are shortened in the middle."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pt2qa._printable import clean
from pt2qa._report.columns import cell, columns_of
from pt2qa._report.formats import cosine, decibel, number, share, shorten, whole
from pt2qa._report.prose import counted, wrap
from pt2qa._report.ranking import without_number
from pt2qa.errors import ReportError

NARROWEST: Final = 40
"""Screens are taken to have at least this many columns: below it no table can be read."""

_GAP: Final = 2
_TITLE: Final = 20
_SHORTEST: Final = 8
_LAST_TO_GO: Final = 9
_FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "sqnr": decibel,
    "isolated_sqnr": decibel,
    "rounding_sqnr": decibel,
    "worst_channel_sqnr": decibel,
    "cosine": cosine,
    "saturation": share,
    "range_use": share,
}
_PLAIN: Final[dict[str, Callable[[Any], str]]] = {"text": str, "int": whole, "bool": str, "float": number}


@dataclass(frozen=True, slots=True)
class View:
    """How one column of a report is shown.

    Args:
        column: the row's column, or the name of a user's metric.
        header: its title with the unit, one line or more.
        show: number or text to text; numbers stand right, plain ``str`` stands left.
        importance: 0 always stays; of the others the smallest is the first to go on a narrow screen.
        shrinks_to: width down to which its text may be shortened; None never.
    """

    column: str
    header: str
    show: Callable[[Any], str]
    importance: int
    shrinks_to: int | None = None


@dataclass(frozen=True, slots=True)
class _Drawn:
    view: View
    cells: tuple[str, ...]

    @property
    def header_width(self) -> int:
        return max(map(len, self.view.header.splitlines()), default=0)

    @property
    def width(self) -> int:
        return max([self.header_width, *map(len, self.cells)])

    @property
    def least(self) -> int:
        if self.view.shrinks_to is None:
            return self.width
        return min(self.width, max(self.view.shrinks_to, self.header_width))


def screen_width(width: int | None) -> int:
    """The width to fit: the one given, else the terminal's, else 100; never less than :data:`NARROWEST`."""
    return max(NARROWEST, shutil.get_terminal_size((100, 24)).columns if width is None else width)


def table(views: Sequence[View], rows: Sequence[Any], by: str | None, limit: int | None, width: int) -> str:
    """The first rows as a table, and under it what it leaves out.

    Args:
        views: the columns to show.
        rows: all rows, in order.
        by: the column they are sorted by; None for graph order.
        limit: rows to show; None for all.
        width: columns of the screen.

    Raises:
        ReportError: the limit is negative.
    """
    if limit is not None and limit < 0:
        raise ReportError(f"limit: got {limit}, expected 0 or more rows, or None for all")
    shown = rows[:limit]
    drawing, hidden = draw(views, shown, width)
    lines = [drawing]
    if left := len(rows) - len(shown):
        lines.append(f"{counted(left, 'more row')}: report.table(limit=None) or pt2qa show --limit 0")
    if hidden:
        titles = ", ".join(hidden)
        lines.append(f"{counted(len(hidden), 'column')} hidden ({titles}): use a wider screen, width=, or --width")
    if by is not None and (missing := len(without_number(rows, by))):
        lines.append(f"{counted(missing, 'row')} without {by} sorted last")
    return "\n".join([drawing, *(wrap(line, width, indent="  ") for line in lines[1:])])


def draw(views: Sequence[View], rows: Sequence[Any], width: int) -> tuple[str, tuple[str, ...]]:
    """A table of rows that is at most ``width`` wide.

    Columns are left out, the least important first, until names can keep a readable length; then names are shortened.
    A column that is nan in every row was not measured, and is left out without being counted as hidden.

    Returns:
        The table, and the titles of the columns that the width cost.
    """
    drawn = [_Drawn(view, tuple(clean(view.show(cell(row, view.column))) for row in rows)) for view in views]
    drawn = [column for column in drawn if set(column.cells) != {"nan"}]
    hidden: list[View] = []
    while _total(column.least for column in drawn) > width:
        spare = [column for column in drawn if column.view.importance > 0]
        if not spare:
            break
        least = min(spare, key=lambda column: column.view.importance)
        drawn.remove(least)
        hidden.append(least.view)
    return _tabulated(_shrunk(drawn, width)), tuple(" ".join(view.header.split()) for view in views if view in hidden)


def with_column(row_type: type[Any], views: tuple[View, ...], column: str) -> tuple[View, ...]:
    """The views with this column next to the name, where it stays on any screen: rows are sorted by it."""
    # What ranks otherwise may now go, though last of all: a name and the column asked for fit anywhere.
    name, *others = (view if view.importance else replace(view, importance=_LAST_TO_GO) for view in views)
    known = {view.column: view for view in others}
    if column in known:
        chosen = replace(known[column], importance=0)
    else:
        types = {each.name: each.type for each in columns_of(row_type)}
        show = _FORMATS.get(column) or _PLAIN[types.get(column, "float")]
        unit = "\ndB" if show is decibel else "\n%" if show is share else ""
        chosen = View(column, f"{shorten(clean(column), _TITLE)}{unit}", show, 0, 12 if show is str else None)
    return (replace(name, importance=0), chosen, *(view for view in others if view.column != column))


def custom_view(metric: str) -> View:
    """A metric that the user asked for: it outlives pt2qa's own secondary columns."""
    return View(metric, shorten(clean(metric), _TITLE), number, _LAST_TO_GO)


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _shrunk(drawn: list[_Drawn], width: int) -> list[_Drawn]:
    """Take the excess from the columns that can shrink, the widest first; past what is readable only if it must be."""
    excess = _total(column.width for column in drawn) - width
    for shortest in (width, _SHORTEST):
        for index in sorted(range(len(drawn)), key=lambda index: -drawn[index].width):
            column = drawn[index]
            if excess <= 0 or column.view.shrinks_to is None:
                continue
            to = max(min(column.least, shortest), column.header_width, column.width - excess)
            excess -= column.width - to
            drawn[index] = replace(column, cells=tuple(shorten(text, to) for text in column.cells))
    return drawn


def _tabulated(drawn: list[_Drawn]) -> str:
    # Imported here: a report that is only computed or saved prints nothing.
    from tabulate import tabulate

    if not drawn or not drawn[0].cells:
        return "(no rows)"
    # The header is drawn as rows: tabulate widens every column by two more than its title, which a screen cannot spare.
    rows = [
        [column.view.header for column in drawn],
        ["-" * column.width for column in drawn],
        *zip(*(column.cells for column in drawn), strict=True),
    ]
    align = ["left" if column.view.show is str else "right" for column in drawn]
    lines = tabulate(rows, tablefmt="plain", colalign=align, disable_numparse=True).splitlines()
    return "\n".join(line.rstrip() for line in lines)
