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


def _values(report: pt2qa.SensitivityReport) -> dict[str, float]:
    return {f"{row.kind} {row.name}": row.value for row in report.rows}


@pytest.mark.parametrize("metric", ["sqnr", "l1", "cosine", "kl"])
def test_a_padded_batch_equals_its_prompts_one_by_one(pair: pt2qa.QuantizedPair, metric: str) -> None:
    ones = [padded([prompt]) for prompt in prompts()]
    alone = pt2qa.sensitivity(pair, ones, method="exact", metric=metric)
    masked = pt2qa.sensitivity(pair, [padded(prompts())], method="exact", metric=metric, mask="attention_mask")
    assert _values(masked) == pytest.approx(_values(alone), abs=1e-9)


def test_the_projection_estimates_the_same_noise(pair: pt2qa.QuantizedPair) -> None:
    batch = [padded(prompts())]
    exact = pt2qa.sensitivity(pair, batch, method="exact", mask="attention_mask")
    projected = pt2qa.sensitivity(pair, batch, method="projection", projections=256, mask="attention_mask")
    assert _values(projected) == pytest.approx(_values(exact), abs=0.6)


def test_outputs_of_ones_own_are_masked_too(pair: pt2qa.QuantizedPair) -> None:
    batch = [padded(prompts())]
    plain = pt2qa.sensitivity(pair, batch, method="exact", mask="attention_mask")
    own = pt2qa.sensitivity(pair, batch, method="exact", mask="attention_mask", post_process=lambda out: out["logits"])
    assert _values(own) == _values(plain)


@pytest.mark.parametrize("method", ["exact", "projection"])
def test_what_stands_at_padded_positions_changes_nothing(pair: pt2qa.QuantizedPair, method: Any) -> None:
    batch, count = padded(prompts()), 4 if method == "projection" else None
    one, other = (
        pt2qa.sensitivity(pair, [each], method=method, projections=count, mask="attention_mask")
        for each in (batch, with_garbage(batch))
    )
    assert _values(one) == _values(other)
