"""Batches that are empty or hold NaN: said, counted, and in no number; the other batches keep theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._report.html.page import sections_of
from pt2qa.report import Change, SetApart
from tests.flows import quantized_pair
from tests.layers.test_layers import ShareOff
from tests.models import images, residual
from tests.simulator.test_nonfinite import Attention, Logarithm

BATCHES = [images(3, seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized_pair(residual(), (images(6),), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.fixture(scope="module")
def logarithm() -> pt2qa.QuantizedPair:
    return quantized_pair(Logarithm(), (torch.linspace(0.5, 4, 16).reshape(4, 4),))


def layers(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.LayerReport:
    return pt2qa.compare_layers(pair, batches, progress=False, **options)


def modules(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.LayerReport:
    return pt2qa.compare_modules(pair, batches, modules=["conv2", "fc"], progress=False, **options)


def spoilt(value: float = math.nan) -> Tensor:
    batch = images(3, seed=9)
    batch[1, 0, 0, 0] = value
    return batch


def tiny() -> Tensor:
    """A batch that the logarithm's quantized input rounds to zero in its third sample."""
    x = torch.ones(4, 4)
    x[2, 3] = 1e-4
    return x


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("compare", [layers, modules])
def test_one_spoilt_batch_of_four_leaves_the_numbers_of_the_others(
    pair: pt2qa.QuantizedPair, compare: Callable[..., pt2qa.LayerReport], value: float
) -> None:
    metrics = {"off": ShareOff(0.01)}
    report = compare(pair, [BATCHES[0], spoilt(value), *BATCHES[1:]], metrics=metrics)
    clean = compare(pair, BATCHES, metrics=metrics)
    what = "NaN" if math.isnan(value) else "infinite"
    assert report.set_apart == (SetApart(1, 3, 1, "batch", what, "x"),)
    assert (report.batches, report.samples, report.batches_apart) == (4, 12, 1)
    assert (report.rows, report.outputs) == (clean.rows, clean.outputs)
    assert math.isfinite(report.sqnr)
    said = report.summary().splitlines()
    assert (
        said[0]
        == f"The input data contain NaN or infinities in 1 of 4 batches: {what} in the input x (batch 1, sample 1)."
    )
    assert said[1].startswith("The numbers are of the other 3 batches, 9 samples; ")
    assert said[1].endswith(" % of the input values outside the calibrated range.")
    assert f"batch 1, sample 1: {what} in the input x" in str(report)
    assert "Nothing stands out" not in str(report)
    assert "set apart" not in str(clean)


def test_an_empty_batch_is_counted_and_several_of_them_alone_are_an_error(pair: pt2qa.QuantizedPair) -> None:
    empty = images()[:0]
    report = layers(pair, [empty, *BATCHES, empty])
    assert report.rows == layers(pair, BATCHES).rows
    assert report.set_apart == (SetApart(0, 0, -1, "batch", "no samples"), SetApart(4, 0, -1, "batch", "no samples"))
    assert (report.batches, report.samples) == (5, 9)
    assert report.summary().startswith("No samples in 2 of 5 batches: batch 0.\n")
    with pytest.raises(pt2qa.BatchError, match=r"every batch is empty \(2 read\)\. Pass batches with samples\."):
        layers(pair, [empty, empty])


def test_where_every_batch_is_spoilt_the_rows_are_made_of_them_and_the_text_says_so(pair: pt2qa.QuantizedPair) -> None:
    report = layers(pair, [spoilt(), spoilt()])
    assert [apart.batch for apart in report.set_apart] == [0, 1]
    assert math.isnan(report.sqnr)
    assert all(math.isnan(row.sqnr) and row.note for row in report.rows)
    said = report.summary()
    assert "The input data contain NaN or infinities in 2 of 2 batches" in said
    assert "No other batch is left: rows whose values are not finite have no number." in said
    assert "No layer has an isolated SQNR" in said
    assert "was not measured" not in said
    assert said.splitlines()[-1] == "No verdict: no layer and no output has a number."


def test_the_rows_before_the_first_infinity_keep_their_numbers_where_every_batch_has_one(
    logarithm: pt2qa.QuantizedPair,
) -> None:
    report = layers(logarithm, [tiny()])
    rows = {row.name: row for row in report.rows}
    assert math.isfinite(rows["x"].sqnr)
    assert math.isnan(rows["log"].sqnr)


