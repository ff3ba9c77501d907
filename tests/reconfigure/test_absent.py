"""What is not a number meets no target, and the verdict says where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from tests.flows import quantized_pair, residual_pair
from tests.models import images
from tests.reconfigure.detector import data, detector_pair


class Divided(nn.Module):
    """0/0 where a small value is rounded to zero, and a float output beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        small = self.head(y)
        return self.head(torch.relu(y)), small / small


def test_an_output_that_is_nan_once_quantized_meets_no_target() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    pair = quantized_pair(Divided(), x)
    with torch.no_grad():
        assert not pair.reference(x)[1].isnan().any()
        assert pair.quantized(x)[1].isnan().any()
    fixed = pt2qa.reconfigure(pair, [x], target=1.0, verify_code=False, progress=False)
    assert fixed.met  # by leaving in float what is divided by zero
    with torch.no_grad():
        assert not fixed.pair.quantized(x)[1].isnan().any()
    for target in (1.0, None):
        stuck = pt2qa.reconfigure(pair, [x], target=target, budget={"macs": 0.0}, verify_code=False, progress=False)
        assert not stuck.met
        assert math.isnan(stuck.stages[0].quality)
        assert "output[1] has no SQNR: 2 values are NaN or infinite in one of the two only" in stuck.verdict


def test_a_batch_on_which_the_float_model_is_nan_is_left_out_and_no_target_met() -> None:
    pair = residual_pair("x86")
    broken = images(seed=1).index_fill(0, torch.tensor([1]), math.nan)
    whole = pt2qa.reconfigure(pair, [images()], target=1.0, verify_code=False, progress=False)
    fixed = pt2qa.reconfigure(pair, [images(), broken], target=1.0, verify_code=False, progress=False)
    assert whole.met
    assert not fixed.met
    assert fixed.stages[0].quality == pytest.approx(whole.stages[0].quality)
    assert fixed.verdict.startswith(
        "The input data contain NaN or infinities in 1 of 2 batches: NaN in the input x (batch 1, sample 1). "
    )
    assert "The target is not met: 1 batch set apart could not be measured" in fixed.verdict
    with pytest.raises(pt2qa.BatchError, match="returns NaN on every batch"):
        pt2qa.reconfigure(pair, [broken], target=1.0, verify_code=False, progress=False)


def test_a_metric_that_is_nan_meets_no_target() -> None:
    def metric(value: float) -> Callable[[Any], float]:
        return lambda model: value

    pair = detector_pair("x86")
    fixed = pt2qa.reconfigure(pair, data(), target=pt2qa.Target(0.5, metric(math.nan), "top-1"), progress=False)
    assert not fixed.met
    assert fixed.verdict.startswith("The target is not met: top-1 is NaN;")
    share = pt2qa.Target(0.5, metric(math.nan), "top-1", of_float=True)
    with pytest.raises(pt2qa.SelectionError, match="top-1 of the float model is NaN"):
        pt2qa.reconfigure(pair, data(), target=share, verify_code=False, progress=False)


def test_a_model_without_a_floating_point_output_needs_a_metric() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).argmax(-1)

    x = torch.randn(4, 8)
    with pytest.raises(pt2qa.SelectionError, match=r"no output is a floating-point tensor.*metric="):
        pt2qa.reconfigure(quantized_pair(Classes(), x), [x], target=30, progress=False)
