"""``mask=``: padding is in no number of an error budget or a diagnosis."""

from __future__ import annotations

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
    # Sums over values in another order.
    assert parts(masked) == pytest.approx(parts(alone), rel=1e-6)
    assert masked.noise == pytest.approx(alone.noise, rel=1e-9)
    assert masked.signal == pytest.approx(alone.signal, rel=1e-9)


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
