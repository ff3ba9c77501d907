"""What any report may contain: rows that can be compared, their columns, its environment, and nodes without a partner.

A row class is a frozen dataclass.  A field is a column, and :func:`column` in its type hint adds what the type does
not say: header, unit, format, which values are worse.  :func:`derived` does the same for a computed number.  Tables,
files, pandas and diffs read these descriptions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from pt2qa import __version__
from pt2qa._printable import clean
from pt2qa._report.prose import LISTED, decibel, number, shape, shorten, whole
from pt2qa.errors import ReportError

AnyRow = TypeVar("AnyRow")
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])
CellType = Literal["int", "float", "bool", "text", "shape", "names"]
Worse = Literal["smaller", "larger", ""]

CUSTOM: Final = "custom"
"""The field with the user's metrics; each becomes a column ``custom/<name>``."""

LONGEST_HEADER: Final = 20

EXACT: Final = 2**53
"""The largest number of things that a report counts: floats, and so JSON and pages, count so far."""

_SHOW: Final = {"text": str, "int": whole, "bool": str, "float": number, "shape": shape, "names": ", ".join}
_TYPES: Final[dict[Any, CellType]] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "text",
    tuple[int, ...]: "shape",
    tuple[str, ...]: "names",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, or one number of a whole report.

    Args:
        name: of the field, or of a user's metric.
        type: of its cells.
        header: its title in tables, with the unit, in one line or more.
        show: from a cell to text; numbers are right-aligned, plain ``str`` left-aligned.
        unit: ``dB`` or empty.
        worse: which values are worse; empty if a user's metric does not say.
        importance: 0 is always shown; otherwise the smallest is dropped first on a narrow screen.
        shrinks_to: minimum width to which its text may be shortened; None: never.
        key: whether it identifies rows: all keys together find the same row in another report.
        optional: whether tables omit it if it is empty in every row.
        choices: allowed values; empty: any.
        extended: whether ``to_pandas`` and ``csv`` include it only with ``extended=True``.
        judged: for a number of the whole report: whether it says how good the report is.
        since: the schema of the report that first had it.
        earlier: its cell in a file of an earlier schema, from the row's other cells; None: the field's default.
        least, most: the numbers that it may hold; None: any.  A file with others is damaged.  NaN is within any limits.
    """

    name: str
    type: CellType = "float"
    header: str = ""
    show: Callable[[Any], str] = number
    unit: str = ""
    worse: Worse = "larger"
    importance: int = 5
    shrinks_to: int | None = None
    key: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    extended: bool = False
    judged: bool = False
    since: int = 1
    earlier: Callable[[Mapping[str, Any]], Any] | None = None
    least: float | None = None
    most: float | None = None

    def allows(self, number: float) -> bool:
        """Whether it may hold a number; nan always."""
        return (self.least is None or not number < self.least) and (self.most is None or not number > self.most)

    @property
    def is_ordered(self) -> bool:
        """Whether its cells can be better or worse; texts, shapes and booleans can only be equal or not."""
        return self.type in ("int", "float")

    @property
    def limits(self) -> str:
        """What it may hold, in words."""
        least = "" if self.least is None else f" from {self.least}"
        return f"numbers{least}{'' if self.most is None else f' up to {self.most}'}"

    @property
    def title(self) -> str:
        return " ".join(self.header.split()) or self.name


def column(header: str | None = None, **description: Any) -> dict[str, Any]:
    """Description of a field, for its type hint.

    Used as ``Annotated[float, column("max error", importance=3)]``.

    Args:
        header: None for the name and the unit.
        description: further arguments of :class:`Column`; those implied by the type may be omitted.

    >>> from pt2qa.report import LayerRow
    >>> found = {each.name: each for each in columns_of(LayerRow)}["isolated_sqnr"]
    >>> found.title, found.worse, found.show(12.345)
    ('isolated dB', 'smaller', '12.3')
    """
    return {**description, **({} if header is None else {"header": header})}


Count = Annotated[int, column(least=0, most=EXACT)]
"""How many; those of several reports add up."""

Amount = Annotated[float, column(least=0)]
"""A sum of squares or of absolute values, a variance or a largest difference."""


class Derived(Generic[Value]):
    """A property that is a column, or a number of a whole report; made by :func:`derived`."""

    def __init__(self, get: Callable[[Any], Value], description: Mapping[str, Any]) -> None:
        self._get, self._description = get, description
        self.__name__, self.__doc__ = get.__name__, get.__doc__

    @property
    def column(self) -> Column:
        returned = self._get.__annotations__["return"]
        return _described(self.__name__, str(getattr(returned, "__name__", returned)), self._description)

    @overload
    def __get__(self, instance: None, owner: Any) -> Derived[Value]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Value: ...
    def __get__(self, instance: object, owner: Any) -> Derived[Value] | Value:
        return self if instance is None else self._get(instance)


def derived(header: str | None = None, **description: Any) -> Callable[[Callable[[Any], Value]], Derived[Value]]:
    """Decorator that makes a method a property that is also a column, or a number of a whole report.

    Args:
        header: as of :func:`column`.
        description: as of :func:`column`.

    >>> class Report:
    ...     @derived(unit="dB", judged=True)
    ...     def sqnr(self) -> float:
    ...         return 20.0
    >>> Report().sqnr
    20.0
    """
    return lambda get: Derived(get, column(header, **description))


def cached(function: Function) -> Function:
    """:func:`functools.cache`, with the function's own types."""
    return cast(Function, cache(function))


