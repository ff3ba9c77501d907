"""A drawing of the ops around one op."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._capture.program import Capture
from pt2qa._near_names import near_names
from pt2qa._overlays.marks import TEXT, Marks, NodeReport, marks_of
from pt2qa._printable import clean
from pt2qa._report.atomic import write_atomic
from pt2qa._report.formats import decibel, number
from pt2qa.errors import ReportError, SelectionError


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

    >>> import torch
    >>> import pt2qa
    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> capture = pt2qa.capture(torch.nn.Linear(4, 2).eval(), x)
    >>> pair = pt2qa.quantize(capture, "xnnpack", [x], progress=False)
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
    write_atomic(path, text.encode("utf-8") if suffix == ".dot" else _svg(text, path))


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
