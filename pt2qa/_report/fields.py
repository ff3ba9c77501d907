"""A report's fields as tensors and JSON text, and back, with every field checked.

A field's encoding follows from its type, so a new report type needs no code here:

=======================  ===========================================================================
field type               in the file
=======================  ===========================================================================
``str``, ``int``,        JSON text under the field's name
``float``
``tuple[str, ...]``      a JSON list; a note with a kind is ``{"kind": ..., "text": ...}``
a dataclass of ``str``   a JSON object
``tuple[Row, ...]``      a table: numbers as tensors ``rows/sqnr`` (float64, int64, bool), text, shapes and names
                         as JSON lists ``rows/name``, the names of custom metrics as ``rows/custom``
``dict[str, ndarray]``   one tensor per entry, ``inputs/<key>``, the keys in order as a JSON list
=======================  ===========================================================================

A field, column or record entry that the file's schema lacks takes its default (``since`` of
:class:`pt2qa._report.rows.Column`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from pt2qa._report.notes import KINDS, Note
from pt2qa._report.rows import (
    CUSTOM,
    Column,
    cached,
    columns_of,
    custom_names,
    fields_of,
    from_columns,
    numbers_of,
    since,
    takes_custom,
    to_columns,
)
from pt2qa._report.sums import Array
from pt2qa.errors import ReportError

Value = TypeVar("Value")

ARRAYS: Final = (np.ndarray, npt.NDArray)
"""The origins of ``NDArray[...]``: that of its value, or, with numpy 2.5 and later, the alias itself."""

_DTYPES = {"int": np.dtype(np.int64), "float": np.dtype(np.float64), "bool": np.dtype(np.bool_)}


@dataclass(slots=True)
class Source:
    """The contents of a file, tensors and JSON text by name, read field by field; tracks which entries were read.

    ``path`` is for error messages, ``schema`` the version of the fields.
    """

    path: Path
    tensors: dict[str, Array]
    text: dict[str, str]
    schema: int = 1
    used: set[str] = field(default_factory=set)

    def error(self, name: str, problem: str) -> ReportError:
        """The one error of a damaged file: which file, which field, what is wrong, what to do."""
        return ReportError(f"{self.path}: field {name!r} {problem}; the file is damaged, save the report again")

    def array(self, name: str) -> Array:
        """A tensor by name; an error if there is none."""
        self.used.add(name)
        if name not in self.tensors:
            raise self.error(name, "is missing")
        return self.tensors[name]

    def json(self, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        """Parsed JSON text by name; an error if it is missing, broken, or not what was expected."""
        self.used.add(name)
        if name not in self.text:
            raise self.error(name, "is missing")
        try:
            value = json.loads(self.text[name])
        except (ValueError, RecursionError) as error:
            raise self.error(name, f"is not valid JSON ({error})") from error
        if not fits(value):
            raise self.error(name, f"holds {_brief(value)}, expected {expected}")
        return value

    def finish(self) -> None:
        """An error if the file has entries that were not read: such a file does not match its header."""
        for name in sorted((self.tensors.keys() | self.text.keys()) - self.used):
            raise self.error(name, "is not a field of this kind of report")


@dataclass(frozen=True, slots=True)
class Codec:
    """How a field is written, as arrays and JSON values by name, and read, and the schema that introduced it."""

    write: Callable[[str, Any], dict[str, Any]]
    read: Callable[[str, Source], Any]
    since: int = 1


def encode(report: Any) -> tuple[dict[str, Array], dict[str, str]]:
    """A report's fields as tensors and JSON text."""
    parts: dict[str, Any] = {}
    for name, codec in codecs_of(type(report)).items():
        parts |= codec.write(name, getattr(report, name))
    tensors = {name: part for name, part in parts.items() if isinstance(part, np.ndarray)}
    return tensors, {name: json.dumps(part) for name, part in parts.items() if name not in tensors}


def decode(report_type: type[Value], source: Source) -> Value:
    """The inverse of :func:`encode`."""
    known = codecs_of(report_type).items()
    values = {name: codec.read(name, source) for name, codec in known if codec.since <= source.schema}
    source.finish()
    try:
        return report_type(**values)
    except ReportError as error:
        raise ReportError(f"{source.path}: {error}") from error


@cached
def codecs_of(report_type: type[Any]) -> dict[str, Codec]:
    """How each field of a report class is stored."""
    plain, hints = get_type_hints(report_type), get_type_hints(report_type, include_extras=True)
    numbers = {each.name: each for each in numbers_of(report_type)}
    inherited = getattr(report_type, "inherited_since", {})
    found = {}
    for f in fields_of(report_type):
        codec = _codec_of(f"{report_type.__name__}.{f.name}", plain[f.name], numbers.get(f.name))
        found[f.name] = replace(codec, since=inherited.get(f.name, since(f, hints[f.name])))
    return found


def _codec_of(where: str, hint: Any, number: Column | None) -> Codec:
    if number is not None:
        return Codec(_write_value, partial(_read_number, number))
    if hint is str:
        return Codec(_write_value, lambda name, source: source.json(name, "text", _is_text))
    if hint == tuple[str, ...]:
        return Codec(_write_texts, _read_texts)
    if get_origin(hint) is tuple and is_dataclass(row_type := get_args(hint)[0]) and isinstance(row_type, type):
        return Codec(partial(_write_rows, row_type), partial(_read_rows, row_type))
    if get_origin(hint) is dict and get_args(hint)[0] is str and get_origin(get_args(hint)[1]) in ARRAYS:
        return Codec(_write_arrays, _read_arrays)
    if is_dataclass(hint) and set(get_type_hints(hint).values()) == {str}:
        return Codec(lambda name, record: {name: asdict(record)}, partial(_read_record, hint))
    raise TypeError(f"{where}: a report file cannot hold {hint}")


