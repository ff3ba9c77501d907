"""Candidates come back from their file, and their tables fit the screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from pt2qa.errors import ReportError
from pt2qa.report import Candidate, CandidateReport, CandidateRow, Environment, load

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")


@pytest.fixture
def report() -> CandidateReport:
    """Three candidates: two near each other, one that failed."""
    rows = [CandidateRow(-1, "output", "", "output", {"per channel": 21.25, "x86": 21.5})]
    rows += [
        CandidateRow(
            i, f"features.{i}.conv/conv2d", f"features.{i}.conv", "conv2d", {"per channel": 40.0 - i, "x86": nan}
        )
        for i in range(25)
    ]
    candidates = (
        Candidate("per channel", "xnnpack", 21.25, 53, 53, 102, 53, 3_542_000),
        Candidate("x86", "x86:reduce_range=true", 21.5, 52, 53, 55, 52, 3_800_000),
        Candidate("broken", "x86:modules=nothing", nan, 0, 0, 0, 0, 0, "modules: got 'nothing', expected a mapping"),
    )
    return CandidateReport(
        tuple(rows), candidates, notes=("x86: 2 ops fell back",), batches=2, samples=16, model="Net", environment=HERE
    )


@pytest.mark.parametrize("width", [100, 60])
def test_text(report: CandidateReport, golden: Callable[[str, str], None], width: int) -> None:
    text = report.text(width=width)
    golden(f"candidates-{width}", text)
    assert max(map(len, text.splitlines())) <= width


def test_rows_can_be_sorted_by_a_candidate_the_worst_first(report: CandidateReport) -> None:
    by_candidate = report.table(sort="per channel", limit=None, width=100).splitlines()
    assert "features.24" in by_candidate[2]
    assert by_candidate[8].startswith("output")
    assert report.table(sort="x86", limit=1, width=100).splitlines()[2].startswith("output")
    assert "features.0." in report.table(sort="graph", limit=2, width=100).splitlines()[3]
    with pytest.raises(ReportError, match="cannot sort by 'y86'"):
        report.table(sort="y86")


def test_the_best_is_the_largest_and_those_near_it_are_named(report: CandidateReport) -> None:
    assert report.best is not None
    assert report.best.name == "x86"
    assert report.sqnr == 21.5
    assert "per channel is within 0.5 dB of it" in report.summary()
    assert "broken failed: modules: got 'nothing'" in report.summary()
    nothing = replace(report, candidates=report.candidates[2:], rows=())
    assert nothing.best is None
    assert nothing.summary().startswith("No candidate could be run.")
    assert repr(nothing) == "<CandidateReport of Net: 1 candidates, none ran>"


def test_round_trip(report: CandidateReport, tmp_path: Path) -> None:
    report.save(tmp_path / "candidates.safetensors")
    again = load(tmp_path / "candidates.safetensors")
    assert isinstance(again, CandidateReport)
    assert str(again) == str(report)
    assert again.candidates[:2] == report.candidates[:2]
    assert list(again.to_pandas().columns) == ["handle", "name", "module", "op", "per channel", "x86"]
