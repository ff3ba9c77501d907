"""``reconfigure(mask=)``: the SQNR to reach is that of the positions that count."""

from __future__ import annotations

import pytest
import torch

import pt2qa
from tests.padded_prompts import Running, padded, prompts, quantized


def test_the_target_is_held_against_what_counts() -> None:
    torch.manual_seed(0)
    pair = quantized(Running(), "xnnpack")
    batch = [padded(prompts())]
    found = pt2qa.reconfigure(pair, batch, target=38.0, mask="attention_mask", verify_code=False, progress=False)
    before = pt2qa.compare_layers(pair, batch, mask="attention_mask").outputs[0].sqnr
    after = pt2qa.compare_layers(found.pair, batch, mask="attention_mask").outputs[0].sqnr
    assert found.stages[0].quality == pytest.approx(before, abs=1e-6)
    assert found.stages[-1].quality == pytest.approx(after, abs=1e-6)
    assert found.met
