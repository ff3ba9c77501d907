"""The accumulators behind a report's numbers, kept in its file so that reports of parts of the data can be merged.

An accumulator is a frozen dataclass or a NamedTuple of numbers, arrays, text and further accumulators.  Those of all
rows are packed side by side, one array for each number, by its path: ``counted/sums/noise``.  Text is UTF-8 JSON in an
array of bytes.  Nothing about classes is stored: to unpack, one gives the empty accumulator.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from pt2qa._report.rows import Column, number_of
from pt2qa.errors import ReportError

Array = npt.NDArray[Any]
Sums = dict[str, Array]
"""What a report keeps: arrays by group and path, and its settings."""

State = TypeVar("State")
Mergeables = TypeVar("Mergeables", bound="Mergeable")


class Mergeable:
    """A dataclass of sums over parts of the data: ``a.merge(b)`` is that of both, of which ``b`` is later.

    A field adds up, unless its metadata say how else: the ways are below.
    """

    __slots__ = ()

    def merge(self: Mergeables, other: Mergeables) -> Mergeables:
        ways = _ways(type(self))  # type: ignore[arg-type]  # a class is hashable
        return type(self)(*[how(getattr(self, name), getattr(other, name)) for name, how in ways])


@cache
def _ways(sums: Any) -> list[tuple[str, Callable[[Any, Any], Any]]]:
    return [(each.name, each.metadata.get("merge", operator.add)) for each in fields(sums)]


def _merged(one: Any, other: Any) -> Any:
    return one.merge(other) if one is not None and other is not None else one or other


def merged_each(one: Any, other: Any) -> Any:
    """Both tuples, item by item, or both dicts, by name."""
    if isinstance(one, tuple):
        return tuple(map(_merged, one, other))
    return {**one, **other, **{name: _merged(one[name], other[name]) for name in one if name in other}}


SMALLEST: Final = {"merge": min}
LARGEST: Final = {"merge": max}
FIRST: Final = {"merge": lambda one, other: other if one in ("", None) else one}
"""The first that is not empty, and what is the same in all parts."""
MERGED: Final = {"merge": _merged}
"""By its own ``merge``; None is nothing."""
EACH: Final = {"merge": merged_each}
"""Each of a tuple, or of a dict by name, by its own ``merge``."""

SETTINGS: Final = "settings"
QUANTIZATION: Final = "quantization (scales, zero points, ranges)"
"""The setting that identifies a pair's quantization."""


def pack(settings: Mapping[str, str], **groups: Sequence[Any]) -> Sums:
    """Accumulators by group, those of one group all of one class, and the settings that a merge compares.

    >>> from pt2qa._report.rows import Unpaired
    >>> sums = pack({"isolated": "True"}, rows=[Unpaired(3, "relu", "a", "lost"), Unpaired(5, "add", "a", "lost")])
    >>> sums["rows/handle"].tolist(), unpack(sums, "rows", Unpaired(0, "", "a", ""))[1].name, settings_of(sums)
    ([3, 5], 'add', {'isolated': 'True'})
    """
    packed = {SETTINGS: _as_bytes(dict(settings))}
    for group, states in groups.items():
        packed |= {path: _column(path, values) for path, values in _columns(group, states)}
    return packed


def unpack(sums: Sums, group: str, empty: State) -> list[State]:
    """The accumulators of a group, each built like the empty one."""
    if not any(path.startswith(f"{group}/") for path in sums):
        return []
    columns = {path: _cells(sums, path, like) for path, (like,) in _columns(group, [empty])}
    for path, column in _limits(group, empty):
        if not all(map(column.allows, columns[path])):
            raise _damaged(f"{path!r} holds other numbers than {column.limits}")
    if len({len(cells) for cells in columns.values()}) != 1:
        raise _damaged(f"arrays of different length in {group!r}")
    count = len(next(iter(columns.values())))
    return [_like(empty, group, lambda path, row=row: columns[path][row]) for row in range(count)]  # type: ignore[misc]


