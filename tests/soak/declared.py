"""Reports that are damaged and signed again, field by field, as each kind declares its fields.

A value within what a field declares gives a report that works in every view, or a ReportError in words; one outside
gives a ReportError that names the file and the field.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from safetensors.numpy import save as to_bytes
from tqdm import tqdm

from pt2qa._report.rows import Column, columns_of, numbers_of, tables_of
from pt2qa._report.storage import CHECKSUM, KIND, SCHEMA, VERSION, checksum, encode, kind_of
from pt2qa.errors import ReportError
from pt2qa.report import Report, load
from tests.soak.figures import Outcome
from tests.soak.fuzz import MEASURED, bounded, use, where

WHOLE = (0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1e19, 1e308, -1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "x", "\x00", "a\nb", "\ud800", "</script>", "[]", "{}", "1", "output", "," * 200, "." * 3000, "/" * 50)
SHAPES = ([], [0], [2**62, 2**62], [1] * 70)
NAMES = (*TEXTS, [], *([text] for text in TEXTS), ["x"] * 3000)
CELLS: dict[str, tuple[Any, ...]] = {
    "int": WHOLE,
    "float": REAL,
    "bool": (),
    "text": TEXTS,
    "shape": SHAPES,
    "names": NAMES,
}


@dataclass(frozen=True, slots=True)
class Damage:
    """A change of one entry of a file.

    Args:
        where: the entry.
        value: what it holds then, in words.
        fits: whether the field's declaration allows it; None if it says nothing of it.
        change: makes the new entry of the old one.
    """

    where: str
    value: str
    fits: bool | None
    change: Callable[[Any], Any]


def damages(report: Report) -> Iterator[Damage]:
    """Every damage of every field of a report."""
    kind = type(report)
    hints, tables = get_type_hints(kind), tables_of(kind)
    numbers = {each.name: each for each in numbers_of(kind)}
    for name in (f.name for f in fields(kind)):  # type: ignore[arg-type]
        value = getattr(report, name)
        if name in tables:
            for column in columns_of(tables[name]) if value else ():
                yield from _of_cells(f"{name}/{column.name}", column, len(value))
        elif hints[name] in (int, float):
            column = numbers[name]
            for number in WHOLE if column.type == "int" else REAL:
                yield Damage(name, repr(number), column.allows(number), lambda _, number=number: json.dumps(number))
        elif hints[name] is str:
            for text in TEXTS:
                yield Damage(name, repr(text), None, lambda _, text=text: json.dumps(text))
        elif isinstance(value, dict):
            for key, array in value.items():
                yield from _of_array(f"{name}/{key}", array)


def _of_cells(where: str, column: Column, rows: int) -> Iterator[Damage]:
    for value in CELLS[column.type]:
        fits = column.allows(value) if column.type in ("int", "float") else None
        if column.choices:
            fits = value in column.choices
        for cells in {0, rows - 1} | {-1}:
            yield Damage(where, f"{value!r:.40} in {cells}", fits, _cells_changed(column, cells, value))


def _cells_changed(column: Column, at: int, value: Any) -> Callable[[Any], Any]:
    def change(entry: Any) -> Any:
        if isinstance(entry, str):
            cells = json.loads(entry)
            return json.dumps([value if at in (-1, place) else cell for place, cell in enumerate(cells)])
        changed = np.array(entry)
        changed[slice(None) if at == -1 else at] = value
        return changed

    return change


def _of_array(where: str, array: Any) -> Iterator[Damage]:
    kind = array.dtype.kind
    values: tuple[Any, ...] = REAL if kind == "f" else WHOLE if kind == "i" and array.dtype.itemsize == 8 else (0, 1)
    for value in values:
        for place in ("first", "last", "all"):
            yield Damage(where, f"{value!r} as {place}", None, _elements_changed(place, value))
    reshaped: dict[str, Callable[[Any], Any]] = {
        "without the last": lambda each: each[:-1] if each.ndim else each,
        "twice": lambda each: np.concatenate([each, each]) if each.ndim else each,
        "empty": lambda each: each[:0] if each.ndim else each,
        "with another axis": lambda each: each[..., None],
        "flat": lambda each: each.reshape(-1),
        "of float32": lambda each: each.astype(np.float32),
        "of int8": lambda each: np.nan_to_num(each).astype(np.int8),
        "of bool": lambda each: each.astype(bool),
        "backwards": lambda each: np.ascontiguousarray(each[::-1]) if each.ndim else each,
        "a number": lambda each: np.zeros((), each.dtype),
    }
    for how, change in reshaped.items():
        yield Damage(where, how, None, change)


def _elements_changed(place: str, value: Any) -> Callable[[Any], Any]:
    def change(entry: Any) -> Any:
        changed = np.array(entry)
        if changed.size:
            at = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[place]
            changed.reshape(-1)[at] = value
        return changed

    return change


def sealed(report: Report, damage: Damage, path: Path) -> None:
    """Write a report with one entry changed, and a checksum that fits."""
    tensors, text = encode(report)
    held: dict[str, Any] = text if damage.where in text else tensors
    with np.errstate(all="ignore"):
        held[damage.where] = damage.change(held[damage.where])
    tensors = {name: np.require(array, requirements="C") for name, array in tensors.items()}
    kind = kind_of(report)
    text = {KIND: kind.kind, SCHEMA: str(kind.schema), VERSION: "0", **text}
    path.write_bytes(to_bytes(tensors, {**text, CHECKSUM: checksum(tensors, text)}))


def declared(count: int, seed: int) -> Outcome:
    """Try so many damages of each kind, or all of them."""
    figures, chance = Outcome("damaged fields"), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, bounded():
        path = Path(folder) / "report.safetensors"
        for file in tqdm(sorted(MEASURED.glob("*.safetensors")), desc="kinds", disable=None):
            report = load(file)
            every = list(damages(report))
            for damage in chance.sample(every, min(count, len(every))):
                sealed(report, damage, path)
                try:
                    outcome = _outcome(path, report, damage, chance)
                except Exception as error:
                    what = f"{file.stem}, {damage.where} = {damage.value}"
                    figures.violations.append(f"{what}: {type(error).__name__}: {error!s:.100} ({where(error)})")
                    outcome = "VIOLATION"
                figures.counts["damages"] += 1
                figures.counts[outcome] += 1
    return figures


def _outcome(path: Path, original: Report, damage: Damage, chance: random.Random) -> str:
    try:
        report = load(path)
    except ReportError as error:
        if str(path) not in str(error) or (damage.fits is False and repr(damage.where) not in str(error)):
            raise AssertionError("the error does not name the file and the field") from error
        return "refused"
    if damage.fits is False:
        raise AssertionError("it is outside what the field declares, and was believed")
    use(report, original, chance)
    return "read"
