"""Node data for Model Explorer."""

from __future__ import annotations

import json
import os
from math import isfinite
from typing import Any

from torch.export import ExportedProgram

from pt2qa._capture.program import Capture
from pt2qa._overlays.marks import COLOURS, LIMITS, TEXT, NodeReport, marks_of
from pt2qa._report.atomic import write_atomic


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

    >>> import torch
    >>> import pt2qa
    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> capture = pt2qa.capture(torch.nn.Linear(4, 2).eval(), x)
    >>> pair = pt2qa.quantize(capture, "xnnpack", [x], progress=False)
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
    write_atomic(path, json.dumps(data, indent=2, allow_nan=False).encode("utf-8"))
