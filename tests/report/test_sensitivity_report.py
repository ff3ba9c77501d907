"""A sensitivity report comes back from its file, says whether errors add up, and fits the screen."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pt2qa.errors import ReportError
from pt2qa.report import (
    Environment,
    SensitivityBatch,
    SensitivityPart,
    SensitivityReport,
    SensitivityRow,
    SetApart,
    gate,
    load,
)

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")


def row(number: int, noise: float, rank: int, **changes: object) -> SensitivityRow:
    plain = SensitivityRow(
        name=f"features.{number}.conv.1.0/conv2d",
        kind="weight" if number % 2 else "activation",
        op="conv2d",
        value=10 * np.log10(100 / noise).item() if noise else inf,
        dtype="int8",
        flops=1000 * number,
        flops_share=number / 10,
        site=number,
        handle=2 * number,
        module=f"features.{number}.conv.1.0",
        region=number,
        noise=noise,
        noise_share=noise / 4,
        error=0.4 if noise else 0.0,
        rank=rank,
        near_tie=noise < 1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture
def report() -> SensitivityReport:
    """Four sites: one dominates, two are near each other, one has no effect."""
    return SensitivityReport(
        rows=(row(0, 0.5, 2), row(1, 3.0, 1), row(2, 0.5, 3), row(3, 0.0, 4)),
        outputs=("output",),
        method="projection",
        metric="sqnr",
        worst_is="smallest",
        group="site",
        projections=4,
        planned=4,
        signal=100.0,
        noise=4.4,
        value=13.57,
        batches=2,
        samples=16,
        notes=("no axis of independent samples at mean: projected for the whole batch at once",),
        quantizer="xnnpack",
        model="MobileNetV2",
        environment=HERE,
        data=(SensitivityBatch("ab", 8, 50.0), SensitivityBatch("cd", 8, 50.0)),
        parts=tuple(SensitivityPart(place, batch, 0.25, 0.01) for batch in range(2) for place in range(-1, 4)),
    )


def test_comes_back_from_its_file(report: SensitivityReport, tmp_path) -> None:
    report.save(tmp_path / "sensitivity.safetensors")
    back = load(tmp_path / "sensitivity.safetensors")
    assert back == report
    assert [type(each.near_tie) for each in back.rows] == [bool] * 4


def test_batches_set_apart_come_first(report: SensitivityReport, tmp_path) -> None:
    apart = replace(report, set_apart=(SetApart(1, 8, 3, "quantized", "NaN", "log"),))
    apart.save(tmp_path / "r.safetensors")
    assert load(tmp_path / "r.safetensors") == apart
    assert apart.summary().startswith(
        "Quantization fails on 1 of 3 batches: NaN in the quantized model alone, first at log (batch 1, sample 3)."
    )
    assert "batch 1, sample 3: NaN in the quantized model alone, first at log" in apart.text(width=100)
    assert not gate(apart, require="measured_sqnr>=1").passed


@settings(max_examples=60, deadline=None)
@given(st.floats(), st.floats(), st.booleans(), st.integers(0, 2**62))
def test_numbers_come_back_whatever_they_are(tmp_path_factory, signal, value, near_tie, flops) -> None:
    path = tmp_path_factory.mktemp("report") / "r.safetensors"
    only = row(1, 1.0, 1, value=value, near_tie=near_tie, flops=flops)
    made = SensitivityReport(
        (only,),
        (),
        "exact",
        "kl",
        "largest",
        "site",
        0,
        1,
        signal,
        1.0,
        value,
        (),
        (),
        batches=1,
        samples=1,
        notes=(),
        environment=HERE,
    )
    made.save(path)
    assert repr(load(path).rows) == repr(made.rows)
    assert repr(load(path).signal) == repr(signal)


@pytest.mark.parametrize(("text", "got"), [("true", "true"), ('"5"', '"5"'), ("5", "5")])
def test_a_number_of_another_type_is_refused(report: SensitivityReport, tmp_path, text: str, got: str) -> None:
    path = tmp_path / "r.safetensors"
    report.save(path)
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        metadata = dict(file.metadata())
    save_file(load_file(path), path, {**metadata, "signal": text})
    with pytest.raises(ReportError, match=f"field 'signal' holds {got}, expected a number"):
        load(path)


def test_a_mark_must_be_a_mark(report: SensitivityReport, tmp_path) -> None:
    path = tmp_path / "r.safetensors"
    report.save(path)
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        metadata = dict(file.metadata())
    save_file({**load_file(path), "rows/near_tie": np.zeros(4, np.int64)}, path, metadata)
    with pytest.raises(ReportError, match=r"'rows/near_tie' holds int64 of shape \(4,\), expected one column of bool"):
        load(path)


@pytest.mark.parametrize("width", [60, 100])
def test_text(report: SensitivityReport, golden, width: int) -> None:
    golden(f"sensitivity-{width}", report.text(width=width))


@pytest.mark.parametrize("sort", ["worst", "graph", "name", "value", "flops", "noise", "near_tie", "rank", "error"])
@pytest.mark.parametrize("width", [40, 77])
def test_fits_the_screen(report: SensitivityReport, sort: str, width: int) -> None:
    assert max(map(len, report.text(sort=sort, width=width).splitlines())) <= width


def test_sorts(report: SensitivityReport) -> None:
    assert [each.site for each in report.worst(2)] == [1, 0]
    assert report.table("value") == report.table("worst")
    assert report.table("worst", width=200).splitlines()[3].split()[1].startswith("features.1")
    assert report.table("flops", width=200).splitlines()[3].split()[0] == "4"
    with pytest.raises(ReportError, match="cannot sort by 'flop': did you mean 'flops'"):
        report.table("flop")


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (4.4, "errors add up, within 1 dB"),
        (6.0, "errors add up roughly, within 3 dB"),
        (40.0, "errors do not add up, they are worse together"),
        (0.4, "errors do not add up, they cancel or saturate together"),
        (nan, "the noise of the rows adds up to 14.0 dB"),
    ],
)
def test_says_whether_errors_add_up(report: SensitivityReport, noise: float, says: str) -> None:
    assert says in " ".join(str(replace(report, noise=noise)).split())


def test_a_report_of_missing_rows_predicts_nothing(report: SensitivityReport) -> None:
    part = replace(report, planned=7)
    assert part.predicted_sqnr != part.predicted_sqnr
    assert "3 of 7 rows are missing" in str(part)


def test_another_metric_is_shown_by_its_name(report: SensitivityReport) -> None:
    text = replace(report, metric="kl", worst_is="largest", projections=0, method="exact").text(width=100)
    assert "largest kl first" in text
    assert "±" not in text
    assert "SQNR" not in text.split("rank")[1].split("Notes")[0]


def test_columns(report: SensitivityReport) -> None:
    fixed = ["name", "kind", "op", "value", "dtype", "flops", "flops_share"]
    extended = ["site", "handle", "module", "region", "noise", "noise_share", "error", "rank", "near_tie"]
    assert list(report.to_pandas().columns) == fixed
    table = report.to_pandas(extended=True)
    assert list(table.columns) == fixed + extended
    assert table["near_tie"].dtype == bool
    assert report.csv().splitlines()[0] == ",".join(fixed)
    assert repr(report) == ("<SensitivityReport of MobileNetV2, xnnpack: 4 sites, projection, output SQNR 13.57 dB>")
