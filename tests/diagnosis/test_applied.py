"""Where an edit can do what a remedy says, it is applied: the diagnosed pair has what the row promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import pt2qa
from tests.overrides.faulty import FAULTS, Faulty

CAUSES = {
    "fixed": ("site-range",),
    "shared": ("shared-scale",),
    "reduced": ("activation-scheme",),
    "coarse": ("weight-scheme", "per-tensor-weights"),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    made[2].weight.data *= 0.1
    made[2].bias.data.zero_()
    made[4].bias.data.zero_()
    return made


def batches(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 6, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_quantizer_is_repaired_by_the_plan(fault: Callable[[Node], None]) -> None:
    capture = pt2qa.capture(net(), batches(0)[0])
    pair = pt2qa.quantize(capture, Faulty(fault), batches(0), progress=False)
    found = pt2qa.diagnose(pair, batches(1), evaluation=batches(2), progress=False)
    row = found.rows[0]
    assert row.cause in CAUSES[fault.__name__]
    assert row.name == "2/linear"
    assert row.how == "quantized again"
    # More data than the 64 samples that calibrated it hold the rare values that it clamps, which is no fault of a spec.
    assert {each.cause for each in found.rows[1:]} <= {"narrow-calibration"}
    assert {edit.kind for edit in found.plan.edits} <= {"int8", "int8_weight", *["observer"] * (len(found.rows) > 1)}
    other = torch.cat([batch for seed in range(3, 13) for batch in batches(seed)])
    before, after, healthy = (
        pt2qa.sqnr(pair.reference(other), each.quantized(other))
        for each in (pair, found.pair, pt2qa.quantize(capture, "xnnpack", batches(0), progress=False))
    )
    assert row.low <= after - before <= row.high
    assert after > (healthy if len(found.rows) > 1 else healthy - 1)
    assert found.code_verified == "equal"
