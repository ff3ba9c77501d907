"""Report files: one safetensors file each, versioned, written whole or not at all, read with every field checked.

The header names the kind of report, the version of that kind's fields (the schema), and the pt2qa that wrote it.
Reading unpickles nothing.  A new kind of report is a frozen dataclass under :func:`register`; how its fields are stored
follows from their types (:mod:`pt2qa.report.fields`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pt2qa import __version__
from pt2qa.errors import ReportError
from pt2qa.report.base import Report
from pt2qa.report.fields import Array, Source, codecs_of, decode, encode

ReportType = TypeVar("ReportType", bound=Report)

KIND: Final = "pt2qa.kind"
SCHEMA: Final = "pt2qa.schema"
VERSION: Final = "pt2qa.version"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of report that files can hold.

    Args:
        name: what the file's header says, e.g. ``layers``.
        schema: version of its fields; raised whenever a field is added, dropped or changes its meaning.
        report_type: the class of its reports.
    """

    name: str
    schema: int
    report_type: type[Report]


_KINDS: dict[str, Kind] = {}


def register(name: str, *, schema: int) -> Callable[[type[ReportType]], type[ReportType]]:
    """Class decorator: files may hold reports of this class, under this kind and schema version.

    Raises:
        TypeError: a field of the class cannot be stored.
        ValueError: the kind is taken by another class.
    """

    def enter(report_type: type[ReportType]) -> type[ReportType]:
        codecs_of(report_type)
        taken = _KINDS.get(name)
        # The same class comes again when a notebook reloads its module.
        if taken is not None and _full_name(taken.report_type) != _full_name(report_type):
            raise ValueError(f"report kind {name!r} is taken by {_full_name(taken.report_type)}")
        _KINDS[name] = Kind(name, schema, report_type)
        return report_type

    return enter


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report to one ``.safetensors`` file.  The old file, if there is one, stays until the new one is whole.

    Raises:
        ReportError: the folder does not exist, or the disk refuses.
        TypeError: the class is not registered.
    """
    # Imported here, as in load: a report that is only shown needs no file format.
    from safetensors.numpy import save as to_bytes

    from pt2qa.report.atomic import write_atomic

    kind = kind_of(report)
    tensors, text = encode(report)
    header = {KIND: kind.name, SCHEMA: str(kind.schema), VERSION: __version__}
    write_atomic(path, to_bytes(tensors, {**header, **text}))


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report of whatever kind the file holds.

    Raises:
        ReportError: there is no such file, it is not a report, it is damaged, or a newer pt2qa wrote it.  The text
            names the file and the field.

    >>> load("no-such-report.safetensors")
    Traceback (most recent call last):
    pt2qa.errors.ReportError: no-such-report.safetensors: no such file; give a file that report.save() wrote
    """
    kind, source = _read(Path(path))
    return decode(kind.report_type, source)


def _full_name(report_type: type[Report]) -> str:
    return f"{report_type.__module__}.{report_type.__qualname__}"


def kind_of(report: Report) -> Kind:
    """The kind that a report is of.

    Raises:
        ReportError: it is no report.
        TypeError: its class is not registered.
    """
    if not isinstance(report, Report):
        raise ReportError(f"got a {type(report).__name__}, expected a report; pt2qa.load(path) reads one from its file")
    for kind in _KINDS.values():
        if kind.report_type is type(report):
            return kind
    raise TypeError(f"{type(report).__name__} is not a registered kind of report; decorate it with register()")


def _read(path: Path) -> tuple[Kind, Source]:
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
            # The kind comes first: a foreign file may hold gigabytes of weights, in types that NumPy lacks.
            kind = _kind_in(source)
            for name in file.keys():  # noqa: SIM118 - safe_open is no dict
                source.tensors[name] = _tensor(file, source, name)
            return kind, source
    except SafetensorError as error:
        raise ReportError(f"{path}: damaged, or not a report file: its safetensors header fails ({error})") from error
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from error


def _tensor(file: Any, source: Source, name: str) -> Array:
    try:
        tensor: Array = file.get_tensor(name)
    except (TypeError, ValueError, AttributeError) as error:  # a type that NumPy does not have, such as bfloat16
        raise source.error(name, f"cannot be read ({error})") from error
    return tensor


def _kind_in(source: Source) -> Kind:
    for name in (KIND, SCHEMA, VERSION):
        if name not in source.text:
            raise ReportError(f"{source.path}: a safetensors file, but not a pt2qa report: it has no field {name!r}")
    source.used.update((KIND, SCHEMA, VERSION))
    name, schema, version = source.text[KIND], source.text[SCHEMA], source.text[VERSION]
    if name not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ReportError(
            f"{source.path}: field {KIND!r} says {name!r}, written by pt2qa {version}; "
            f"this is pt2qa {__version__}, which knows {known}; update pt2qa"
        )
    kind = _KINDS[name]
    if not schema.isdecimal() or not schema.isascii() or int(schema) < 1:
        raise source.error(SCHEMA, f"says {schema!r}, expected a whole number from 1")
    if int(schema) > kind.schema:
        raise ReportError(
            f"{source.path}: field {SCHEMA!r} says {schema}, written by pt2qa {version}; "
            f"this is pt2qa {__version__}, which reads up to {kind.schema}; update pt2qa"
        )
    if int(schema) < kind.schema:
        raise ReportError(
            f"{source.path}: field {SCHEMA!r} says {schema}, written by pt2qa {version}; "
            f"this is pt2qa {__version__}, which reads {kind.schema}; analyse the model again"
        )
    return kind
