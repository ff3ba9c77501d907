"""A reconfiguration prints its edits, the curve and the stages, and sorts by any column."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, replace
from math import nan
from pathlib import Path

import pytest

from pt2qa.errors import ReportError
from pt2qa.report import CurvePoint, EditRow, Environment, Reconfiguration, Stage, load

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")


@pytest.fixture
def report() -> Reconfiguration:
    """Three edits of a search over sixteen, two of which were measured."""
    rows = (
        EditRow("features.0/conv2d", "fuse", 0.0, 0.41, 1, "features.0/conv2d,features.1/hardtanh"),
        EditRow("features.4/conv2d", "float", 0.062, 0.2, 3, "features.4/conv2d"),
        EditRow("head/linear", "float", 0.011, 0.05, 2, "head/linear"),
    )
    curve = tuple(
        CurvePoint(f"features.{n}/conv2d", n, 0.02 * n, 0.01 * n, 10.0 + n, 9.5 + n if n in (3, 15) else nan)
        for n in range(16)
    )
    stages = (
        Stage("before", 8.61, 0.0, 162),
        Stage("simulated", 18.76, 0.073, 156),
        Stage("converted", 18.76, 0.073, 156),
    )
    return Reconfiguration(
        rows=rows,
        curve=curve,
        stages=stages,
        target="sqnr >= 18 dB",
        met=1,
        verdict="Met: 18.76 dB with 7.3 % of the multiply-accumulates in float.",
        evaluations=12,
        plan_json='{"edits": []}',
        code="quantizer = ...",
        notes=("the observers' statistics were reused",),
        quantizer="xnnpack",
        model="EfficientNet",
        environment=HERE,
    )


@pytest.mark.parametrize("width", [100, 60])
def test_text(report: Reconfiguration, golden: Callable[[str, str], None], width: int) -> None:
    text = report.text(width=width)
    golden(f"reconfiguration-{width}", text)
    assert max(map(len, text.splitlines())) <= width


def test_text_without_edits(report: Reconfiguration, golden: Callable[[str, str], None]) -> None:
    nothing = replace(report, rows=(), curve=(), met=0, verdict="Cannot be met: 8.61 dB is the best.")
    golden("reconfiguration-none", nothing.text(width=80))


@pytest.mark.parametrize("column", [field.name for field in fields(EditRow)])
def test_edits_sort_by_every_column(report: Reconfiguration, column: str) -> None:
    lines = report.table(sort=column, width=160).splitlines()
    assert sum("features.0/conv2d" in line for line in lines) == 1
    assert len([line for line in lines if "conv2d" in line or "linear" in line]) == 3
    if column == "macs":
        assert [line.split()[0] for line in lines[-3:]] == ["features.4/conv2d", "head/linear", "features.0/conv2d"]


def test_an_unknown_column_is_an_error(report: Reconfiguration) -> None:
    with pytest.raises(ReportError, match="cannot sort by 'speed'"):
        report.table(sort="speed")


def test_round_trip(report: Reconfiguration, tmp_path: Path) -> None:
    report.save(tmp_path / "reconfiguration.safetensors")
    again = load(tmp_path / "reconfiguration.safetensors")
    assert isinstance(again, Reconfiguration)
    assert str(again) == str(report)
    with pytest.raises(ReportError, match="has no pair: it was loaded from a file"):
        again.pair  # noqa: B018


def test_a_copy_has_the_pair_too(report: Reconfiguration) -> None:
    assert copy(report.with_pair("the new pair")).pair == "the new pair"


def test_the_code_can_be_saved_and_what_came_of_it_is_said(report: Reconfiguration, tmp_path: Path) -> None:
    report.save_code(tmp_path / "quantizer.py")
    assert (tmp_path / "quantizer.py").read_text() == "quantizer = ..."
    assert report.code_verified == ""
    assert "quantizer.py" not in str(report)
    differs = replace(report, code_verified="differs: outputs agree to 49.4 dB, first at a/linear")
    assert differs.summary().splitlines()[-1] == (
        "report.code (quantizer.py) against the new pair, bit for bit: differs: outputs agree to "
        "49.4 dB, first at a/linear."
    )
