"""Which node of a graph each number of a report belongs to, and its colour: red for bad, green for good."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan
from typing import Final

from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._capture.program import Capture
from pt2qa._graph.handles import handle_of, is_part_name, names_of, user_inputs
from pt2qa._layers.report import LayerReport
from pt2qa._report.base import check_name
from pt2qa._report.columns import cell
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa._weights.report import WeightReport
from pt2qa.errors import ReportError

NodeReport = LayerReport | WeightReport | SensitivityReport
"""Reports whose rows belong to ops."""

COLOURS: Final = ("#f4796b", "#fdae61", "#fee08b", "#d9ef8b", "#a6d96a")
"""From bad to good."""

TEXT: Final = "#000000"
"""Readable on each of :data:`COLOURS`."""

LIMITS: Final = (10.0, 20.0, 30.0, 40.0, 1000.0)
"""Upper limits in dB of :data:`COLOURS`; no finite SQNR is above the last."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The numbers of one column, on the nodes of a graph; all by handle, without those of nested graphs.

    A number is the worst if an op has several rows.  It is never nan; inf if nothing differs.
    """

    nodes: dict[int, Node]
    names: dict[int, str]
    numbers: dict[int, float]
    column: str
    unit: str
    small_is_bad: bool

    @property
    def worst(self) -> int:
        """The handle of the worst number; the first one if there are ties."""
        choose = min if self.small_is_bad else max
        return choose(self.numbers, key=lambda handle: self.numbers[handle])

    @property
    def colours(self) -> tuple[str, ...]:
        return COLOURS if self.small_is_bad else COLOURS[::-1]

    def colour_of(self, number: float) -> str:
        """By :data:`LIMITS` if the unit is dB, else by position between the smallest and the largest number."""
        if self.unit == "dB":
            return next((colour for limit, colour in zip(LIMITS, COLOURS, strict=True) if number <= limit), COLOURS[-1])
        if not isfinite(number):
            return self.colours[-1 if number > 0 else 0]
        finite = [value for value in self.numbers.values() if isfinite(value)]
        low, high = min(finite), max(finite)
        place = (number - low) / (high - low) if high > low else 0.5
        return self.colours[min(int(place * len(COLOURS)), len(COLOURS) - 1)]


def marks_of(report: NodeReport, graph: Capture | ExportedProgram, column: str) -> Marks:
    if not isinstance(report, NodeReport):
        raise ReportError(
            f"got a {type(report).__name__}, which has no numbers of ops; expected a report of layers, weights or "
            "sensitivities"
        )
    known = {each.name: each for each in report.columns() if each.type in {"int", "float"}}
    check_name(f"{type(report).__name__} has no column of numbers", column, known)
    program = graph.program if isinstance(graph, Capture) else graph
    nodes = {handle: node for node in program.graph.nodes if (handle := handle_of(node)) is not None}
    # A program that was saved and loaded has lost the handles of its inputs.
    nodes |= dict(enumerate(user_inputs(program))) if nodes else {}
    names = {handle: name.name for handle, name in names_of(program).items() if handle in nodes}
    small_is_bad = known[column].worse == "smaller"
    numbers: dict[int, float] = {}
    for row in report.rows:
        value = float(cell(row, column))
        if row.handle not in nodes or isnan(value):
            continue
        if not is_part_name(row.name, names[row.handle]):
            raise ReportError(
                f"the report is not about this graph: handle {row.handle} is {row.name} in the report and "
                f"{names[row.handle]} in the graph; give the capture that the report was made from"
            )
        before = numbers.get(row.handle, value)
        numbers[row.handle] = min(before, value) if small_is_bad else max(before, value)
    if not numbers:
        raise ReportError(
            f"no row of the report has both a number {column!r} and an op of this graph; give the capture that the "
            "report was made from"
        )
    return Marks(nodes, names, numbers, column, known[column].unit, small_is_bad)
