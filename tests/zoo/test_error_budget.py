"""The error budget of a pretrained model: its parts add up, for a bounded number of float forwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pt2qa
from tests.zoo.pairs import captured, pair_of

pytestmark = pytest.mark.zoo

APART_BAR = 3.0
"""dB between the sum of the parts and the measured noise."""

COST_BAR = 20.0
"""Float forwards, verification included, by the flops of all that runs."""


@pytest.mark.parametrize("model", ["mobilenet_v2", "efficientnet_lite0"])
def test_the_parts_add_up_and_their_cost_is_bounded(model: str) -> None:
    pair, batch = pair_of(model, "xnnpack"), captured(model).batches[0]
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        captured(model).model(batch)
    with FlopCounterMode(display=False) as whole:
        report = pt2qa.error_budget(pair, [(batch,)], progress=False)
    assert report.method == "projection"
    assert abs(10 * math.log10(report.parts / report.noise)) <= APART_BAR
    assert whole.get_total_flops() <= COST_BAR * forward.get_total_flops()
    # No relu6 is fused with the op before it, so all that clips is in series: what it adds is small.
    clipped = [row.noise for row in report.rows if row.op == "hardtanh"]
    assert sum(clipped) < 0.2 * report.parts
    assert report.fault == "precision"
