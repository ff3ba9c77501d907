"""Report files: one safetensors file each, versioned, written atomically, read with every field checked.

The header names the kind of report, the version of that kind's fields (the schema), the pt2qa version that wrote it,
and a checksum of the contents: a file that loads is as it was written.  Reading unpickles nothing.
A new kind of report is a frozen dataclass under :func:`register`; how its fields are stored follows from their types
(:mod:`pt2qa._report.fields`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from pt2qa import __version__
from pt2qa._report.atomic import write_atomic
from pt2qa._report.fields import Source, codecs_of, decode, encode
from pt2qa._report.sums import Array
from pt2qa.errors import ReportError

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
