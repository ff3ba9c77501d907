"""Rows as tables that fit a screen, as a data frame, or as CSV.

In a table, the least important columns are dropped, then long names are shortened, with their numbers kept.  Rows
come worst first; those with nan last, in any order.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pt2qa._printable import clean, clean_lines, question
from pt2qa._report.prose import counted, shape, shorten_names, wrap
from pt2qa._report.rows import CUSTOM, Column, cell, column_called, columns_of, derived_of, to_columns
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import pandas

_FORMULA: Final = (*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20")
"""Characters that start a formula, or are skipped before one; the last four are full-width forms of the first."""

_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?([eE][-+]?\d+)?|inf|nan)")
_DTYPES: Final = {"int": "int64", "float": "float64", "bool": "bool", "text": "str", "shape": "object", "names": "str"}


Row = TypeVar("Row")

ORDERS: Final = ("worst", "graph", "name")

NARROWEST: Final = 40
"""Minimum screen width in characters: below it no table is readable."""

_GAP: Final = 2
_SHORTEST: Final = 8
_LAST_TO_GO: Final = 9
_SHORTEST_TEXT: Final = 12


@dataclass(frozen=True, slots=True)
class _Drawn:
    column: Column
    cells: tuple[str, ...]

    @property
    def header_lines(self) -> list[str]:
        return self.column.header.splitlines()

    @property
    def header_width(self) -> int:
        return max(map(len, self.header_lines), default=0)

    @property
    def width(self) -> int:
        return max([self.header_width, *map(len, self.cells)])

    @property
    def least(self) -> int:
        if self.column.shrinks_to is None:
            return self.width
        return min(self.width, max(self.column.shrinks_to, self.header_width))

    def filled(self, lines: int) -> list[str]:
        """Header of so many lines, a rule and cells, all as wide as the column."""
        header = self.header_lines + [""] * (lines - len(self.header_lines))
        fill = str.ljust if self.column.show is str else str.rjust
        return [fill(text, self.width) for text in (*header, "-" * self.width, *self.cells)]


def screen_width(width: int | None) -> int:
    """The width to fit: the one given, else the terminal's, else 100; never less than :data:`NARROWEST`."""
    return max(NARROWEST, shutil.get_terminal_size((100, 24)).columns if width is None else width)


def table(columns: Sequence[Column], rows: Sequence[Any], by: str | None, limit: int | None, width: int) -> str:
    """The first rows as a table, followed by what it leaves out; ``by`` is None for graph order."""
    if limit is not None and limit < 0:
        raise ReportError(f"limit: got {limit}, expected 0 or more rows, or None for all")
    shown = rows[:limit]
    used = [each for each in columns if not each.optional or any(_says(each, cell(row, each.name)) for row in rows)]
    drawing, hidden = draw(used, shown, width)
    lines = []
    if left := len(rows) - len(shown):
        lines.append(f"{counted(left, 'more row')}: report.table(limit=None) or pt2qa show --limit 0")
    if hidden:
        titles = ", ".join(hidden)
        lines.append(f"{counted(len(hidden), 'column')} hidden ({titles}): use a wider screen, width=, or --width")
    if by is not None and (missing := len(without_number(rows, by))):
        lines.append(f"{counted(missing, 'row')} without {by} sorted last")
    return "\n".join([drawing, *(wrap(line, width, indent="  ") for line in lines)])


def draw(columns: Sequence[Column], rows: Sequence[Any], width: int) -> tuple[str, tuple[str, ...]]:
    """A table of rows that is at most ``width`` wide.

    Columns are dropped, least important first, until names keep a readable length; then names are shortened.
    A column that is nan in every row was not measured, and is dropped without being counted as hidden.
    Also returns the titles of the columns dropped for width.
    """
    drawn = [_Drawn(each, tuple(clean(each.show(cell(row, each.name))) for row in rows)) for each in columns]
    drawn = [each for each in drawn if set(each.cells) != {"nan"}]
    hidden: list[Column] = []
    while _total(each.least for each in drawn) > width:
        spare = [each for each in drawn if each.column.importance > 0]
        if not spare:
            break
        least = min(spare, key=lambda each: each.column.importance)
        drawn.remove(least)
        hidden.append(least.column)
    return _aligned(_shrunk(drawn, width)), tuple(each.title for each in columns if each in hidden)


def with_column(columns: Sequence[Column], column: Column) -> tuple[Column, ...]:
    """The columns with the sort column right after the name, where it stays on any screen."""
    # Other columns of importance 0 may now be dropped, but last: a name and the requested column fit anywhere.
    name, *others = (each if each.importance else replace(each, importance=_LAST_TO_GO) for each in columns)
    if name.name == column.name:
        return (replace(name, importance=0), *others)
    shrinks_to = column.shrinks_to or (_SHORTEST_TEXT if column.show is str else None)
    chosen = replace(column, importance=0, shrinks_to=shrinks_to, optional=False)
    return (replace(name, importance=0), chosen, *(each for each in others if each.name != column.name))


