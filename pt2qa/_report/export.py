"""Rows as a data frame or CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, Final

from pt2qa._printable import clean_lines
from pt2qa._report.columns import CUSTOM, columns_of, to_columns
from pt2qa._report.formats import shape
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import pandas

_FORMULA: Final = (*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20")
"""Characters that start a formula, or are skipped before one; the last four are full-width forms of the first."""

_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?([eE][-+]?\d+)?|inf|nan)")
_DTYPES: Final = {"int": "int64", "float": "float64", "bool": "bool", "text": "str", "shape": "object", "names": "str"}


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
