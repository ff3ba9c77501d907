"""Equal blocks side by side: the rows of a model of 32 layers as a picture of op × block, and as a table of ops."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from statistics import median
from typing import Annotated, Any, ClassVar, Final

from pt2qa._layers.rows import LayerRow
from pt2qa._report.prose import counted, decibel
from pt2qa._report.rows import Row, column

FEWEST: Final = 4
"""Blocks that make a picture."""

FILLED: Final = 0.5
"""More than this share of block × op must have a number: of blocks that differ more, no picture says anything."""

LIGHTEST: Final = 0.9
"""The share of numbers that have shades of their own: a few that lose next to nothing would make all others dark."""

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^./])")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The rows of modules that are numbered alike, such as ``model.layers.0`` to ``model.layers.31``.

    Args:
        prefix: the path before the number; empty for a model that is one ``nn.Sequential``.
        numbers: of the blocks, in order.
        ops: names within a block, ``mlp.down_proj/linear``, in graph order.
        identical: how many further ops have the same values in both models in every block.
        places: by op and block, the position of its row; None if there is no row with a number.
    """

    prefix: str
    numbers: tuple[int, ...]
    ops: tuple[str, ...]
    identical: int
    places: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRow(Row):
    """One op of equal blocks.

    Args:
        op: its name within a block.
        blocks: how many of them have a number for it.
        worst: the smallest, dB.
        block: the one that has it.
        median: over all blocks, dB.
        best: the largest, dB.
    """

    shown: ClassVar[tuple[str, ...]] = ("op", "blocks", "worst", "block", "median", "best")

    op: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    blocks: Annotated[int, column(importance=4)]
    worst: Annotated[float, column("worst\ndB", unit="dB", importance=0)]
    block: Annotated[str, column("in block", importance=0)]
    median: Annotated[float, column("median\ndB", unit="dB", importance=2)]
    best: Annotated[float, column("best\ndB", unit="dB", importance=3)]


def blocks_of(rows: Sequence[LayerRow], by: str) -> tuple[Blocks, ...]:
    """Each list of at least :data:`FEWEST` equal blocks, with the rows that have a number in a column of dB.

    A name with several numbers is of the list that has the most blocks.  Of several rows of one name, such as those of
    two sites, the one with the smallest number counts.
    """
    found: dict[str, dict[tuple[str, int], int]] = {}
    known: dict[str, set[int]] = {}
    for row in rows:
        for prefix, number, _ in _splits(row.name):
            known.setdefault(prefix, set()).add(number)
    for place, row in enumerate(rows):
        splits = [each for each in _splits(row.name) if len(known[each[0]]) >= FEWEST]
        if splits and not isnan(getattr(row, by)):
            prefix, number, op = max(splits, key=lambda each: len(known[each[0]]))
            cells = found.setdefault(prefix, {})
            other = cells.get((op, number))
            if other is None or getattr(row, by) < getattr(rows[other], by):
                cells[op, number] = place
    lost = {place for place, row in enumerate(rows) if isfinite(getattr(row, by))}
    grids = (_grid(prefix, cells, lost) for prefix, cells in found.items())
    return tuple(each for each in grids if _alike(each))


def ops_of(blocks: Blocks, rows: Sequence[LayerRow], by: str) -> tuple[BlockRow, ...]:
    """What the blocks have in common: a row for each op, the worst first."""
    found = []
    for op, places in zip(blocks.ops, blocks.places, strict=True):
        numbers = {
            number: getattr(rows[place], by)
            for number, place in zip(blocks.numbers, places, strict=True)
            if place is not None
        }
        worst = min(numbers, key=lambda number: float(numbers[number]))
        values = sorted(numbers.values())
        found.append(BlockRow(op, len(values), values[0], str(worst), float(median(values)), values[-1]))
    return tuple(sorted(found, key=lambda row: row.worst))


def identical(blocks: Blocks) -> str:
    return f" {counted(blocks.identical, 'op')} more: identical in every block." if blocks.identical else ""


def heat_maps(rows: Sequence[LayerRow], by: str, title: str) -> list[dict[str, Any]]:
    return [_heat_map(each, rows, by, title) for each in blocks_of(rows, by)]


def _heat_map(blocks: Blocks, rows: Sequence[LayerRow], by: str, title: str) -> dict[str, Any]:
    values = sorted(getattr(rows[place], by) for places in blocks.places for place in places if place is not None)
    finite = [value for value in values if isfinite(value)]
    low, high = finite[0], finite[int(LIGHTEST * (len(finite) - 1))]
    shades = f"darkest: {decibel(low)} dB, lightest: {decibel(high)} dB and more"
    return {
        "kind": "heat",
        "title": f"{title}, {blocks.prefix or 'blocks'} {blocks.numbers[0]} to {blocks.numbers[-1]}",
        "about": f"A column for each block, a row for each op; {shades}.{identical(blocks)}",
        "table": "rows",
        "column": by,
        "range": [low, high],
        "blocks": list(map(str, blocks.numbers)),
        "ops": list(blocks.ops),
        "places": [list(places) for places in blocks.places],
    }


def _splits(name: str) -> list[tuple[str, int, str]]:
    """Each way to read a name as prefix, number of a block, and the name within it."""
    module, slash, _ = name.rpartition("/")
    if not slash:
        return []
    return [
        (name[: each.start()].rstrip("."), int(each[0]), name[each.end() :].lstrip("./"))
        for each in _NUMBER.finditer(module)
    ]


def _grid(prefix: str, cells: dict[tuple[str, int], int], lost: Collection[int]) -> Blocks:
    """The cells as a grid, of the ops that lose something in any block."""
    numbers = tuple(sorted({number for _, number in cells}))
    every = dict.fromkeys(op for op, _ in sorted(cells, key=lambda cell: (cell[1], cells[cell])))
    lossy = {op for (op, _), place in cells.items() if place in lost}
    ops = tuple(op for op in every if op in lossy)
    places = tuple(tuple(cells.get((op, number)) for number in numbers) for op in ops)
    return Blocks(prefix, numbers, ops, len(every) - len(ops), places)


def _alike(blocks: Blocks) -> bool:
    places = [place for each in blocks.places for place in each]
    filled = sum(place is not None for place in places)
    return bool(places) and len(blocks.numbers) >= FEWEST and filled > FILLED * len(places)
