"""Which row is worse.  A nan is neither: such rows come last, whatever the order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from math import isnan
from typing import Any, Final, TypeVar

from pt2qa._report.columns import cell, columns_of, custom_names
from pt2qa.errors import ReportError

Row = TypeVar("Row")

SMALLEST_FIRST: Final = frozenset(
    {"sqnr", "isolated_sqnr", "rounding_sqnr", "worst_channel_sqnr", "cosine", "range_use", "handle", "rank"}
    | {"input_sqnr"}
    | {"min", "q0_1", "q1"}
)
"""Numbers that are worse the smaller they are (and handles, whose order is the graph's); all others largest first."""


def ranked(
    row_type: type[Row], rows: Sequence[Row], by: str, *, ties: str = "sqnr", smallest: Collection[str] = ()
) -> tuple[Row, ...]:
    """Rows by one column, the worst first: small SQNR, cosine and range use, large everything else; text by alphabet.

    Ties go by ``ties`` in the same manner, then by the order given.  Rows whose number is nan come last.

    Args:
        row_type: the class of the rows, which need not be any.
        rows: the rows.
        by: a column or one of the user's metrics.
        ties: a column.
        smallest: the user's metrics that are worse the smaller they are.

    Raises:
        ReportError: there is no such column, or it has no order; the text lists those that have.
    """
    check_column(row_type, rows, by)
    return tuple(sorted(rows, key=lambda row: (_key(row, by, smallest), _key(row, ties, smallest))))


def order(
    row_type: type[Row], rows: Sequence[Row], sort: str, *, worst: str, smallest: Collection[str] = ()
) -> tuple[Row, ...]:
    """Rows in the order a user named: ``graph`` as they are, ``worst`` by the column that says so, or by a column.

    Args:
        row_type: the class of the rows.
        rows: the rows.
        sort: the order.
        worst: the column that says which is worst.
        smallest: the user's metrics that are worse the smaller they are.

    Raises:
        ReportError: there is no such column.
    """
    by = worst if sort == "worst" else sort
    return tuple(rows) if sort == "graph" else ranked(row_type, rows, by, smallest=smallest)


def check_column(row_type: type[Any], rows: Sequence[Any], name: str) -> None:
    """Refuse a column that rows cannot be sorted by.

    Raises:
        ReportError: lists the columns, the nearest first.
    """
    names = [column.name for column in columns_of(row_type) if column.type != "shape"] + list(custom_names(rows))
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ReportError(f"cannot sort by {name!r}: {hint}expected worst, graph, or one of {', '.join(names)}")


def without_number(rows: Sequence[Row], column: str) -> tuple[Row, ...]:
    """The rows whose number in this column is nan."""
    return tuple(row for row in rows if isinstance(value := cell(row, column), float) and isnan(value))


def _key(row: Any, column: str, smallest: Collection[str]) -> tuple[bool, Any]:
    value = cell(row, column)
    if isinstance(value, str):
        return False, value
    if isnan(value):
        return True, 0.0
    return False, value if column in SMALLEST_FIRST or column in smallest else -value
