"""Which row is worse.  Rows with nan come last in any order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any, TypeVar

from pt2qa._near_names import question
from pt2qa._report.columns import Column, cell, columns_of, derived_of
from pt2qa.errors import ReportError

Row = TypeVar("Row")


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


def check_column(columns: Iterable[Column], name: str) -> None:
    """Reject a column that rows cannot be sorted by."""
    names = [each.name for each in columns if each.type not in ("shape", "names")]
    if name not in names:
        hint = f"{question(name, names)} ".lstrip()
        raise ReportError(f"cannot sort by {name!r}: {hint}expected worst, graph, or one of {', '.join(names)}")


def without_number(rows: Sequence[Row], column: str) -> tuple[Row, ...]:
    """The rows whose number in this column is nan."""
    return tuple(row for row in rows if isinstance(value := cell(row, column), float) and isnan(value))


def _key(row: Any, column: Column) -> tuple[bool, Any]:
    value = cell(row, column.name)
    if isinstance(value, str):
        return False, value
    if isnan(value):
        return True, 0.0
    return False, value if column.worse == "smaller" else -value