def test_what_quantization_alone_makes_is_the_first_word_of_the_verdict(logarithm: pt2qa.QuantizedPair) -> None:
    fine = torch.linspace(0.5, 4, 16).reshape(4, 4)
    broken = fine.clone()
    broken[0, 0] = math.nan
    report = layers(logarithm, [broken, tiny(), fine])
    assert report.set_apart == (
        SetApart(0, 4, 0, "batch", "NaN", "x"),
        SetApart(1, 4, 2, "quantized", "infinite", "log"),
    )
    said = report.summary().splitlines()
    assert said[0] == (
        "Quantization fails on 1 of 3 batches: infinite in the quantized model alone, first at log (batch 1, sample 2)."
    )
    assert said[-1] == "Look at log first: quantization makes values there that are not finite."


def test_a_mask_sets_no_batch_apart_but_a_row_that_it_hides_whole_does() -> None:
    keep = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    x = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
    attention = quantized_pair(Attention(), (x, keep), "x86")
    hidden = keep.clone()
    hidden[1, 2] = False
    report = layers(attention, [(x, keep), (x, hidden)])
    assert report.set_apart == (SetApart(1, 2, 1, "both", "NaN", "softmax", "masked_fill"),)
    masked = next(row for row in report.rows if row.op == "masked_fill")
    assert masked.note == "20 equal NaN or infinite values left out"
    assert "The float model itself gives NaN or infinities in 1 of 2 batches: NaN in both models, first at " in (
        report.summary()
    )


def test_the_report_keeps_it_in_its_file_and_shows_it_everywhere(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    report = layers(pair, [BATCHES[0], spoilt()])
    report.save(tmp_path / "layers.safetensors")
    loaded = pt2qa.load(tmp_path / "layers.safetensors")
    assert isinstance(loaded, pt2qa.LayerReport)
    assert (loaded.set_apart, str(loaded)) == (report.set_apart, str(report))
    frame = report.to_pandas(part="set_apart")
    assert frame[["batch", "samples", "sample", "side", "what", "name"]].to_numpy().tolist() == [
        [1, 3, 1, "batch", "NaN", "x"]
    ]


def test_no_gate_passes_where_quantization_fails_and_what_is_left_out_is_a_warning(
    pair: pt2qa.QuantizedPair, logarithm: pt2qa.QuantizedPair
) -> None:
    fine = torch.linspace(0.5, 4, 16).reshape(4, 4)
    failing = pt2qa.gate(layers(logarithm, [fine, tiny()]), require="sqnr>=0")
    assert not failing.passed
    assert [check.title for check in failing.missed] == ["batches on which quantization fails == 0"]
    assert "batch 1, sample 2: infinite in the quantized model alone, first at log" in failing.missed[0].outcome
    spoilt_data = pt2qa.gate(layers(pair, [*BATCHES, spoilt()]), require="sqnr>=0")
    assert spoilt_data.passed
    assert spoilt_data.warnings == ("1 batch set apart: batch 3, sample 1: NaN in the input x",)
    for requirement in ("sqnr>=0", "rows.isolated_sqnr>=0", "batches_apart==0"):
        assert not pt2qa.gate(layers(pair, [spoilt()]), require=requirement).passed


def test_a_diff_says_that_the_numbers_are_of_other_batches(pair: pt2qa.QuantizedPair) -> None:
    clean, apart = layers(pair, [*BATCHES, images(3)]), layers(pair, [*BATCHES, spoilt()])
    change = Change("batches_apart", "0", "1")
    assert change in pt2qa.diff(clean, apart).changes
    held = pt2qa.gate(apart, baseline=clean, max_drop=30.0)
    assert "the numbers come from other batches than the baseline's: batches_apart 0, now 1" in held.warnings


def test_the_page_is_bad_where_quantization_fails_and_never_good_where_a_batch_is_set_apart(
    pair: pt2qa.QuantizedPair, logarithm: pt2qa.QuantizedPair, tmp_path: Path
) -> None:
    failed, data = sections_of([layers(logarithm, [tiny()]), layers(pair, [*BATCHES, spoilt()])])
    assert (failed.verdict, data.verdict) == ("bad", "warning")
    assert failed.lines[0].startswith("Quantization fails on 1 of 1 batch")
    pt2qa.write_html(layers(pair, [*BATCHES, spoilt()]), tmp_path / "page.html")
    assert "NaN in the input x (batch 3, sample 1)" in (tmp_path / "page.html").read_text()
