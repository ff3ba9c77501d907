"""``mask=``: positions that do not count are in no sum."""

from __future__ import annotations

import math

import pytest
import torch

import pt2qa
from tests.padded_prompts import Attending, Running, padded, prompts, quantized

NUMBERS = (
    "sqnr",
    "isolated_sqnr",
    "rounding_sqnr",
    "mse",
    "cosine",
    "l1",
    "atol",
    "saturation",
    "ref_min",
    "quant_max",
)


@pytest.fixture(scope="module", params=["xnnpack", "xnnpack:mode=dynamic"])
def running(request: pytest.FixtureRequest) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), request.param)


@pytest.fixture(scope="module")
def attending() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Attending(), "xnnpack")


def _by_name(report: pt2qa.LayerReport) -> dict[str, pt2qa.LayerRow]:
    return {f"{row.name} {row.scale}": row for row in (*report.rows, *report.outputs)}


def _alike(one: pt2qa.LayerReport, other: pt2qa.LayerReport, tolerance: float) -> None:
    assert _by_name(one).keys() == _by_name(other).keys()
    for name, row in _by_name(one).items():
        for column in NUMBERS:
            left, right = getattr(row, column), getattr(_by_name(other)[name], column)
            assert left == right or abs(left - right) <= tolerance or math.isnan(left + right), (name, column)


def test_a_padded_batch_equals_its_prompts_one_by_one(running: pt2qa.QuantizedPair) -> None:
    masked = pt2qa.compare_layers(running, [padded(prompts())], mask="attention_mask")
    alone = pt2qa.compare_layers(running, [padded([prompt]) for prompt in prompts()])
    _alike(masked, alone, 1e-9)


def test_without_a_mask_padding_counts(running: pt2qa.QuantizedPair) -> None:
    masked = pt2qa.compare_layers(running, [padded(prompts())], mask="attention_mask").outputs[0]
    assert masked.sqnr != pt2qa.compare_layers(running, [padded(prompts())]).outputs[0].sqnr


def test_attention_scores_count_where_both_positions_do(attending: pt2qa.QuantizedPair) -> None:
    masked = pt2qa.compare_layers(attending, [padded(prompts())], mask="attention_mask")
    alone = pt2qa.compare_layers(attending, [padded([prompt]) for prompt in prompts()])
    # Softmax and products of other sizes add in another order.
    for name, row in _by_name(masked).items():
        other = _by_name(alone)[name].sqnr
        assert row.sqnr == pytest.approx(other, abs=1e-4) or "ones" in name or "tril" in name, name
    assert any("softmax" in name for name in _by_name(masked))


def test_samples_and_positions_in_one_axis_are_found(attending: pt2qa.QuantizedPair) -> None:
    masked = _by_name(pt2qa.compare_layers(attending, [padded(prompts())], mask="attention_mask"))
    assert [row for row in masked.values() if row.name.startswith("out/linear")]


def test_values_without_positions_are_counted(attending: pt2qa.QuantizedPair) -> None:
    notes = pt2qa.compare_layers(attending, [padded(prompts())], mask="attention_mask").notes
    assert [note for note in notes if "whose sample and position axes are unknown" in note and "ones" in note]


def test_a_fixed_length_is_known_by_its_size() -> None:
    torch.manual_seed(0)
    pair = quantized(Running(), "xnnpack", dynamic=False)
    masked = pt2qa.compare_layers(pair, [padded(prompts())], mask="attention_mask")
    assert not any("mask:" in note for note in masked.notes)
    torch.manual_seed(0)
    longer = quantized(Running(), "xnnpack")
    assert masked.outputs[0].sqnr == pytest.approx(
        pt2qa.compare_layers(longer, [padded(prompts())], mask="attention_mask").outputs[0].sqnr, abs=1e-9
    )


def test_a_mask_may_be_a_function_of_a_batch(running: pt2qa.QuantizedPair) -> None:
    by_name = pt2qa.compare_layers(running, [padded(prompts())], mask="attention_mask")
    by_function = pt2qa.compare_layers(running, [padded(prompts())], mask=lambda batch: batch["input_ids"] != 0)
    _alike(by_name, by_function, 0)


def test_masked_reports_merge_with_their_like_alone(running: pt2qa.QuantizedPair) -> None:
    batches = [padded(prompts()), padded(prompts((4, 9)))]
    parts = [pt2qa.compare_layers(running, [batch], mask="attention_mask") for batch in batches]
    _alike(pt2qa.merge(parts), pt2qa.compare_layers(running, batches, mask="attention_mask"), 1e-9)
    with pytest.raises(pt2qa.ReportError, match="mask of report 2 is None"):
        pt2qa.merge([parts[0], pt2qa.compare_layers(running, [batches[1]])])


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        ("padding", pt2qa.SelectionError, "no input 'padding'; it has input_ids, attention_mask"),
        (lambda batch: batch["input_ids"], pt2qa.BatchError, "other than integers 0 and 1"),
        (lambda batch: batch["attention_mask"][0], pt2qa.BatchError, r"shape \(13,\); expected a bool"),
        (lambda batch: batch["attention_mask"][:, :4], pt2qa.BatchError, r"shape \(4, 4\); expected \(samples"),
        (lambda batch: batch["attention_mask"] * 0, pt2qa.BatchError, "zero at every position"),
    ],
)
def test_what_is_no_mask_is_refused(
    running: pt2qa.QuantizedPair, mask: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pt2qa.compare_layers(running, [padded(prompts())], mask=mask)  # type: ignore[arg-type]  # that is the test
