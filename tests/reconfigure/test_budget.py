"""A budget counts what the quantizer leaves in float by itself, and is said where it cannot be kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pt2qa
from tests.flows import quantized_pair

BATCH = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


def half_float() -> pt2qa.QuantizedPair:
    """The first convolution is left in float: 3456 of 11904 multiply-accumulates, 216 of 8664 weights."""
    quantizer = pt2qa.quantizer("x86", modules={"0": None})
    return quantized_pair(model(), BATCH, quantizer)


@pytest.mark.parametrize("target", [None, 20.0], ids=["the best", "a target"])
def test_a_budget_below_what_stays_in_float_anyway_is_said_to_be_so(target: float | None) -> None:
    pair = half_float()
    fixed = pt2qa.reconfigure(pair, [BATCH], target=target, budget={"macs": 0.1}, verify_code=False, progress=False)
    assert not fixed.met
    assert fixed.plan.edits == ()
    assert fixed.pair is pair
    assert fixed.stages[0].macs == pytest.approx(3456 / 11904)
    assert fixed.verdict.startswith(
        f"The budget cannot be met: {pair.quantizer} itself leaves 29 % of the MACs in float, and no edit "
        "quantizes more; sqnr "
    )


def test_a_budget_of_bytes_counts_what_stays_in_float_anyway() -> None:
    fixed = pt2qa.reconfigure(half_float(), [BATCH], budget={"bytes": 0.01}, verify_code=False, progress=False)
    assert " itself leaves 2.49 % of the weights' bytes in float" in fixed.verdict
    assert fixed.curve[0].bytes == pytest.approx(216 / 8664)


def test_no_plan_exceeds_its_budget_and_all_choices_are_tried() -> None:
    pair = half_float()
    fixed = pt2qa.reconfigure(pair, [BATCH], target=200.0, budget={"macs": 0.5}, verify_code=False, progress=False)
    assert fixed.verdict.startswith(
        "The target cannot be met within the budget: every combination of edits within it was scored. Best found: "
    )
    assert fixed.stages[-1].macs <= 0.5
