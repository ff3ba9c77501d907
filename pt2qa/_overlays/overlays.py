"""A report's numbers on the model's graph: for Model Explorer, and as a drawing of the ops around one op."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Final

from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._capture.program import Capture
from pt2qa._graph.handles import handle_of, is_part_name, names_of, user_inputs
from pt2qa._layers.report import LayerReport
from pt2qa._printable import clean, near_names
from pt2qa._report.atomic import write_atomic
from pt2qa._report.base import check_name
from pt2qa._report.prose import decibel, number
from pt2qa._report.rows import cell
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa._weights.report import WeightReport
from pt2qa.errors import ReportError, SelectionError

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
            f"got {type(report).__name__}, which has no numbers of ops; expected a report of layers, weights or "
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


def write_overlay(
    report: NodeReport, graph: Capture | ExportedProgram, path: str | os.PathLike[str], *, column: str = "sqnr"
) -> None:
    """Write one column of a report as node data that Model Explorer shows on the exported program.

    Save the program with ``torch.export.save(capture.program, "model.pt2")``, open it in Model Explorer, and add the
    file there as custom node data.  Columns in dB are coloured by thresholds at 10, 20, 30 and 40 dB, others by a
    gradient from the best number to the worst.  Nodes without a number, and those whose SQNR is inf, have no data.

    Args:
        report: layers, weights or sensitivities.
        graph: the capture that the report was made from, or its exported program.
        path: the JSON file to write.
        column: a column of numbers; if an op has several rows, the worst counts.

    Raises:
        ReportError: the report has no such column or no number in it, it is for another graph, or the file cannot be
            written.

    Source:
        https://github.com/google-ai-edge/model-explorer/wiki/2.-User-Guide#custom-node-data; its adapter for exported
        programs gives a node the id ``node.name``.

    >>> report = pt2qa.compare_layers(pair, [x], progress=False)
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pt2qa.write_overlay(report, capture, f"{folder}/sqnr.json", column="sqnr")
    ...     pathlib.Path(folder, "sqnr.json").exists()
    True
    """
    marks = marks_of(report, graph, column)
    finite = {handle: number for handle, number in marks.numbers.items() if isfinite(number)}
    data: dict[str, Any] = {"results": {marks.nodes[handle].name: {"value": finite[handle]} for handle in finite}}
    if marks.unit == "dB":
        limits = zip(LIMITS, COLOURS, strict=True)
        data["thresholds"] = [{"value": limit, "bgColor": colour, "textColor": TEXT} for limit, colour in limits]
    else:
        data["gradient"] = [
            {"stop": place / (len(COLOURS) - 1), "bgColor": colour, "textColor": TEXT}
            for place, colour in enumerate(marks.colours)
        ]
    write_atomic(path, json.dumps(data, indent=2, allow_nan=False))


def write_neighbourhood(
    report: NodeReport,
    graph: Capture | ExportedProgram,
    path: str | os.PathLike[str],
    *,
    around: str | None = None,
    hops: int = 2,
    column: str = "sqnr",
) -> None:
    """Draw the ops around a bad one, coloured by one column of a report: red below 10 dB, green above 40.

    Ops are boxes with their name and number, arrows show the flow of values, and the op in question has a thick border.
    A dashed border means that an op has neighbours outside the drawing.

    Args:
        report: layers, weights or sensitivities.
        graph: the capture that the report was made from, or its exported program.
        path: ``.dot`` for Graphviz's text, ``.svg`` for a drawing, which needs Graphviz.
        around: name of the op, as reports show it; None for the op with the worst number.
        hops: how many arrows away an op may be.
        column: a column of numbers; if an op has several rows, the worst counts.

    Raises:
        ReportError: as for :func:`pt2qa.write_overlay`; the path has another ending; or Graphviz is missing or fails.
        SelectionError: there is no op of that name, or hops is negative.

    >>> report = pt2qa.compare_layers(pair, [x], progress=False)
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pt2qa.write_neighbourhood(report, capture, f"{folder}/around.dot", column="sqnr")
    ...     pathlib.Path(folder, "around.dot").read_text().splitlines()[0]
    'digraph neighbourhood {'
    """
    suffix = Path(path).suffix
    if suffix not in {".dot", ".svg"}:
        raise ReportError(f"cannot draw {path}: expected a path that ends in .dot or .svg, got {suffix or 'no ending'}")
    if hops < 0:
        raise SelectionError(f"hops: got {hops}, expected 0 or more")
    marks = marks_of(report, graph, column)
    handles = {name: handle for handle, name in marks.names.items()}
    if around is not None and around not in handles:
        raise SelectionError(f"the graph has no op {around!r}; near names: {near_names(around, handles)}")
    text = _dot(marks, marks.worst if around is None else handles[around], hops)
    write_atomic(path, text if suffix == ".dot" else _svg(text, path))


def _dot(marks: Marks, centre: int, hops: int) -> str:
    handles = {node: handle for handle, node in marks.nodes.items()}
    shown = {marks.nodes[centre]}
    for _ in range(hops):
        shown |= {other for node in shown for other in _neighbours(node, handles)}
    lines = [
        "digraph neighbourhood {",
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=11];',
    ]
    lines += [
        _box(marks, handle, handle == centre, shown, handles) for handle, node in marks.nodes.items() if node in shown
    ]
    for handle, node in marks.nodes.items():
        lines += [f"  n{handle} -> n{handles[user]};" for user in node.users if {node, user} <= shown]
    return "\n".join([*lines, "}", ""])


def _neighbours(node: Node, handles: dict[Node, int]) -> set[Node]:
    return {other for other in (*node.all_input_nodes, *node.users) if other in handles}


def _box(marks: Marks, handle: int, is_centre: bool, shown: set[Node], handles: dict[Node, int]) -> str:
    found = marks.numbers.get(handle)
    label = [marks.names[handle]]
    colour = "#ffffff"
    if found is not None:
        text = decibel(found) if marks.unit == "dB" else number(found)
        label.append(f"{marks.column} {text} {marks.unit}".rstrip())
        colour = marks.colour_of(found)
    border = "filled,rounded" if _neighbours(marks.nodes[handle], handles) <= shown else "filled,rounded,dashed"
    width = 3 if is_centre else 1
    written = "\\n".join(clean(line).replace("\\", "\\\\").replace('"', '\\"') for line in label)
    look = f'fillcolor="{colour}", fontcolor="{TEXT}", style="{border}", penwidth={width}'
    return f'  n{handle} [label="{written}", {look}];'


def _svg(text: str, path: str | os.PathLike[str]) -> bytes:
    program = shutil.which("dot")
    if program is None:
        raise ReportError(
            f"cannot draw {path}: Graphviz's program 'dot' is not on the PATH; install Graphviz "
            "(apt-get install graphviz), or give a path that ends in .dot"
        )
    run = subprocess.run([program, "-Tsvg"], input=text.encode("utf-8"), capture_output=True, check=False)
    if run.returncode:
        raise ReportError(f"cannot draw {path}: dot failed: {run.stderr.decode('utf-8', 'replace').strip()}")
    return run.stdout