@cached
def columns_of(row_type: type[Any]) -> tuple[Column, ...]:
    """The columns of a row class in field order, without the user's metrics and derived numbers."""
    hints = get_type_hints(row_type, include_extras=True)
    return tuple(_column(row_type, f, hints[f.name]) for f in fields(row_type) if f.name != CUSTOM)


@cached
def derived_of(owner: type[Any]) -> tuple[Column, ...]:
    """The derived numbers of a row class or report class, in order."""
    members = dict.fromkeys(name for each in reversed(owner.__mro__) for name in vars(each))
    found = (getattr(owner, name, None) for name in members)
    return tuple(each.column for each in found if isinstance(each, Derived))


@cached
def fields_of(report_type: type[Any]) -> tuple[Field[Any], ...]:
    """The fields of a report class: its own before those that it inherits.

    >>> from pt2qa.report import Findings
    >>> [each.name for each in fields_of(Findings)][:5]
    ['rows', 'rules', 'checked', 'batches', 'samples']
    """
    owners = [{each.name for each in fields(owner)} for owner in report_type.__mro__ if is_dataclass(owner)]
    return tuple(sorted(fields(report_type), key=lambda each: sum(each.name in owner for owner in owners)))


@cached
def numbers_of(report_type: type[Any]) -> tuple[Column, ...]:
    """The numbers of a whole report: fields first, then derived ones.

    >>> from pt2qa.report import LayerReport
    >>> [each.name for each in numbers_of(LayerReport)]
    ['batches', 'samples', 'sqnr', 'batches_apart']
    """
    plain, hints = get_type_hints(report_type), get_type_hints(report_type, include_extras=True)
    own = [f for f in fields_of(report_type) if plain[f.name] in (int, float)]
    return (*(_column(report_type, f, hints[f.name]) for f in own), *derived_of(report_type))


@cached
def tables_of(report_type: type[Any]) -> dict[str, type[Any]]:
    """The fields of a report class that hold rows, ``tuple[Row, ...]``, and their row classes.

    >>> from pt2qa.report import BadCases
    >>> tables_of(BadCases)["rankings"].__name__
    'Ranking'
    """
    hints = get_type_hints(report_type)
    own = {f.name: get_args(hints[f.name]) for f in fields_of(report_type) if get_origin(hints[f.name]) is tuple}
    return {name: types[0] for name, types in own.items() if isinstance(types[0], type) and is_dataclass(types[0])}


def shown_columns(row_type: type[Any]) -> tuple[Column, ...]:
    """The columns that a table shows by default.

    A row class lists them in ``shown``, in order, derived ones included; else they are its fields that are not
    ``extended``.
    """
    known = {each.name: each for each in (*columns_of(row_type), *derived_of(row_type))}
    names = getattr(row_type, "shown", tuple(each.name for each in columns_of(row_type) if not each.extended))
    return tuple(known[name] for name in names)


def column_called(text: str, columns: Iterable[Column]) -> str:
    """The name of the column that a user means: its name, or what the screen shows above it, unit or not.

    Other text is returned as it is.

    >>> from pt2qa.report import LayerRow
    >>> [column_called(text, columns_of(LayerRow)) for text in ("isolated dB", "Isolated", "sqnr", "worst")]
    ['isolated_sqnr', 'isolated_sqnr', 'sqnr', 'worst']
    """
    spelled = [((each.name, each.title, each.header.partition("\n")[0]), each.name) for each in columns]
    plain = " ".join(text.split()).casefold()
    return next((name for way in range(3) for ways, name in spelled if ways[way].casefold() == plain), text)