def _write_value(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def _write_texts(name: str, value: Any) -> dict[str, Any]:
    return {name: [{"kind": n.kind, "text": n} if isinstance(n, Note) else n for n in value]}


def _read_texts(name: str, source: Source) -> tuple[str, ...]:
    found = source.json(name, "a list of texts", _list_of(_is_note))
    return tuple(note if isinstance(note, str) else Note(note["text"], note["kind"]) for note in found)


def _read_number(column: Column, name: str, source: Source) -> Any:
    expected, fits = ("a whole number", _is_int) if column.type == "int" else ("a number", _is_float)
    number = source.json(name, expected, fits)
    if not column.allows(number):
        raise source.error(name, f"holds {number}, expected {column.limits}")
    return number


def _read_record(record: Any, name: str, source: Source) -> Any:
    hints = get_type_hints(record, include_extras=True)
    names = [f.name for f in fields(record) if since(f, hints[f.name]) <= source.schema]

    def fits(value: Any) -> bool:
        return isinstance(value, dict) and set(value) == set(names) and _is_texts(list(value.values()))

    return record(**source.json(name, f"texts named {', '.join(names)}", fits))


def _write_arrays(name: str, value: dict[str, Array]) -> dict[str, Any]:
    # safetensors writes the raw bytes at the array's pointer, so the array must be contiguous.
    arrays = {_spelled(f"{name}/{key}"): np.require(array, requirements="C") for key, array in value.items()}
    return {name: list(value), **arrays}


def _read_arrays(name: str, source: Source) -> dict[str, Array]:
    keys = source.json(name, "a list of different texts", _is_names)
    return {key: source.array(_spelled(f"{name}/{key}")) for key in keys}


def _write_rows(row_type: Any, name: str, rows: Any) -> dict[str, Any]:
    table = to_columns(row_type, rows)
    parts: dict[str, Any] = {}
    if takes_custom(row_type):
        parts[f"{name}/{CUSTOM}"] = names = custom_names(rows)
        for metric in names:
            key = _spelled(f"{name}/{CUSTOM}/{metric}")
            if key in parts:
                raise ReportError(f"custom metric {metric!r}: another metric has the same name in a file; rename it")
            parts[key] = np.array(table[f"{CUSTOM}/{metric}"], np.float64)
    for column in columns_of(row_type):
        dtype, cells = _DTYPES.get(column.type), table[column.name]
        parts[f"{name}/{column.name}"] = cells if dtype is None else np.array(cells, dtype)
    return parts


def _read_rows(row_type: Any, name: str, source: Source) -> tuple[Any, ...]:
    known = [column for column in columns_of(row_type) if column.since <= source.schema]
    table = {column.name: _read_cells(name, column, source) for column in known}
    if takes_custom(row_type):
        for metric in source.json(f"{name}/{CUSTOM}", "a list of different texts", _is_names):
            key = f"{CUSTOM}/{metric}"
            table[key] = _read_cells(name, Column(key, "float"), source)
    (first, cells), *others = table.items()
    for other, values in others:
        if len(values) != len(cells):
            got = f"holds {len(values)} values, but {f'{name}/{first}'!r} holds {len(cells)}"
            raise source.error(f"{name}/{other}", got)
    try:
        return from_columns(row_type, table)
    except ReportError as error:
        raise source.error(name, f"holds an invalid row ({error})") from error


def _spelled(name: str) -> str:
    """The name of a tensor as stored in a file: UTF-8 has no lone surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()


def _read_cells(name: str, column: Column, source: Source) -> list[Any]:
    key = _spelled(f"{name}/{column.name}")
    if column.type == "text":
        choices = set(column.choices)
        expected = f"a list of {' or '.join(column.choices) or 'texts'}"
        return list(source.json(key, expected, lambda v: _is_texts(v) and (not choices or choices.issuperset(v))))
    if column.type == "shape":
        return [tuple(shape) for shape in source.json(key, "a list of shapes", _list_of(_is_shape))]
    if column.type == "names":
        # Until a column had names, it had them as one text.
        found = source.json(key, "lists of texts", _list_of(lambda cell: _is_text(cell) or _is_texts(cell)))
        return [tuple(filter(None, cell.split(", ")) if isinstance(cell, str) else cell) for cell in found]
    array = source.array(key)
    if array.dtype != _DTYPES[column.type] or array.ndim != 1:
        got = f"holds {array.dtype} of shape {array.shape}"
        raise source.error(key, f"{got}, expected one column of {_DTYPES[column.type]}")
    numbers: list[Any] = array.tolist()
    if outside := [number for number in numbers if not column.allows(number)]:
        raise source.error(key, f"holds {outside[0]}, expected {column.limits}")
    return numbers


def _is_int(value: Any) -> bool:
    # An integer too large for a float cannot be compared with a limit either.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


_is_texts = _list_of(_is_text)
_is_shape = _list_of(lambda size: _is_int(size) and size >= 0)


def _is_note(value: Any) -> bool:
    is_fact = isinstance(value, dict) and value.keys() == {"kind", "text"} and _is_texts([*value.values()])
    return value["kind"] in KINDS if is_fact else _is_text(value)


def _is_names(value: Any) -> bool:
    return _is_texts(value) and len(set(value)) == len(value)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
