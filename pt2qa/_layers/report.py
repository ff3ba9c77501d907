"""The report of a layer-by-layer comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite, isnan
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from pt2qa._decibels import LOW_SQNR
from pt2qa._layers.blocks import FEWEST, BlockRow, blocks_of, heat_maps, identical, ops_of
from pt2qa._layers.rows import LayerRow, folded, opened
from pt2qa._layers.verdict import output_sqnr, ranked_by, summary_of
from pt2qa._report.base import Block, DataReport, Grade, Listing, Report, Table, data_read
from pt2qa._report.charts import Runs, along, drawings, pictures, scalars, sides
from pt2qa._report.prose import by_reason, cosine, counted, decibel, number, wrap
from pt2qa._report.rows import Column, Unpaired, check_custom, column, columns_of, custom_names, derived
from pt2qa._report.storage import register
from pt2qa._report.sums import Sums
from pt2qa._report.table import screen_width, table, without_number
from pt2qa.errors import ReportError

SCALARS = (
    *("sqnr", "isolated_sqnr", "rounding_sqnr", "mse", "cosine", "l1", "atol", "max_lsb", "saturation", "range_use"),
)
"""The columns that TensorBoard shows, besides the user's metrics."""


@register("layers", schema=4, oldest=3, since={"set_apart": 2, "input_ranges": 4})
@dataclass(frozen=True, slots=True, repr=False)
class LayerReport(DataReport):
    """How far each layer of the quantized model is from the reference, and which op causes it.

    Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: one for each compared value, in graph order.
        outputs: the model's outputs, ``output``, ``output[1]``, ``output.logits``.
        modules: whole modules that the user selected; ``op`` is the class name.
        unpaired: nodes of one graph without a counterpart in the other, with the reason.
        smaller_is_worse, larger_is_worse: the custom metrics that declare a direction.
        sums: what :func:`pt2qa.merge` adds up.

    Raises:
        ReportError: custom metrics differ between rows, or one is named like a column or declares both directions.

    >>> from pt2qa.report import Environment
    >>> empty = LayerReport((), (), (), (), notes=(), environment=Environment.here(""))
    >>> empty.table()
    '(no rows)'
    """

    merges_in: ClassVar[str] = "pt2qa._layers.sums"
    usual_measures: ClassVar[tuple[str, ...]] = ("isolated_sqnr", "sqnr")
    chartless: ClassVar[str] = (
        "Histograms come with profiles: pt2qa analyze --profiles --html, or pt2qa.profile of both sides in write_html."
    )

    rows: tuple[LayerRow, ...]
    outputs: tuple[LayerRow, ...]
    modules: tuple[LayerRow, ...]
    unpaired: tuple[Unpaired, ...]
    smaller_is_worse: Annotated[tuple[str, ...], column(since=2)] = ()
    larger_is_worse: Annotated[tuple[str, ...], column(since=2)] = ()
    sums: Annotated[Sums, column(since=3)] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        check_custom(LayerRow, self.rows + self.outputs + self.modules)
        if both := sorted({*self.smaller_is_worse} & {*self.larger_is_worse}):
            raise ReportError(f"custom metric {both[0]!r}: said to be worse when smaller and when larger")

    @derived(unit="dB", judged=True)
    def sqnr(self) -> float:
        """The whole model's SQNR in dB: the smallest of its outputs; nan if none has one."""
        return output_sqnr(self.outputs)

    @derived()
    def batches_apart(self) -> int:
        """How many batches are in none of the numbers."""
        return len(self.set_apart)

    def worst(self, k: int, by: str = "isolated_sqnr") -> tuple[LayerRow, ...]:
        """The k worst rows by a column or custom metric, ties by ``sqnr``; rows where it is nan come last.

        Smaller is worse for SQNR, cosine, range use and custom metrics that declare it; larger for all others.

        Raises:
            ReportError: there is no such column.
        """
        return self.ranked(self.rows, by)[:k]

    def opened(self, name: str) -> LayerReport:
        """The same report, whose tables show a recurrent op that capture decomposed part by part.

        Args:
            name: the op's name, such as ``rnn/lstm``.

        Raises:
            ReportError: no op of that name was decomposed.
        """
        return replace(self, rows=opened(self.rows, name))

    def by_block(self, by: str = "", *, width: int | None = None) -> str:
        """A table of the ops of equal blocks, such as the layers of a language model: the worst block and the median.

        Args:
            by: a column in dB; empty for ``isolated_sqnr``, or ``sqnr`` if that was not measured.
            width: of the screen, in characters; None for the terminal's.

        Raises:
            ReportError: the column is not in dB, or the model has no four numbered blocks that are alike.
        """
        by = by or ranked_by(self.rows)
        if self.column(by).unit != "dB":
            raise ReportError(f"by={by!r}: expected a column in dB, such as isolated_sqnr")
        found = blocks_of(self.rows, by)
        if not found:
            raise ReportError(
                f"{self.model} has no {FEWEST} numbered blocks whose ops are alike; table() shows every op"
            )
        return "\n\n".join(
            f"{by} by op, {each.prefix} {each.numbers[0]} to {each.numbers[-1]}.{identical(each)}\n"
            + table(columns_of(BlockRow), ops_of(each, self.rows, by), None, None, screen_width(width))
            for each in found
        )

    def grade(self) -> Grade:
        """By :data:`LOW_SQNR`; an output or batch without a number must not hide behind the others."""
        usual = Report.grade(self)
        if usual == "bad" or not self.outputs:
            return "bad" if usual == "bad" else "plain"
        silent = self.set_apart or any(isnan(row.sqnr) for row in self.outputs)
        return "bad" if self.sqnr < LOW_SQNR else "warning" if silent else "good"

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """SQNR along the graph, and by block; with profiles of the model among the others, histograms of the worst."""
        by = ranked_by(self.rows)
        return [
            *along_graph(self.rows),
            *by_block(self.rows, by),
            *histograms(self, self.worst(len(self.rows), by), by, others),
        ]

    def events(self, step: int, per_channel: bool, others: Sequence[Report]) -> Runs:
        """Each metric of each layer and output, the ends and means of both sides, and the charts of the page."""
        rows = self.rows + self.outputs
        metrics = (*SCALARS, *custom_names(rows))
        found = {**scalars("layers", rows, metrics, step), **sides(rows, ("min", "max", "mean"), step)}
        found["layers"] += pictures(drawings(self, others), step)
        return found

    def _headline(self) -> str:
        of = ", ".join(filter(None, (self.model, self.quantizer)))
        return f"<{type(self).__name__} of {of}: {len(self.rows)} rows, output SQNR {self.sqnr:.4g} dB>"

    def _title(self, sort: str) -> str:
        worst = "smallest isolated SQNR" if self._worst_by() == "isolated_sqnr" else "smallest SQNR"
        read = data_read(self.batches, self.samples)
        rows = counted(len(self.rows), "layer")
        return f"{self.model}, quantized by {self.quantizer}: {rows}, {read}, {self._how(sort, f'{worst} first')}"

    def _before(self) -> Iterator[Block]:
        yield Listing("Outputs", [_output_line(row) for row in self.outputs])

    def _after(self, limit: int | None) -> Iterator[Block]:
        if self.modules:
            by = ranked_by(self.modules)
            wanted = {"name", "op", "sqnr", "isolated_sqnr", "max_lsb", "cosine"}
            columns = [each for each in self.shown("modules") if each.name in wanted]
            yield Table(columns, self.ranked(self.modules, by, "modules"), "Modules, each run whole", by, limit)
        yield from self._set_apart()
        missing = without_number(self.rows, ranked_by(self.rows))
        yield Listing(f"Without a number ({len(missing)})", by_reason((row.name, row.note) for row in missing))
        yield from self._unpaired()
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        return summary_of(self.rows, self.outputs, len(self.unpaired), len(self.notes), self.set_apart)

    def _worst_by(self) -> str:
        return ranked_by(self.rows)

    def _table(self, sort: str, limit: int | None, width: int) -> str:
        worst = self._worst_by()
        ordered, by = self._ordered(sort)
        rows, stand_for = folded(ordered, worst if by is None or sort == "name" else by, self.ranked)
        drawn = table(self._columns_for(sort), rows, by, limit, width)
        return "\n".join([drawn, *(wrap(line, width, indent="  ") for line in stand_for)])

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        if column.name in self.smaller_is_worse or column.name in self.larger_is_worse:
            return replace(column, worse="smaller" if column.name in self.smaller_is_worse else "larger")
        return column