@cached
def descriptions(row_type: type[Any]) -> dict[str, str]:
    """What the columns of a row class mean, from the ``Args`` of its docstring.

    >>> from pt2qa.report import WeightRow
    >>> descriptions(WeightRow)["dead_channels"]
    'number of channels that are non-zero in float but all zeros when quantized.'
    """
    said = inspect.cleandoc(row_type.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", said):
        names, _, text = entry.replace("``", "").partition(": ")
        # "As above" tells nothing here.
        if text and not text.startswith("as "):
            found.update(dict.fromkeys(names.strip().split(", "), " ".join(text.split())))
    return found


def since(each: Field[Any], hint: Any) -> int:
    """The schema that introduced a field, which :func:`column` put in its type hint."""
    first: int = _said(hint).get("since", 1)
    if first > 1 and each.default is MISSING and each.default_factory is MISSING:
        raise TypeError(f"{each.name}: a field since schema {first} needs a default")
    return first


def takes_custom(row_type: type[Any]) -> bool:
    return any(f.name == CUSTOM for f in fields(row_type))


def custom_names(rows: Iterable[Any]) -> tuple[str, ...]:
    """The names of the user's metrics, from the first row, since a report has one set of them."""
    for row in rows:
        return tuple(row.custom) if takes_custom(type(row)) else ()
    return ()


def custom_column(name: str) -> Column:
    """A column for a user's metric; pt2qa's own secondary columns are dropped before it."""
    return Column(name, header=shorten(clean(name), LONGEST_HEADER), worse="", importance=9)


def check_custom(row_type: type[Any], rows: Sequence[Any]) -> None:
    """Check that all rows have the same metrics, under names that no column has."""
    names = set(custom_names(rows))
    for row in rows:
        if set(row.custom) != names:
            different = ", ".join(sorted(names ^ set(row.custom)))
            raise ReportError(
                f"row {row.name!r}: custom metrics differ from those of row {rows[0].name!r} ({different}); "
                "give every row of a report the same metrics, nan where one is not defined"
            )
    if taken := sorted(names & {each.name for each in columns_of(row_type)}):
        raise ReportError(f"custom metric {taken[0]!r}: a column of that name exists; give the metric another name")


def to_columns(row_type: type[AnyRow], rows: Sequence[AnyRow]) -> dict[str, list[Any]]:
    """Rows as one list of cells per column; the user's metrics come last as ``custom/<name>``.

    >>> from pt2qa._report.rows import Unpaired
    >>> to_columns(Unpaired, [Unpaired(3, "relu", "quantized", "no handle")])["name"]
    ['relu']
    """
    table = {each.name: [getattr(row, each.name) for row in rows] for each in columns_of(row_type)}
    custom = {f"{CUSTOM}/{name}": [getattr(row, CUSTOM)[name] for row in rows] for name in custom_names(rows)}
    return table | custom


def from_columns(row_type: type[AnyRow], table: Mapping[str, Sequence[Any]]) -> tuple[AnyRow, ...]:
    """The inverse of :func:`to_columns`.  All columns must have equal length; a missing one takes its default."""
    plain = [each.name for each in columns_of(row_type) if each.name in table]
    earlier = {each.name: each.earlier for each in columns_of(row_type) if each.name not in table and each.earlier}
    custom = [name.removeprefix(f"{CUSTOM}/") for name in table if name.startswith(f"{CUSTOM}/")]
    rows = []
    for cells in zip(*(table[name] for name in plain), *(table[f"{CUSTOM}/{name}"] for name in custom), strict=True):
        values: dict[str, Any] = dict(zip(plain, cells, strict=False))
        values |= {name: cell_of(values) for name, cell_of in earlier.items()}
        if takes_custom(row_type):
            values[CUSTOM] = dict(zip(custom, cells[len(plain) :], strict=True))
        rows.append(row_type(**values))
    return tuple(rows)


def cell(row: Any, name: str) -> Any:
    """One cell by column name, the user's metrics by their own names."""
    custom = getattr(row, CUSTOM, {})
    return custom[name] if name in custom else getattr(row, name)


def _column(owner: type[Any], each: Field[Any], hint: Any) -> Column:
    since(each, hint)
    said = _said(hint)
    hint = get_args(hint)[0] if said else hint
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if not choices and hint not in _TYPES:
        raise TypeError(
            f"{owner.__name__}.{each.name}: a column cannot hold {hint}; it holds {', '.join(map(str, _TYPES))}"
        )
    return replace(_described(each.name, "text" if choices else _TYPES[hint], said), choices=choices)


def _said(hint: Any) -> Mapping[str, Any]:
    """The description that :func:`column` put in a type hint."""
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, dict)), {})


