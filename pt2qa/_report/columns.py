"""Rows to columns and back, by reading the row class's own fields: files, pandas and CSV share this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from pt2qa.errors import ReportError

Row = TypeVar("Row")
CellType = Literal["int", "float", "bool", "text", "shape"]

CUSTOM: Final = "custom"
"""The field that holds the user's metrics; each becomes a column ``custom/<name>``."""


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a row class.

    Args:
        name: of the field.
        type: of its cells.
        choices: the values it may take; empty: any.
        extended: whether ``to_pandas`` and ``csv`` give it only with ``extended=True``.
        since: the schema of the report that first had it.
    """

    name: str
    type: CellType
    choices: tuple[str, ...] = ()
    extended: bool = False
    since: int = 1


def since(schema: int) -> dict[str, Any]:
    """Field metadata of what files of older schemas lack: a field with a default, which it takes there.

    >>> from dataclasses import field
    >>> spread: float = field(default=0.0, metadata={"extended": True} | since(2))
    """
    return {"since": schema}


def since_of(each: Field[Any]) -> int:
    """The schema that first had a field.

    Raises:
        TypeError: the field came later and has no default, so that older files could not be read.
    """
    schema: int = each.metadata.get("since", 1)
    if schema > 1 and each.default is MISSING and each.default_factory is MISSING:
        raise TypeError(f"{each.name}: a field since schema {schema} needs a default")
    return schema


def columns_of(row_type: type[Any]) -> tuple[Column, ...]:
    """The columns of a row class in field order, without the user's metrics.

    Raises:
        TypeError: a field is of a type that columns cannot hold.
    """
    hints = get_type_hints(row_type)
    return tuple(_column(row_type, f, hints[f.name]) for f in fields(row_type) if not _is_custom(f.name))


def row_type_of(report_type: type[Any], table: str = "rows") -> type[Any]:
    """The class of the rows in a field of a report class, by the field's type ``tuple[Row, ...]``.

    >>> from pt2qa.report import BadCases
    >>> row_type_of(BadCases).__name__, row_type_of(BadCases, "rankings").__name__
    ('CaseRow', 'Ranking')
    """
    row_type: type[Any] = get_args(get_type_hints(report_type)[table])[0]
    return row_type


def takes_custom(row_type: type[Any]) -> bool:
    """Whether rows of this class carry the user's metrics."""
    return any(_is_custom(f.name) for f in fields(row_type))


def custom_names(rows: Iterable[Any]) -> tuple[str, ...]:
    """The names of the user's metrics: those of the first row, since a report has one set of them."""
    for row in rows:
        return tuple(row.custom) if takes_custom(type(row)) else ()
    return ()


def check_custom(row_type: type[Any], rows: Sequence[Any]) -> None:
    """Hold the rule that all rows carry the same metrics, under names that no column has.

    Raises:
        ReportError: names the row and the metrics that differ, or the name that is taken.
    """
    names = set(custom_names(rows))
    for row in rows:
        if set(row.custom) != names:
            different = ", ".join(sorted(names ^ set(row.custom)))
            raise ReportError(
                f"row {row.name!r}: custom metrics differ from those of row {rows[0].name!r} ({different}); "
                "give every row of a report the same metrics, nan where one is not defined"
            )
    if taken := sorted(names & {column.name for column in columns_of(row_type)}):
        raise ReportError(f"custom metric {taken[0]!r}: a column of that name exists; give the metric another name")


def to_columns(row_type: type[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Rows as one list of cells a column; the user's metrics come last as ``custom/<name>``.

    >>> from pt2qa._report.rows import Unpaired
    >>> to_columns(Unpaired, [Unpaired(3, "relu", "quantized", "no handle")])["name"]
    ['relu']
    """
    table = {column.name: [getattr(row, column.name) for row in rows] for column in columns_of(row_type)}
    for name in custom_names(rows):
        table[f"{CUSTOM}/{name}"] = [getattr(row, CUSTOM)[name] for row in rows]
    return table


def from_columns(row_type: type[Row], table: Mapping[str, Sequence[Any]]) -> tuple[Row, ...]:
    """The rows that :func:`to_columns` took apart.  All columns must have one length; one that lacks is the default."""
    plain = [column.name for column in columns_of(row_type) if column.name in table]
    custom = [name for name in table if name.startswith(f"{CUSTOM}/")]
    own = takes_custom(row_type)
    rows = []
    for cells in zip(*(table[name] for name in plain + custom), strict=True):
        values: dict[str, Any] = dict(zip(plain, cells, strict=False))
        if own:
            values[CUSTOM] = {
                name.removeprefix(f"{CUSTOM}/"): cell for name, cell in zip(custom, cells[len(plain) :], strict=True)
            }
        rows.append(row_type(**values))
    return tuple(rows)


def cell(row: Any, column: str) -> Any:
    """One cell by column name, the user's metrics by their own names."""
    custom = getattr(row, CUSTOM, {})
    return custom[column] if column in custom else getattr(row, column)


def _is_custom(name: str) -> bool:
    return name == CUSTOM


def _column(row_type: type[Any], each: Field[Any], hint: Any) -> Column:
    known: dict[Any, CellType] = {
        int: "int",
        float: "float",
        bool: "bool",
        str: "text",
        tuple[int, ...]: "shape",
    }
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if not choices and hint not in known:
        raise TypeError(
            f"{row_type.__name__}.{each.name}: a column cannot hold {hint}; it holds {', '.join(map(str, known))}"
        )
    kind = "text" if choices else known[hint]
    return Column(each.name, kind, choices, bool(each.metadata.get("extended", False)), since_of(each))
