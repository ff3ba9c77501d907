"""The parts of a recurrent op that capture decomposed: one table line until the op is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pt2qa._layers.rows import LayerRow
from pt2qa._near_names import near_names
from pt2qa._report.prose import counted
from pt2qa.errors import ReportError


def folded(
    rows: Sequence[LayerRow], by: str, rank: Callable[[Sequence[LayerRow], str], Sequence[LayerRow]]
) -> tuple[tuple[LayerRow, ...], tuple[str, ...]]:
    """Rows with the parts of each recurrent op folded into one, at the position of the first part.

    The folded row has the numbers of the worst part by a column, which ``rank`` puts first; the lines say what it
    covers.
    """
    parts: dict[str, list[LayerRow]] = {}
    for row in rows:
        parts.setdefault(row.part_of, []).append(row)
    result, lines = [], []
    for row in rows:
        own = parts[row.part_of]
        if not row.part_of or len(own) == 1:
            result.append(row)
        elif row is own[0]:
            worst = rank(own, by)[0]
            name = f"{row.part_of} ({counted(len({part.step for part in own} - {-1}), 'step')})"
            where = f", step {worst.step}" if worst.step >= 0 else ""
            result.append(replace(worst, name=name))
            lines.append(
                f"{name} stands for {len(own)} rows; its numbers are those of the worst by {by}, {worst.name}{where}: "
                f'report.opened("{row.part_of}") or pt2qa show --open {row.part_of} shows each'
            )
    return tuple(result), tuple(lines)


def opened(rows: Sequence[LayerRow], name: str) -> tuple[LayerRow, ...]:
    """Rows in which the parts of one decomposed recurrent op are separate rows."""
    known = dict.fromkeys(row.part_of for row in rows if row.part_of)
    if name not in known:
        near = near_names(name, known) or "none: capture took no recurrent op apart"
        raise ReportError(f"cannot open {name!r}: expected an op that was taken apart, {near}")
    return tuple(replace(row, part_of="") if row.part_of == name else row for row in rows)
