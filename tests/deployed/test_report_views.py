"""A deployed report on a page and in TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isfinite, nan

import pytest

from pt2qa._report.charts import Drawing
from pt2qa.report import DeployedReport
from tests.report.html import samples


@pytest.fixture
def report() -> DeployedReport:
    return samples.deployed()


def test_the_stages_are_bars_of_noise_amplitude(report: DeployedReport) -> None:
    stages, *_ = report.charts([])
    assert stages["kind"] == "bars"
    drawn = {bar["label"]: (bar["value"], bar["text"]) for bar in stages["bars"]}
    assert list(drawn) == ["capture", "prepared", "converted", "deployed"]
    assert drawn["capture"] == (0.0, "inf dB")
    assert drawn["converted"] == (pytest.approx(10 ** (-36 / 20)), "36.0 dB")
    assert drawn["deployed"][0] == pytest.approx(0.75, abs=0.001)


def test_kernels_along_the_graph_are_in_steps_and_in_decibels(report: DeployedReport) -> None:
    _, steps, levels, isolated = report.charts([])
    assert (steps["series"], steps["line"], steps["unit"]) == ([["isolated_max_lsb", "isolated"]], 1.0, "LSB")
    assert [name for name, _ in levels["series"]] == ["deployed_sqnr", "quantized_sqnr"]
    assert [name for name, _ in isolated["series"]] == ["isolated_sqnr"]
    assert {(chart["line"], chart["unit"]) for chart in (levels, isolated)} == {(20.0, "dB")}
    columns = {column.name for column in report.columns()}
    assert all(name in columns for chart in (steps, levels, isolated) for name, _ in chart["series"])


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda report: replace(report, rows=()), ["bars"]),
        (lambda report: replace(report, stages=()), ["along"] * 3),
        (lambda report: replace(report, rows=(report.rows[2],)), ["bars", "along", "along"]),
        (lambda report: replace(report, rows=(), stages=()), []),
        (lambda report: replace(report, rows=(), stages=(replace(report.stages[1], sqnr=nan),) * 2), []),
    ],
    ids=["outputs alone", "rows alone", "floats alone", "nothing", "no numbers"],
)
def test_what_was_not_measured_has_no_chart(
    report: DeployedReport, change: Callable[[DeployedReport], DeployedReport], kinds: list[str]
) -> None:
    charts = change(report).charts([])
    assert [chart["kind"] for chart in charts] == kinds
    json.dumps(charts, allow_nan=False)


def test_events_have_every_finite_number(report: DeployedReport) -> None:
    events = [each for each in report.events(7, False, [report])["deployed"] if not isinstance(each.value, Drawing)]
    found = {(event.tag, event.step): event.value for event in events if isinstance(event.value, float)}
    assert len(found) == len(events)
    assert all(map(isfinite, found.values()))
    assert found["isolated_max_lsb/stem/conv2d", 7] == 0
    assert found["deployed_sqnr/output", 7] == 3.0
    assert found["stages/sqnr/deployed", 7] == 2.5
    assert found["stages/step_sqnr/prepared", 7] == 132.0
    assert ("stages/sqnr/eager", 7) not in found
