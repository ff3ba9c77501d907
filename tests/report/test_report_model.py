"""Reports are facts: they rank without meeting a nan, refuse what cannot be, and export every number unrounded."""

from __future__ import annotations

import csv
import io
from dataclasses import FrozenInstanceError, fields, replace
from math import inf, isnan, nan

import numpy as np
import pandas as pd
import pytest

from pt2qa._report.rows import columns_of, from_columns, to_columns
from pt2qa.errors import ReportError
from pt2qa.report import Environment, LayerReport, LayerRow, WeightRow

EXTENDED = ["range_use", "note", "part_of", "step", "answers_for", "input_sqnr", "excess_lsb", "inputs", "nonfinite"]
COLUMNS = [
    "handle",
    "name",
    "module",
    "op",
    "observed_at",
    "dtype",
    "scale",
    "zero_point",
    "shape",
    "sqnr",
    "isolated_sqnr",
    "rounding_sqnr",
    "mse",
    "cosine",
    "l1",
    "atol",
    "max_lsb",
    "saturation",
    "ref_min",
    "quant_min",
    "ref_max",
    "quant_max",
    "ref_mean",
    "quant_mean",
]


def test_rows_and_reports_cannot_be_changed(layers, weights):
    for fact, name in ((layers, "rows"), (layers.rows[0], "sqnr"), (weights.rows[0], "sqnr")):
        with pytest.raises(FrozenInstanceError):
            setattr(fact, name, None)


@pytest.mark.parametrize("row_type", [LayerRow, WeightRow])
def test_every_field_of_a_row_is_explained(row_type):
    for field in fields(row_type):
        assert field.name in row_type.__doc__


def test_pandas_columns_are_the_fixed_ones_in_order(layers):
    frame = layers.to_pandas()
    assert list(frame.columns) == COLUMNS
    assert list(layers.to_pandas(extended=True).columns) == [*COLUMNS, *EXTENDED]
    assert len(frame) == 26
    assert list(frame["handle"]) == list(range(26))


def test_pandas_dtypes_and_missing_zero_points(layers):
    frame = layers.to_pandas()
    assert frame["zero_point"].dtype == pd.Int64Dtype()
    assert frame["zero_point"][0] == -3
    assert frame["zero_point"][12] is pd.NA
    assert frame["handle"].dtype == np.int64
    assert frame["sqnr"].dtype == np.float64
    assert frame["shape"][0] == (8, 32, 14, 14)
    assert np.isposinf(frame["sqnr"][0])
    assert np.isnan(frame["sqnr"][9])


def test_pandas_of_other_parts_of_weights_and_of_nothing(layers, weights, empty):
    assert list(layers.to_pandas(part="outputs")["name"]) == ["output"]
    assert list(layers.to_pandas(part="modules")["op"]) == ["InvertedResidual"]
    assert list(weights.to_pandas(extended=True).columns) == [field.name for field in fields(WeightRow)]
    assert list(weights.to_pandas().columns) == [field.name for field in fields(WeightRow) if field.name != "quantized"]
    assert list(weights.to_pandas()["dead_channels"]) == [0, 2, 0, 0, 0]
    nothing = empty.to_pandas()
    assert list(nothing.columns) == COLUMNS
    assert nothing["zero_point"].dtype == pd.Int64Dtype()


def test_custom_metrics_are_columns_at_the_end(layers, layer):
    report = replace(layers, rows=(layer(custom={"psnr": 30.0, "ssim": nan}),), outputs=(), modules=())
    assert list(report.to_pandas().columns) == [*COLUMNS, "psnr", "ssim"]
    assert list(report.to_pandas(extended=True).columns) == [*COLUMNS, *EXTENDED, "psnr", "ssim"]
    assert report.csv().splitlines()[0].endswith("quant_mean,psnr,ssim")


def test_csv_keeps_full_precision_and_reads_back(layers, tmp_path):
    exact = 1 / 3
    report = replace(layers, rows=(replace(layers.rows[0], mse=exact, name='a, "b"'), layers.rows[9]))
    (row, other) = csv.DictReader(io.StringIO(report.csv()))
    assert float(row["mse"]) == exact
    assert row["name"] == 'a, "b"'
    assert row["shape"] == "8x32x14x14"
    assert float(row["sqnr"]) == inf
    assert isnan(float(other["sqnr"]))
    report.to_csv(tmp_path / "layers.csv", extended=True)
    text = (tmp_path / "layers.csv").read_text(encoding="utf-8")
    assert text == report.csv(extended=True)
    assert text.splitlines()[0] == ",".join([*COLUMNS, *EXTENDED])