def _output_line(row: LayerRow) -> str:
    why = f" ({row.note})" if row.note else ""
    return f"{row.name}: SQNR {decibel(row.sqnr)} dB, cosine {cosine(row.cosine)}, max error {number(row.atol)}{why}"


_MEASURES: Final = (
    ("sqnr", "Cumulative SQNR", "Of each value against the reference, with all error up to here."),
    (
        "isolated_sqnr",
        "Isolated SQNR",
        "Of each op and the rounding of what it reads alone, on the reference's values.",
    ),
    ("rounding_sqnr", "Rounding SQNR", "Of the rounding of each output alone."),
)

SHOWN: Final = 8
"""Layers whose histograms are shown, the worst first."""

HELD: Final = 200
"""Layers whose histograms a page holds, for their rows."""

BINS: Final = 160
"""Maximum number of bins per histogram."""

SIDES: Final = ("reference", "quantized", "deployed", "before")
"""Profiles whose histograms are drawn into one; that of a capture counts as the reference's."""


def along_graph(rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    return [
        along(
            f"{title} along the graph",
            f"{about} Dashed: {LOW_SQNR:g} dB, 1 % noise. Identical values (inf) have no mark.",
            [(key, key)],
        )
        for key, title, about in _MEASURES
        if any(isfinite(getattr(row, key)) for row in rows)
    ]


def by_block(rows: Sequence[LayerRow], by: str) -> list[dict[str, Any]]:
    return heat_maps(rows, by, next(title for key, title, _ in _MEASURES if key == by))


def histograms(report: Any, worst: Sequence[LayerRow], by: str, others: Sequence[Report]) -> list[dict[str, Any]]:
    """Output histograms of the worst layers by a column, from profiles of this model among the other reports.

    Bins are whole numbers of integer steps with edges halfway between integers, so that quantized values spread evenly
    over the bins.
    """
    mine: list[Any] = [each for each in others if each.kind == "profile" and _is_of(each, report)]
    sides = {
        side: (each, {row.name: row for row in reversed(each.rows) if row.role == "output"})
        for each in reversed(mine)
        if each.histograms and (side := "reference" if each.side == "float" else each.side) in SIDES
    }
    what = by.replace("_sqnr", "").replace("sqnr", "cumulative")
    place = {id(row): index for index, row in enumerate(report.rows)}
    charts: list[dict[str, Any]] = []
    for row in worst:
        # A layer missing on one side has no values there and is drawn from the other side alone.
        found = [(side, *sides[side]) for side in SIDES if side in sides]
        drawn = [(side, each, rows[row.name]) for side, each, rows in found if row.name in rows]
        drawn = [(side, each, of) for side, each, of in drawn if isfinite(of.min + of.max)]
        if drawn and len(charts) < HELD:
            chart = _chart(f"{row.name}: {what} {decibel(getattr(row, by))} dB", drawn)
            charts.append({**chart, "table": "rows", "row": place[id(row)], "whole": len(charts) < SHOWN})
    return charts


def _is_of(profile: Any, report: Any) -> bool:
    fingerprints = {profile.environment.fingerprint, report.environment.fingerprint} - {""}
    return (
        profile.model == report.model
        and len(fingerprints) < 2
        and (profile.side == "before" or profile.quantizer in {"", report.quantizer})
    )


def _chart(title: str, sides: Sequence[tuple[str, Any, Any]]) -> dict[str, Any]:
    low, high = min(row.min for _, _, row in sides), max(row.max for _, _, row in sides)
    grid = next((found for _, _, row in sides if (found := _grid(row, max(-low, high))) is not None), None)
    edges = _equal_edges(low, high) if grid is None else _grid_edges(low, high, grid)
    series = [
        {"side": side, "counts": [round(float(count), 3) for count in profile.histogram(row, edges.tolist())[1]]}
        for side, profile, row in sides
    ]
    return {
        "kind": "histogram",
        "title": title,
        "about": ". ".join(f"{side}: {number(row.min)} to {number(row.max)}" for side, _, row in sides),
        "edges": edges.tolist(),
        "series": series,
        "grid": grid,
    }


def _grid(row: Any, largest: float) -> dict[str, Any] | None:
    """The integer grid that a value is rounded to; None if there is none, it is not uniform, or too fine for values."""
    if not row.dtype.startswith(("int", "uint")) or not isfinite(row.scale) or not isfinite(row.zero_point):
        return None
    if row.scale <= 0 or not isfinite(largest / row.scale):
        return None
    try:
        limits = np.iinfo(row.dtype)
    except TypeError:
        return None  # int4 and the like, whose limits NumPy does not know
    grid = {"dtype": row.dtype, "scale": row.scale, "low": int(limits.min), "high": int(limits.max)}
    return {**grid, "zero_point": int(row.zero_point)}


def _grid_edges(low: float, high: float, grid: dict[str, Any]) -> npt.NDArray[np.float64]:
    scale, zero_point = grid["scale"], grid["zero_point"]
    first = min(grid["low"], int(np.floor(low / scale)) + zero_point)
    last = max(grid["high"], ceil(high / scale) + zero_point)
    step = ceil((last - first + 1) / BINS)
    integers: npt.NDArray[np.float64] = first + step * np.arange((last - first) // step + 2, dtype=np.float64)
    edges: npt.NDArray[np.float64] = (integers - 0.5 - zero_point) * scale
    return edges


def _equal_edges(low: float, high: float) -> npt.NDArray[np.float64]:
    return np.linspace(low, high, BINS // 2 + 1) if high > low else np.array([low - 0.5, low + 0.5])