def _says(column: Column, value: Any) -> bool:
    """Whether a cell has content: not empty, zero, or nan; a zero is content in a column where only -1 is none."""
    if isinstance(value, int) and not column.show(-1):
        return value >= 0
    return bool(value) and not (isinstance(value, float) and isnan(value))


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _shrunk(drawn: list[_Drawn], width: int) -> list[_Drawn]:
    """Take the excess from columns that can shrink, widest first; below a readable width only if necessary."""
    excess = _total(column.width for column in drawn) - width
    for shortest in (width, _SHORTEST):
        for index in sorted(range(len(drawn)), key=lambda index: -drawn[index].width):
            column = drawn[index]
            if excess <= 0 or column.column.shrinks_to is None:
                continue
            to = max(min(column.least, shortest), column.header_width, column.width - excess)
            excess -= column.width - to
            drawn[index] = replace(column, cells=shorten_names(column.cells, to))
    return drawn


def _aligned(drawn: list[_Drawn]) -> str:
    if not drawn or not drawn[0].cells:
        return "(no rows)"
    columns = [each.filled(max(len(one.header_lines) for one in drawn)) for each in drawn]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def ranked(
    row_type: type[Row], rows: Sequence[Row], by: str, *, ties: str = "sqnr", custom: Iterable[Column] = ()
) -> tuple[Row, ...]:
    """Rows sorted by one column, worst first as the column defines it; text alphabetically.

    Ties are broken by ``ties`` in the same way, then by the given order.  Rows whose number is nan come last.
    """
    known = {each.name: each for each in (*columns_of(row_type), *derived_of(row_type), *custom)}
    check_column(known.values(), by)
    keys = [known[name] for name in dict.fromkeys((by, ties)) if name in known]
    return tuple(sorted(rows, key=lambda row: [_key(row, each) for each in keys]))


def order_of(sort: str, columns: Sequence[Column]) -> str:
    """``worst``, ``graph`` or ``name``, or the name of the column that is called so; rejects what rows do not have."""
    if sort in ORDERS:
        return sort
    check_column(columns, name := column_called(sort, columns))
    return name


def check_column(columns: Iterable[Column], name: str) -> None:
    """Reject a column that rows cannot be sorted by."""
    names = [each.name for each in columns if each.type not in ("shape", "names")]
    if name not in names:
        hint = f"{question(name, names)} ".lstrip()
        raise ReportError(f"cannot sort by {name!r}: {hint}expected worst, graph, or one of {', '.join(names)}")


def without_number(rows: Sequence[Row], column: str) -> tuple[Row, ...]:
    return tuple(row for row in rows if isinstance(value := cell(row, column), float) and isnan(value))


def _key(row: Any, column: Column) -> tuple[bool, Any]:
    value = cell(row, column.name)
    if isinstance(value, str):
        return False, value
    if isnan(value):
        return True, 0.0
    return False, value if column.worse == "smaller" else -value


def frame(row_type: type[Any], rows: Sequence[Any], *, extended: bool) -> pandas.DataFrame:
    """A data frame in field order, the user's metrics last; ``zero_point`` as nullable Int64, shapes as tuples."""
    # pandas takes longer to import than everything else here combined, and only this function needs it.
    import pandas

    types = _types(row_type)
    columns = {}
    for name, cells in _wanted(row_type, rows, extended).items():
        if name == "zero_point":
            columns[name] = pandas.Series([_whole(name, value) for value in cells], dtype="Int64")
        else:
            columns[name] = pandas.Series(cells, dtype=_DTYPES[types.get(name, "float")])
    table: pandas.DataFrame = pandas.DataFrame(columns)
    return table


def _whole(name: str, value: float) -> int | None:
    if isnan(value):
        return None
    if not float(value).is_integer() or abs(value) >= 2**63:
        raise ReportError(f"{name}: got {value}, expected a whole number of 64 bits, or nan")
    return int(value)


def csv_text(row_type: type[Any], rows: Sequence[Any], *, extended: bool) -> str:
    """CSV with a header line; numbers in full precision, ``nan`` and ``inf`` as such, shapes as ``1x3x224x224``.

    Text that a spreadsheet would read as a formula is prefixed with an apostrophe, which makes it text.

    Source:
        https://owasp.org/www-community/attacks/CSV_Injection
    """
    table = _wanted(row_type, rows, extended)
    types = _types(row_type)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_plain, table))
    for cells in zip(*table.values(), strict=True):
        named = zip(table, cells, strict=True)
        writer.writerow([shape(value) if types.get(name) == "shape" else _plain(value) for name, value in named])
    return text.getvalue()


def _plain(value: Any) -> Any:
    """A cell that a spreadsheet shows verbatim.

    >>> _plain("=1+1"), _plain("-0.5"), _plain(-0.5), _plain("relu")
    ("'=1+1", '-0.5', -0.5, 'relu')
    """
    if not isinstance(value, str):
        return value
    quoted = value.startswith(_FORMULA) and not _NUMBER.fullmatch(value)
    return clean_lines(f"'{value}" if quoted else value)


def _types(row_type: type[Any]) -> dict[str, str]:
    return {column.name: column.type for column in columns_of(row_type)}


def _wanted(row_type: type[Any], rows: Sequence[Any], extended: bool) -> dict[str, list[Any]]:
    left_out = set() if extended else {column.name for column in columns_of(row_type) if column.extended}
    table = to_columns(row_type, rows)
    table |= {each.name: [*map(each.show, table[each.name])] for each in columns_of(row_type) if each.type == "names"}
    return {name.removeprefix(f"{CUSTOM}/"): cells for name, cells in table.items() if name not in left_out}
