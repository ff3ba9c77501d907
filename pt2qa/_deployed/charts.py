"""Charts of a deployed report: the noise at the output after each stage, and the kernels along the graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

from pt2qa._decibels import LOW_SQNR, power
from pt2qa._deployed.rows import LSB, DeployedRow, StageRow
from pt2qa._report.charts import along, bars
from pt2qa._report.formats import decibel


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
        about = (
            "Largest difference between the value that the kernel writes and the converted graph's, computed from the "
            f"kernel's own inputs, in integer steps. Dashed: {LSB:g} LSB, where two correct kernels may round a tie "
            "apart."
        )
        title = "Kernels along the graph, on the same inputs"
        charts.append(along(title, about, [("isolated_max_lsb", "isolated")], line=LSB, unit="LSB"))
    low = f"Dashed: {LOW_SQNR:g} dB, 1 % noise. Identical values (inf) have no mark."
    sides = (("deployed_sqnr", "deployed"), ("quantized_sqnr", "converted"))
    measured = [each for each in sides if any(isfinite(getattr(row, each[0])) for row in rows)]
    if measured:
        about = f"Deployed and converted against the reference, with all error up to here. {low}"
        charts.append(along("Cumulative SQNR along the graph", about, measured))
    if any(isfinite(row.isolated_sqnr) for row in rows):
        about = f"The kernel against the converted graph on the same inputs. {low}"
        charts.append(along("Isolated SQNR along the graph", about, [("isolated_sqnr", "isolated")]))
    return charts
