"""``sensitivity(mask=)``: only outputs at positions that count have errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pt2qa
from tests.padded_prompts import Running, padded, prompts, quantized, with_garbage


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), "xnnpack")


def values(pair: pt2qa.QuantizedPair, batches: Any, mask: Any = "attention_mask", **options: Any) -> dict[str, float]:
    """By kind and name of the row; measured exactly if not said otherwise."""
    report = pt2qa.sensitivity(pair, batches, mask=mask, **{"method": "exact", **options})
    return {f"{row.kind} {row.name}": row.value for row in report.rows}


@pytest.mark.parametrize("metric", ["sqnr", "l1", "cosine", "kl"])
def test_a_padded_batch_equals_its_prompts_one_by_one(pair: pt2qa.QuantizedPair, metric: str) -> None:
    alone = values(pair, [padded([prompt]) for prompt in prompts()], None, metric=metric)
    assert values(pair, [padded(prompts())], metric=metric) == pytest.approx(alone, abs=1e-9)


def test_the_projection_estimates_the_same_noise(pair: pt2qa.QuantizedPair) -> None:
    batch = [padded(prompts())]
    projected = values(pair, batch, method="projection", projections=256)
    assert projected == pytest.approx(values(pair, batch), abs=0.6)


def test_outputs_of_ones_own_are_masked_too(pair: pt2qa.QuantizedPair) -> None:
    batch = [padded(prompts())]
    assert values(pair, batch, post_process=lambda out: out["logits"]) == values(pair, batch)


@pytest.mark.parametrize("options", [{}, {"method": "projection", "projections": 4}], ids=["exact", "projection"])
def test_what_stands_at_padded_positions_changes_nothing(pair: pt2qa.QuantizedPair, options: dict[str, Any]) -> None:
    batch = padded(prompts())
    assert values(pair, [batch], **options) == values(pair, [with_garbage(batch)], **options)