def test_csv_into_a_missing_folder_is_refused(weights, tmp_path):
    with pytest.raises(ReportError, match=r"cannot write .*gone.weights\.csv: the folder .*gone does not exist"):
        weights.to_csv(tmp_path / "gone" / "weights.csv")


def test_the_models_sqnr_is_the_smallest_of_its_outputs(layers, layer, empty):
    outputs = tuple(layer(name=f"output[{i}]", sqnr=value) for i, value in enumerate((30.0, nan, 12.5, inf)))
    assert replace(layers, outputs=outputs).sqnr == 12.5
    assert isnan(replace(layers, outputs=outputs[1:2]).sqnr)
    assert isnan(empty.sqnr)


def test_worst_first_by_isolated_then_by_cumulative_and_nan_last(layers, layer):
    values = [(nan, 1.0), (30.0, 20.0), (inf, inf), (30.0, 10.0), (-3.0, nan), (nan, nan), (30.0, nan)]
    rows = tuple(layer(handle=i, isolated_sqnr=own, sqnr=total) for i, (own, total) in enumerate(values))
    report = replace(layers, rows=rows)
    assert [row.handle for row in report.worst(7)] == [4, 3, 1, 6, 2, 0, 5]
    assert [row.handle for row in report.worst(2)] == [4, 3]


@pytest.mark.parametrize(
    ("by", "expected"),
    [("cosine", 25), ("mse", 25), ("saturation", 7), ("handle", 0), ("name", 1), ("sqnr", 7)],
)
def test_worst_knows_which_way_is_worse(layers, by, expected):
    assert layers.worst(1, by=by)[0].handle == expected


def test_worst_by_a_custom_metric_is_largest_first(layers, layer):
    rows = tuple(layer(handle=i, custom={"drift": value}) for i, value in enumerate((1.0, nan, 3.0)))
    report = replace(layers, rows=rows, outputs=(), modules=())
    assert [row.handle for row in report.worst(3, by="drift")] == [2, 0, 1]


def test_an_unknown_column_is_refused_with_the_near_name(layers, weights):
    with pytest.raises(ReportError, match=r"cannot sort by 'cosin': did you mean 'cosine'\? expected worst, graph, or"):
        layers.worst(1, by="cosin")
    with pytest.raises(ReportError, match=r"cannot sort by 'zzzz': expected worst, graph, or one of handle, name"):
        weights.worst(1, by="zzzz")


def test_weights_know_whether_they_are_quantized(weights):
    assert [row.quantized for row in weights.rows] == [True, True, True, False, False]
    assert [row.name for row in weights.worst(2)] == ["features.1/conv2d", "classifier.1/linear"]


def test_a_fractional_zero_point_is_refused(layer):
    with pytest.raises(ReportError, match=r"zero_point of 'features\.0/conv2d': got 0\.5, expected a whole number"):
        layer(zero_point=0.5)


def test_rows_with_unequal_custom_metrics_are_refused(layers, layer):
    rows = (layer(name="a", custom={"psnr": 1.0}), layer(name="b", custom={"psnr": 1.0, "ssim": 2.0}))
    with pytest.raises(ReportError, match=r"row 'b': custom metrics differ from those of row 'a' \(ssim\); give every"):
        replace(layers, rows=rows)


def test_a_custom_metric_cannot_take_a_columns_name(layers, layer):
    with pytest.raises(ReportError, match="custom metric 'mse': a column of that name exists"):
        replace(layers, rows=(layer(custom={"mse": 1.0}),), outputs=(), modules=())


def test_columns_and_rows_are_two_forms_of_one_thing(layers, layer):
    assert from_columns(LayerRow, to_columns(LayerRow, layers.rows[:5])) == layers.rows[:5]
    assert from_columns(LayerRow, to_columns(LayerRow, ())) == ()
    rows = (layer(custom={"a": 1.0, "b": 2.0}),)
    assert from_columns(LayerRow, to_columns(LayerRow, rows)) == rows


def test_a_row_class_with_a_field_that_no_column_holds_is_refused():
    with pytest.raises(TypeError, match=r"LayerReport\.environment: a column cannot hold"):
        columns_of(LayerReport)


def test_repr_is_short(layers, weights):
    assert repr(layers) == "<LayerReport of MobileNetV2, xnnpack: 26 rows, output SQNR 13.46 dB>"
    assert repr(weights) == "<WeightReport of MobileNetV2, xnnpack: 5 weights>"


def test_the_environment_states_what_is_installed():
    here = Environment.here("3f2a")
    assert here.torch.startswith("2.")
    assert here.fingerprint == "3f2a"