def settings_of(sums: Sums) -> dict[str, str]:
    found: dict[str, str] = _from_bytes(sums, SETTINGS, dict)
    return found


def why_not(state: Any) -> str:
    """Why an accumulator cannot be packed, or empty."""
    if not _children(state):
        return f"{type(state).__name__} is neither a NamedTuple nor a dataclass"
    try:
        pack({}, state=[state])
    except TypeError as error:
        return str(error)
    return ""


def _children(value: Any) -> dict[str, Any]:
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return value if isinstance(value, dict) else {}


def _columns(path: str, states: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """The values of all accumulators, of one class, side by side."""
    if not states:
        return
    children = _children(states[0])
    for name in children:
        by_key = isinstance(states[0], dict)
        yield from _columns(f"{path}/{name}", [each[name] if by_key else getattr(each, name) for each in states])
    if not children and not isinstance(states[0], dict):
        yield path, states


def _limits(path: str, empty: Any) -> Iterator[tuple[str, Column]]:
    """The numbers of an accumulator whose class says what they may be."""
    children = _children(empty)
    hints = get_type_hints(type(empty), include_extras=True) if children and not isinstance(empty, dict) else {}
    for name, child in children.items():
        if get_origin(hints.get(name)) is Annotated:
            yield f"{path}/{name}", number_of(name, hints[name])
        else:
            yield from _limits(f"{path}/{name}", child)


def _column(path: str, values: Sequence[Any]) -> Array:
    kinds = set(map(type, values))
    for types, dtype in (((bool,), np.bool_), ((int, np.integer), np.int64), ((int, float), np.float64)):
        if all(issubclass(kind, types) for kind in kinds):
            return np.array(values, dtype)
    if all(map(_is_array, values)):
        arrays = [value.detach().cpu().numpy() if hasattr(value, "detach") else value for value in values]
        if len({each.shape for each in arrays}) == 1:
            return np.stack(arrays)
    if all(value is None or isinstance(value, (str, tuple)) for value in values):
        return _as_bytes(list(values))
    raise TypeError(
        f"{path.rpartition('/')[2]} is of type {type(values[0]).__name__}, expected numbers or arrays of one shape"
    )


def _cells(sums: Sums, path: str, like: Any) -> Sequence[Any]:
    """The cells of a column, for an accumulator whose empty one holds ``like`` there."""
    if path not in sums:
        raise _damaged(f"no array {path!r}")
    array = sums[path]
    if like is None or isinstance(like, (str, tuple)):
        return [tuple(cell) if isinstance(cell, list) else cell for cell in _from_bytes(sums, path, list)]
    if _is_array(like):
        if array.shape[1:] != tuple(like.shape):
            raise _damaged(f"{path!r} holds arrays of shape {array.shape[1:]}, expected {tuple(like.shape)}")
        return list(array if isinstance(like, np.ndarray) else _as_tensor(array))
    if array.ndim != 1 or array.dtype.kind not in "bif":
        raise _damaged(f"{path!r} holds {array.dtype} of shape {array.shape}, expected one column of numbers")
    numbers: list[Any] = array.tolist()
    return numbers


def _as_tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(array.copy())


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _like(empty: Any, path: str, cell: Callable[[str], Any]) -> Any:
    """An accumulator built like the empty one, from cells by path."""
    children = _children(empty)
    built = {name: _like(child, f"{path}/{name}", cell) for name, child in children.items()}
    if is_dataclass(empty) and not isinstance(empty, type):
        return replace(empty, **built)
    if isinstance(empty, dict):
        return built
    return type(empty)(**built) if children else cell(path)


def _as_bytes(value: Any) -> Array:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_bytes(sums: Sums, path: str, kind: type[Any]) -> Any:
    try:
        found = json.loads(sums[path].tobytes())
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(f"no text in {path!r}") from error
    if not isinstance(found, kind):
        raise _damaged(f"{path!r} holds {type(found).__name__}, expected a {kind.__name__}")
    return found


def _damaged(problem: str) -> ReportError:
    return ReportError(f"the sums of a report do not fit its kind: {problem}. Make the report again.")
