"""A conformance report comes back from its file, counts by property, and tells each failure with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pt2qa.errors import ReportError
from pt2qa.report import ConformanceReport, ConformanceRow, Environment, ModelCoverage, load

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "")
FLOAT = "functional: nothing is annotated; before, 3 places are"


def row(name: str, model: str, outcome: str, why: str, seconds: float = 0.25) -> ConformanceRow:
    return ConformanceRow("xnnpack", name, model, outcome, why, seconds)  # type: ignore[arg-type]


@pytest.fixture
def report() -> ConformanceReport:
    """Two properties on four models: two fail alike, one in another way, one model is not annotated."""
    return ConformanceReport(
        rows=(
            row("prepare", "conv_relu", "passed", "a prepared graph", 1.5),
            row("spelling", "conv_relu", "failed", FLOAT),
            row("prepare", "linear", "passed", "a prepared graph"),
            row("spelling", "linear", "failed", "subclass: output of fc/linear is float, not int8 per_tensor_affine"),
            row("prepare", "conv_bn", "passed", "a prepared graph"),
            row("spelling", "conv_bn", "failed", FLOAT),
            row("prepare", "lstm", "skipped", "nothing is annotated"),
            row("spelling", "lstm", "does not apply", "the model has one spelling"),
        ),
        coverage=(
            ModelCoverage("conv_relu", "convolution, ReLU", 2, 2),
            ModelCoverage("linear", "two linears", 2, 2),
            ModelCoverage("conv_bn", "convolution, batch norm", 1, 1),
            ModelCoverage("lstm", "an LSTM, which is one op", 2, 0),
        ),
        notes=("each graph was annotated by a new quantizer from the plug-in",),
        quantizer="xnnpack",
        environment=HERE,
        models=44,
        properties=17,
    )


def test_comes_back_from_its_file(report: ConformanceReport, tmp_path) -> None:
    report.save(tmp_path / "conformance.safetensors")
    assert load(tmp_path / "conformance.safetensors") == report


@pytest.mark.parametrize("width", [60, 100])
def test_text(report: ConformanceReport, golden, width: int) -> None:
    golden(f"conformance-{width}", report.text(width=width))


@pytest.mark.parametrize("sort", ["worst", "graph", "name", "outcome", "seconds", "model", "why"])
@pytest.mark.parametrize("width", [40, 77])
def test_fits_the_screen(report: ConformanceReport, sort: str, width: int) -> None:
    for text in (report.text(sort=sort, width=width), report.table(sort, width=width)):
        assert max(map(len, text.splitlines())) <= width


def test_the_table_shows_failures_first(report: ConformanceReport) -> None:
    lines = report.table(width=120).splitlines()
    assert [line.split()[1] for line in lines[2:]][:4] == ["conv_relu", "linear", "conv_bn", "conv_relu"]
    assert [line.split()[0] for line in report.table("graph", width=120).splitlines()[2:4]] == ["prepare", "spelling"]
    assert report.table("seconds", limit=1, width=120).splitlines()[-1].startswith("7 more rows")
    with pytest.raises(ReportError, match="cannot sort by 'second': did you mean 'seconds'"):
        report.table("second")


def test_the_limit_is_for_the_failures_of_a_property(report: ConformanceReport) -> None:
    text = report.text(limit=1, width=200)
    assert f"  conv_relu, conv_bn: {FLOAT}\n  and 1 more" in text


def test_passed_needs_something_that_passed_and_nothing_that_failed(report: ConformanceReport) -> None:
    assert not report.passed
    assert [each.model for each in report.failures] == ["conv_relu", "linear", "conv_bn"]
    good = replace(report, rows=report.rows[::2])
    assert good.passed
    assert "No failure in the 1 of 17 properties, on the 4 of 44 models that ran." in str(good)
    assert "No failure on the 4 of 44 models that ran." in str(replace(good, properties=1))
    assert "No failure in the 1 properties, on the 4 models that ran." in str(replace(good, models=0, properties=0))
    assert "Passes: nothing failed." in str(replace(good, models=4, properties=1))
    idle = replace(report, rows=report.rows[-2:])
    assert not idle.passed
    assert "Shows nothing: no property could be checked" in str(idle)


def test_columns(report: ConformanceReport) -> None:
    fixed = ["quantizer", "property", "model", "outcome", "why"]
    assert list(report.to_pandas().columns) == fixed
    assert list(report.to_pandas(extended=True).columns) == [*fixed, "seconds"]
    assert report.csv().splitlines()[1] == "xnnpack,prepare,conv_relu,passed,a prepared graph"
    assert repr(report) == "<ConformanceReport of xnnpack: 3 of 8 failed>"
    assert report.seconds == 3.25
