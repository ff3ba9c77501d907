"""``mask=``: padding is in no number of an error budget or a diagnosis."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import pt2qa
from pt2qa.report import ErrorBudget
from tests.padded_prompts import Running, padded, prompts, quantized, with_garbage


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), "xnnpack")


def parts(report: ErrorBudget) -> dict[tuple[int, str], float]:
    return {(row.site, row.mechanism): row.noise for row in report.rows}


def test_the_budget_of_a_padded_batch_is_that_of_its_prompts(pair: pt2qa.QuantizedPair) -> None:
    alone = pt2qa.error_budget(pair, [padded([prompt]) for prompt in prompts()], method="exact", progress=False)
    masked = pt2qa.error_budget(pair, [padded(prompts())], method="exact", mask="attention_mask", progress=False)
    # Products of other shapes may round another way: eps of a value is up to 256 * sqrt(12) * eps of its noise.
    near = functools.partial(pytest.approx, rel=256 * 12**0.5 * torch.finfo(torch.float32).eps)
    assert parts(masked) == near(parts(alone))
    assert masked.noise == near(alone.noise)
    assert masked.signal == near(alone.signal)


@pytest.mark.parametrize("method", ["exact", "projection"])
def test_what_stands_at_padded_positions_changes_no_budget(pair: pt2qa.QuantizedPair, method: Any) -> None:
    def split(batch: Any, **options: Any) -> ErrorBudget:
        return pt2qa.error_budget(pair, [batch], method=method, progress=False, **options)

    batch, other = padded(prompts()), with_garbage(padded(prompts()))
    masked = split(batch, mask="attention_mask")
    assert split(other, mask="attention_mask") == masked
    assert split(other).noise != split(batch).noise != masked.noise


def test_masked_budgets_merge_with_their_like_alone(pair: pt2qa.QuantizedPair) -> None:
    batches = [padded(prompts()[:2]), padded(prompts()[2:])]
    masked = [pt2qa.error_budget(pair, [batch], mask="attention_mask", progress=False) for batch in batches]
    whole = pt2qa.error_budget(pair, batches, mask="attention_mask", progress=False)
    assert parts(pt2qa.merge(masked)) == pytest.approx(parts(whole), rel=1e-9)
    with pytest.raises(pt2qa.ReportError, match="mask of report 2 is None, of the first one 'attention_mask'"):
        pt2qa.merge([masked[0], pt2qa.error_budget(pair, batches[1:], progress=False)])


def diagnosed(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.Diagnosis:
    return pt2qa.diagnose(pair, batches, verify_code=False, progress=False, **options)


def test_what_stands_at_padded_positions_changes_no_diagnosis() -> None:
    torch.manual_seed(0)
    model = Running()
    with torch.no_grad():
        model.words.weight[1:] *= 10  # only padding is in the range that is calibrated here
    axes = {0: torch.export.Dim("prompts", max=64), 1: torch.export.Dim("tokens", min=2, max=64)}
    batch = padded(prompts())
    capture = pt2qa.capture(model.eval(), (), batch, dynamic_shapes={"input_ids": axes, "attention_mask": axes})
    narrow = {**batch, "input_ids": torch.zeros_like(batch["input_ids"])}
    pair = pt2qa.quantize(capture, "xnnpack", [narrow], progress=False)
    masked, other = (diagnosed(pair, [each], mask="attention_mask", target=30) for each in (batch, with_garbage(batch)))
    plain = diagnosed(pair, [batch], target=30)
    assert masked.rows[0].cause == "narrow-calibration"
    assert masked.rows[0].evidence == other.rows[0].evidence
    assert masked.figures[0] == other.figures[0] != plain.figures[0]
    assert masked.sqnr == pytest.approx(
        pt2qa.compare_layers(pair, [batch], mask="attention_mask").outputs[0].sqnr, abs=1e-6
    )
    assert masked.reports["budget"] == other.reports["budget"] != plain.reports["budget"]


def test_the_worst_sample_is_one_of_those_that_count(pair: pt2qa.QuantizedPair) -> None:
    found = diagnosed(pair, [padded(prompts())], mask="attention_mask").figures[0]
    cases = pt2qa.find_bad_cases(pair, [padded(prompts())], mask="attention_mask", progress=False)
    assert found.sample == cases.rows[0].sample
    assert found.sample_sqnr == pytest.approx(cases.rows[0].value, abs=1e-6)


def test_a_report_of_kernels_does_not_say_its_mask(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.DeployedReport(
        (), (), (), (), (), "none", notes=(), quantizer="xnnpack", model="Running", environment=pair.environment
    )
    with pytest.raises(pt2qa.SelectionError, match="deployed: got a report, which does not record its mask"):
        diagnosed(pair, [padded(prompts())], mask="attention_mask", deployed=report)
