"""Annotation reports and their differences come back from files, fit the screen, and read as the golden files say."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
from click.testing import CliRunner

from pt2qa.cli import main
from pt2qa.errors import ReportError
from pt2qa.report import (
    AnnotationCoverage,
    AnnotationDiff,
    AnnotationDiffRow,
    AnnotationReport,
    AnnotationRow,
    Environment,
    ModuleCalls,
    load,
)

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")
PLAIN = AnnotationRow(
    name="features.0.0/conv2d",
    module="features.0.0",
    op="conv2d",
    role="input",
    argument=0,
    of="x",
    dtype="int8",
    scheme="per_tensor_affine",
    axis=-1,
    observer="HistogramObserver",
    quant_min=-128,
    quant_max=127,
    dynamic=False,
    scale=0.02125,
    zero_point=-14.0,
    shares="",
    annotated=True,
    quantized=True,
    site=0,
    note="",
)


def in_float(row: AnnotationRow, **changes: object) -> AnnotationRow:
    plain = replace(
        row,
        dtype="float32",
        scheme="",
        axis=-1,
        observer="",
        quant_min=0,
        quant_max=0,
        scale=nan,
        zero_point=nan,
        annotated=False,
        quantized=False,
        site=-1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def weight(row: AnnotationRow) -> AnnotationRow:
    return replace(
        row,
        role="weight",
        argument=1,
        of="features.0.0.weight",
        scheme="per_channel_symmetric",
        axis=0,
        observer="PerChannelMinMaxObserver",
        quant_min=-127,
        scale=0.0031,
        zero_point=0.0,
        site=1,
    )


@pytest.fixture
def report() -> AnnotationReport:
    """An input, a convolution with a relu, a pool that shares its scale, a sigmoid that stays float."""
    made = replace(
        PLAIN, name="features.0.2/relu", op="relu", role="output", argument=-1, of="features.0.2/relu", site=2
    )
    pool = replace(made, name="max_pool2d", op="max_pool2d", of="max_pool2d", shares="features.0.2/relu", site=3)
    gate = replace(PLAIN, name="gate/sigmoid", op="sigmoid", of="max_pool2d", site=3)
    rows = (
        replace(PLAIN, name="x", module="", op="input", role="output", argument=-1, of="x", annotated=False),
        PLAIN,
        weight(PLAIN),
        in_float(PLAIN, role="bias", argument=2, of="features.0.0.bias"),
        in_float(PLAIN, role="output", argument=-1, of="features.0.0/conv2d"),
        in_float(
            PLAIN,
            name="features.0.1/batch_norm",
            op="batch_norm",
            role="output",
            argument=-1,
            of="features.0.1/batch_norm",
            note="folded into features.0.0/conv2d",
        ),
        in_float(PLAIN, name="features.0.2/relu", op="relu", of="features.0.0/conv2d"),
        replace(made, shares="max_pool2d"),
        replace(pool, role="input", argument=0, of="features.0.2/relu", site=2),
        pool,
        in_float(gate, annotated=True, note="int8 was requested, but the converted model does not round here"),
        in_float(gate, role="output", argument=-1, of="gate/sigmoid"),
    )
    return AnnotationReport(
        rows=rows,
        modules=(
            ModuleCalls("features.0", "ConvNormActivation", 1, 2, 1, ""),
            ModuleCalls("gate", "Gate", 2, 1, 0, ""),
            ModuleCalls("head", "", 0, 0, 0, "never called; nothing reads its parameters"),
        ),
        coverage=(
            AnnotationCoverage("conv2d", 1, 1, 1, 0),
            AnnotationCoverage("relu", 1, 1, 0, 0),
            AnnotationCoverage("max_pool2d", 1, 1, 1, 0),
            AnnotationCoverage("sigmoid", 1, 1, 0, 1),
        ),
        basis="annotated and converted",
        notes=("overrides: 1 float",),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


@pytest.fixture
def diff() -> AnnotationDiff:
    """Changes of two kinds, and a place on either side."""
    changed = AnnotationDiffRow(
        *("features.0.0/conv2d", "input", 0, "x", "changed", "dtype int8 -> uint8; range -128..127 -> 0..255"),
        kind="dtype int8 -> uint8\nrange -128..127 -> 0..255",
    )
    return AnnotationDiff(
        rows=(
            changed,
            replace(
                changed,
                role="output",
                argument=-1,
                of="features.0.0/conv2d",
                what="dtype int8 -> uint8; shares max_pool2d -> none",
                kind="dtype int8 -> uint8\nshares",
            ),
            AnnotationDiffRow("mean", "input", 0, "cat", "only in a", "int8 per_tensor_affine, and float32 in b"),
            AnnotationDiffRow("fc/linear", "output", -1, "fc/linear", "only in b", "float32, and a has no such place"),
        ),
        a="xnnpack",
        b="x86:reduce_range=true",
        equal_quantized=17,
        equal_float=9,
        notes=("the two models differ in ops or parameters: their fingerprints are 3f2a and 77ab",),
        model="Net",
        environment=HERE,
    )


def test_they_come_back_from_their_files(report: AnnotationReport, diff: AnnotationDiff, tmp_path) -> None:
    for made in (report, diff):
        made.save(tmp_path / "r.safetensors")
        back = load(tmp_path / "r.safetensors")
        assert repr(back) == repr(made)
        assert back.text(width=100) == made.text(width=100)
        assert back.csv(extended=True) == made.csv(extended=True)
    assert bool(load(tmp_path / "r.safetensors"))


@pytest.mark.parametrize("width", [80, 120])
def test_text(report: AnnotationReport, golden, width: int) -> None:
    golden(f"annotations-{width}", report.text(width=width))


def test_text_before_calibration(report: AnnotationReport, golden) -> None:
    rows = tuple(replace(row, scale=nan, zero_point=nan, site=-1, note="") for row in report.rows)
    golden("annotations-annotated", replace(report, rows=rows, basis="annotated", notes=()).text(width=100))


def test_text_of_a_graph_from_elsewhere(report: AnnotationReport, golden) -> None:
    rows = tuple(replace(row, observer="", shares="", annotated=False) for row in report.rows)
    coverage = tuple(replace(kind, annotated=-1) for kind in report.coverage)
    golden("annotations-converted", replace(report, rows=rows, coverage=coverage, basis="converted").text(width=100))


@pytest.mark.parametrize("width", [80, 120])
def test_text_of_a_difference(diff: AnnotationDiff, golden, width: int) -> None:
    golden(f"annotation-diff-{width}", diff.text(width=width))


def test_text_of_no_difference(diff: AnnotationDiff) -> None:
    text = replace(diff, rows=(), notes=()).text(width=100)
    assert text.endswith("No difference: 26 places alike, 17 quantized.")
    assert "differs" not in text


@pytest.mark.parametrize("sort", ["worst", "graph", "name", "role", "dtype", "scale", "annotated", "site", "shares"])
@pytest.mark.parametrize("width", [40, 77])
def test_fits_the_screen(report: AnnotationReport, sort: str, width: int) -> None:
    assert max(map(len, report.text(sort=sort, width=width).splitlines())) <= width
    assert max(map(len, report.table(sort=sort, width=width).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 77])
def test_a_difference_fits_the_screen(diff: AnnotationDiff, width: int) -> None:
    assert max(map(len, diff.text(width=width).splitlines())) <= width


def test_sorts(report: AnnotationReport) -> None:
    assert report.table("worst") == report.table("graph")
    first = report.table("op", width=200).partition("--\n")[2].splitlines()[0]
    assert first.split()[:2] == ["features.0.1/batch_norm", "batch_norm"]
    with pytest.raises(ReportError, match="cannot sort by 'rol': did you mean 'role'"):
        report.table("rol")


def test_columns(report: AnnotationReport, diff: AnnotationDiff) -> None:
    fixed = [
        *("name", "module", "op", "role", "argument", "of", "dtype", "scheme", "axis", "observer", "quant_min"),
        *("quant_max", "dynamic", "scale", "zero_point", "shares", "annotated", "quantized"),
    ]
    frame = report.to_pandas()
    assert list(frame.columns) == fixed
    assert frame["annotated"].dtype == bool
    assert str(frame["zero_point"].dtype) == "Int64"
    assert list(report.to_pandas(extended=True).columns) == [*fixed, "site", "note", "options", "group"]
    assert list(report.to_pandas(part="modules").columns) == ["path", "type", "calls", "ops", "quantized", "note"]
    assert report.to_pandas(part="coverage")["annotated"].sum() == 4
    assert report.csv().splitlines()[0] == ",".join(fixed)
    assert list(diff.to_pandas().columns) == ["name", "role", "argument", "of", "status", "what"]


def test_places_of_one_op(report: AnnotationReport) -> None:
    assert [row.role for row in report.of("features.0.0/conv2d")] == ["input", "weight", "bias", "output"]
    assert report.of("no such op") == ()


def test_a_basis_is_one_of_three(report: AnnotationReport) -> None:
    with pytest.raises(ReportError, match="basis: got 'guessed', expected one of annotated and converted"):
        replace(report, basis="guessed")


def test_the_command_shows_them(report: AnnotationReport, diff: AnnotationDiff, tmp_path) -> None:
    for made in (report, diff):
        made.save(tmp_path / "r.safetensors")
        shown = CliRunner().invoke(main, ["show", str(tmp_path / "r.safetensors"), "--width", "100"])
        assert shown.exit_code == 0
        assert shown.stdout.strip() == made.text(width=100)
