"""Charts of a deployed report: the noise at the output after each stage, and the kernels along the graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

from pt2qa._decibels import LOW_SQNR, power
from pt2qa._deployed.rows import LSB, DeployedRow, StageRow
from pt2qa._report.formats import decibel
from pt2qa._report.html.charts import bars


def stage_bars(stages: Sequence[StageRow]) -> list[dict[str, Any]]:
    """A bar for each stage after the first: noise at the worst output, as a share of the signal's amplitude."""
    if len(stages) < 2:
        return []
    drawn = [(row.name, sqrt(power(-row.sqnr)), f"{decibel(row.sqnr)} dB") for row in stages[1:]]
    about = (
        f"Noise of the worst output against that of the first stage, {stages[0].name}, in proportion to the signal's "
        "amplitude. The number is its SQNR; inf: identical."
    )
    # Nothing is drawn where there is no number.
    return bars("Error of the output by stage", about, [each for each in drawn if isfinite(each[1])])


def along_graph(rows: Sequence[DeployedRow]) -> list[dict[str, Any]]:
    """What each kernel differs by on the same inputs, in integer steps; and SQNR, for what was measured."""
    charts = []
    if any(isfinite(row.isolated_max_lsb) for row in rows):
        charts.append(
            {
                "kind": "along",
                "title": "Kernels along the graph, on the same inputs",
                "about": "Largest difference between the value that the kernel writes and the converted graph's, "
                f"computed from the kernel's own inputs, in integer steps. Dashed: {LSB:g} LSB, where two correct "
                "kernels may round a tie apart.",
                "table": "rows",
                "series": [("isolated_max_lsb", "isolated")],
                "line": LSB,
                "unit": "LSB",
            }
        )
    measured = (("deployed_sqnr", "deployed"), ("quantized_sqnr", "converted"), ("isolated_sqnr", "isolated"))
    series = [each for each in measured if any(isfinite(getattr(row, each[0])) for row in rows)]
    if series:
        charts.append(
            {
                "kind": "along",
                "title": "SQNR along the graph",
                "about": "Deployed and converted: against the reference, with all error up to here. Isolated: the "
                "kernel against the converted graph on the same inputs. "
                f"Dashed: {LOW_SQNR:g} dB, 1 % noise. Identical values (inf) have no mark.",
                "table": "rows",
                "series": series,
                "line": LOW_SQNR,
                "unit": "dB",
            }
        )
    return charts
