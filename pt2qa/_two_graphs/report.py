"""The report of two graphs of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import ClassVar

from pt2qa._decibels import LOW_SQNR
from pt2qa._layers.report import LayerReport
from pt2qa._layers.rows import LayerRow
from pt2qa._report.base import Grade, data_read
from pt2qa._report.prose import counted, decibel, number
from pt2qa._report.rows import Column, Unpaired
from pt2qa._report.storage import register
from pt2qa._report.sums import settings_of
from pt2qa._report.table import ranked

LOST = "lost"
"""The setting with the handles of ops that have no counterpart for a reason that is not known."""


@register("graphs", schema=4, oldest=3)
@dataclass(frozen=True, slots=True, repr=False)
class GraphReport(LayerReport):
    """Where two graphs of one model differ: a layer report of graph b, with graph a as the reference.

    ``ref_min`` and the like are of graph a, ``quant_min`` and the like of graph b.  Nothing is run in isolation or
    rounded anew, so ``isolated_sqnr``, ``rounding_sqnr`` and ``saturation`` are nan; ``quantizer`` is empty.

    What :func:`pt2qa.compare_graphs` returns.
    """

    heading: ClassVar[str] = "Graphs"
    usual_measures: ClassVar[tuple[str, ...]] = ("sqnr", "cosine")

    def grade(self) -> Grade:
        """Good if the graphs agree bit for bit, bad if an output is low or one graph alone is not finite."""
        if any(apart.side in ("a", "b") for apart in self.set_apart) or self.sqnr < LOW_SQNR:
            return "bad"
        silent = self.set_apart or any(isnan(row.atol) for row in (*self.rows, *self.outputs))
        return "good" if self.outputs and not silent and not _unlike(self.rows + self.outputs) else "warning"

    def shown(self, part: str = "rows") -> tuple[Column, ...]:
        names = ("name", "op", "observed_at", "dtype", "sqnr", "max_lsb", "atol", "cosine")
        return tuple(self.column(name, part) for name in names)

    def _title(self, sort: str) -> str:
        read, rows = data_read(self.batches, self.samples), counted(len(self.rows), "value")
        return f"{self.model}, graph b against graph a: {rows}, {read}, {self._how(sort, 'smallest SQNR first')}"

    def _summary(self) -> Sequence[str]:
        lost = settings_of(self.sums).get(LOST, "").split() if self.sums else []
        unpaired = [each for each in self.unpaired if str(each.handle) in lost]
        return list(_verdict(self.rows, self.outputs, unpaired, len(self.unpaired)))


def _verdict(
    rows: Sequence[LayerRow], outputs: Sequence[LayerRow], lost: Sequence[Unpaired], unpaired: int
) -> Iterator[str]:
    """Whether the graphs agree, else where the first difference is, in the order of graph a."""
    compared = [row for row in rows if not isnan(row.atol)]
    unlike, far = _unlike(compared), _unlike(outputs)
    known = bool(outputs) and not any(isnan(row.atol) for row in outputs)
    values, output = counted(len(compared), "value"), "the output" if len(outputs) == 1 else "the outputs"
    if unlike:
        yield from _about_first(unlike[0], compared.index(unlike[0]), lost)
        worst = ranked(LayerRow, unlike, "sqnr")[0]
        yield f"{len(unlike)} of {values} differ; the lowest SQNR is {decibel(worst.sqnr)} dB, at {worst.name}."
    elif known and not far:
        yield f"The graphs agree bit for bit: {values} and {output} are equal."
    elif not compared:
        yield "No verdict: no value in both graphs has a number."
    else:
        yield f"The {values} that both graphs have agree bit for bit."
    if far:
        worst = ranked(LayerRow, far, "sqnr")[0]
        yield f"{worst.name} differs: SQNR {decibel(worst.sqnr)} dB, by at most {number(worst.atol)}."
        yield from _about_lost(lost) if not unlike else ()
    elif unlike and known:
        yield f"Still, {output} {'is' if len(outputs) == 1 else 'are'} equal bit for bit."
    yield f"Counts: {counted(len(rows) - len(compared), 'row')} without a number, {unpaired} unpaired."


def _about_first(row: LayerRow, before: int, lost: Sequence[Unpaired]) -> Iterator[str]:
    steps = "" if isnan(row.max_lsb) else f" ({number(row.max_lsb)} LSB)"
    equal = f"; {counted(before, 'value')} before it agree bit for bit" if before else ""
    yield f"First difference at {row.name}: SQNR {decibel(row.sqnr)} dB, by at most {number(row.atol)}{steps}{equal}."
    yield from _about_lost([each for each in lost if each.handle < row.handle])


def _about_lost(lost: Sequence[Unpaired]) -> Iterator[str]:
    if lost:
        count = counted(len(lost), "op")
        yield f"The first difference may be earlier: {count} before it cannot be compared, {lost[-1].name} last."


def _unlike(rows: Sequence[LayerRow]) -> list[LayerRow]:
    return [row for row in rows if row.atol > 0]
