"""Report files: one safetensors file each, versioned, written atomically, read with every field checked.

The header names the kind of report, the version of that kind's fields (the schema), the pt2qa version that wrote it,
and a checksum of the contents: a file that loads is as it was written.  Reading unpickles nothing.
A new kind of report is a frozen dataclass under :func:`register`; how its fields are stored follows from their types:

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
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from pt2qa import __version__
from pt2qa._report.atomic import write_atomic
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


ReportType = TypeVar("ReportType", bound=type[Any])

KIND: Final = "pt2qa.kind"
SCHEMA: Final = "pt2qa.schema"
VERSION: Final = "pt2qa.version"
CHECKSUM: Final = "pt2qa.checksum"


_KINDS: dict[str, type[Any]] = {}
"""The classes of reports by kind."""


def register(
    name: str, *, schema: int, oldest: int | None = None, since: Mapping[str, int] | None = None
) -> Callable[[ReportType], ReportType]:
    """Class decorator: lets reports of this class be saved under this kind and schema version.

    A field added later is ``column(default=..., since=schema)``; with ``oldest``, older files still load and take the
    default.

    Args:
        name: the kind.
        schema: the version of the fields that is written.
        oldest: the oldest version that is read; None for ``schema`` only.
        since: the schemas that introduced fields which the class inherits; None if its base says so.

    Raises:
        TypeError: a field of the class cannot be stored.
        ValueError: the kind is taken by another class.
    """

    def enter(report_type: ReportType) -> ReportType:
        if since is not None:
            report_type.inherited_since = since
        codecs_of(report_type)
        taken = _KINDS.get(name, report_type)
        # The same class is registered again when a notebook reloads its module.
        if _full_name(taken) != _full_name(report_type):
            raise ValueError(f"report kind {name!r} is taken by {_full_name(taken)}")
        _KINDS[name] = report_type
        report_type.kind, report_type.schema = name, schema
        report_type.oldest = schema if oldest is None else oldest
        if not hasattr(report_type, "heading"):
            report_type.heading = name.replace("-", " ").capitalize()
        return report_type

    return enter


def save(report: Any, path: str | os.PathLike[str]) -> None:
    """Write a report to one ``.safetensors`` file.  An existing file stays until the new one is complete.

    Args:
        report: of a class that is registered.
        path: the file.

    Raises:
        ReportError: the folder does not exist, or the disk refuses.
        TypeError: the class is not registered.

    >>> import tempfile
    >>> from pt2qa.report import Environment, WeightReport, load
    >>> report = WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=Environment.here(""))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(report, f"{folder}/weights.safetensors")
    ...     load(f"{folder}/weights.safetensors").model
    'Net'
    """
    # Imported here, as in load: a report that is only shown needs no file format.
    from safetensors.numpy import save as to_bytes

    kind = kind_of(report)
    tensors, text = encode(report)
    text = {KIND: kind.kind, SCHEMA: str(kind.schema), VERSION: __version__, **text}
    write_atomic(path, to_bytes(tensors, {**text, CHECKSUM: checksum(tensors, text)}))


def checksum(tensors: Mapping[str, Array], text: Mapping[str, str]) -> str:
    """SHA-256 of a file's contents, independent of order: names, texts, types, shapes and bytes."""
    digest = sha256()
    for name, value in sorted(text.items()):
        if name != CHECKSUM:
            _digest(digest, name.encode("utf-8", "surrogatepass"), value.encode("utf-8", "surrogatepass"))
    for name, array in sorted(tensors.items()):
        _digest(digest, name.encode("utf-8", "surrogatepass"), f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _digest(digest: Any, *parts: bytes) -> None:
    # The length prefix keeps adjacent parts distinct.
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)


def read(path: str | os.PathLike[str]) -> Any:
    """What :func:`pt2qa.load` does, for kinds whose modules have been imported."""
    kind, source = _read(Path(path))
    report = decode(kind, source)
    # Last, since an error that names the damaged field is more helpful.
    if source.text.get(CHECKSUM, "") not in ("", checksum(source.tensors, source.text)):
        raise source.error(CHECKSUM, "does not match the contents of the file")
    return report


def _full_name(report_type: type[Any]) -> str:
    return f"{report_type.__module__}.{report_type.__qualname__}"


def kinds() -> tuple[type[Any], ...]:
    return tuple(_KINDS.values())


def kind_of(report: Any) -> type[Any]:
    """The class of a report, which can be saved."""
    if not is_dataclass(report):
        raise ReportError(f"got {type(report).__name__}, expected a report; pt2qa.load(path) reads one from its file")
    if type(report) not in _KINDS.values():
        raise TypeError(f"{type(report).__name__} is not a registered kind of report; decorate it with register()")
    return type(report)


def _read(path: Path) -> tuple[type[Any], Source]:
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.safetensors"))[:3]
        found = f"such as {', '.join(inside)}" if inside else "but it holds no .safetensors file"
        raise ReportError(f"{path}: is a folder; give one report in it, {found}")
    if not path.exists():
        raise ReportError(f"{path}: no such file; give a file that report.save() wrote")
    try:
        with safe_open(path, framework="np") as file:
            source = Source(path, {}, dict(file.metadata() or {}))
            # The kind is read first: a foreign file may hold gigabytes of weights, in types that NumPy lacks.
            kind = _kind_in(source)
            for name in file.keys():  # noqa: SIM118 - safe_open is not a dict
                source.tensors[name] = _tensor(file, source, name)
            return kind, source
    except SafetensorError as error:
        raise ReportError(
            f"{path}: not a report file, or damaged: its safetensors header is invalid ({error})"
        ) from error
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from error


def _tensor(file: Any, source: Source, name: str) -> Array:
    try:
        tensor: Array = file.get_tensor(name)
    except (TypeError, ValueError, AttributeError) as error:  # a type that NumPy does not have, such as bfloat16
        raise source.error(name, f"cannot be read ({error})") from error
    return tensor


def _kind_in(source: Source) -> type[Any]:
    for name in (KIND, SCHEMA, VERSION):
        if name not in source.text:
            raise ReportError(f"{source.path}: a safetensors file, but not a pt2qa report: it has no field {name!r}")
    source.used.update((KIND, SCHEMA, VERSION, CHECKSUM))
    name, schema = source.text[KIND], source.text[SCHEMA]
    if name not in _KINDS:
        raise _unreadable(source, KIND, repr(name), f"knows {', '.join(sorted(_KINDS))}; update pt2qa")
    kind = _KINDS[name]
    if not schema.isdecimal() or not schema.isascii() or len(schema) > 9 or int(schema) < 1:
        raise source.error(SCHEMA, f"says {schema!r:.60}, expected a whole number from 1")
    source.schema = int(schema)
    if source.schema > kind.schema:
        raise _unreadable(source, SCHEMA, schema, f"reads up to {kind.schema}; update pt2qa")
    if source.schema < kind.oldest:
        reads = f"{kind.oldest} to {kind.schema}" if kind.oldest < kind.schema else kind.schema
        raise _unreadable(source, SCHEMA, schema, f"reads {reads}; analyse the model again")
    return kind


def _unreadable(source: Source, field: str, says: str, reads: str) -> ReportError:
    return ReportError(
        f"{source.path}: field {field!r} says {says}, written by pt2qa {source.text[VERSION]}; "
        f"this is pt2qa {__version__}, which {reads}"
    )