def number_of(name: str, hint: Any) -> Column:
    """A number that is no column of a table, with the limits that :func:`column` puts in its type hint."""
    return Column(name, "int" if get_args(hint)[0] is int else "float", **_said(hint))


def _described(name: str, kind: str, description: Mapping[str, Any]) -> Column:
    """A column, with defaults from its type and unit."""
    cells: CellType = "text" if kind == "str" else kind  # type: ignore[assignment]
    implied: dict[str, Any] = {"show": _SHOW[cells], "header": shorten(name, LONGEST_HEADER)}
    if description.get("unit") == "dB":
        implied = {"show": decibel, "worse": "smaller", "header": f"{implied['header']}\ndB"}
    return Column(name, cells, **{**implied, **description})


_ORDINAL: Final = re.compile(r"(_\d+)?(:\w+)?$| \(.*\)$")
"""What distinguishes ops of one kind: a name's ordinal, the part of a decomposed op, a node without a handle."""


class Row:
    """A row of a report: equal to another if all fields are, where NaN equals NaN.

    Fields of a dataclass are compared with ``==``; before Python 3.13, one and the same NaN was equal to itself.

    >>> from pt2qa.report import StageRow
    >>> StageRow("eager", float("nan"), 40.0) == StageRow("eager", float("nan"), 40.0)
    True
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_compared(self))


def _compared(value: Any) -> Any:
    """A value in which NaN is something that equals itself."""
    if isinstance(value, Row):
        return tuple(_compared(getattr(value, each.name)) for each in fields(value))  # type: ignore[arg-type]
    if isinstance(value, dict):
        return tuple((name, _compared(each)) for name, each in sorted(value.items()))
    return "nan" if isinstance(value, float) and value != value else value


@dataclass(frozen=True, slots=True)
class Environment:
    """Origin of a report: package versions as pip reports them, and the model's fingerprint.

    Args:
        torch, torchao, executorch, pt2qa: versions, or ``"not installed"``.
        fingerprint: identifies the float model (its graph and parameters); empty if nothing was fingerprinted.

    >>> Environment.here("3f2a").fingerprint
    '3f2a'
    """

    torch: str
    torchao: str
    executorch: str
    pt2qa: str
    fingerprint: str

    @classmethod
    def here(cls, fingerprint: str) -> Environment:
        """The installed versions, read from package metadata: nothing is imported."""
        return cls(installed("torch"), installed("torchao"), installed("executorch"), __version__, fingerprint)


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A node of one graph that has no partner in the other, and why.

    Args:
        handle: the node's handle; -1 if it has none.
        name: readable, e.g. ``layer1.0.bn1/batch_norm``.
        side: the graph it is in; ``a`` or ``b`` where :func:`pt2qa.compare_graphs` compared two.
        reason: why it has no partner, e.g. ``folded into layer1.0.conv1``.
    """

    handle: int
    name: Annotated[str, column(key=True)]
    side: Literal["reference", "quantized", "deployed", "a", "b"]
    reason: str


def installed(package: str) -> str:
    """The installed version of a package, which is not imported, or ``"not installed"``."""
    # Imported here because importlib.metadata pulls in email and zipfile, which reading a report does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def unpaired_entries(unpaired: Sequence[Unpaired]) -> list[str]:
    """One line for each node without a partner; in a long list, one for each kind of op and side.

    >>> checks = [Unpaired(n, f"layer.{n}/_assert_{n}", "reference", "nothing reads it") for n in range(6)]
    >>> unpaired_entries(checks)
    ['6 _assert (reference), such as layer.0/_assert_0: nothing reads it']
    """
    groups: dict[tuple[str, str], list[Unpaired]] = {}
    for place, each in enumerate(unpaired):
        kind = _ORDINAL.sub("", each.name.rpartition("/")[2]) if len(unpaired) > LISTED else str(place)
        groups.setdefault((kind, each.side), []).append(each)
    entries = []
    for (kind, side), (first, *others) in groups.items():
        what = f"{1 + len(others)} {kind} ({side}), such as {first.name}" if others else f"{first.name} ({side})"
        entries.append(f"{what}: {first.reason or 'no reason given'}")
    return entries
