"""``repair(mask=)``: what decides is the SQNR of the positions that count."""

from __future__ import annotations

import pytest
import torch

import pt2qa
from pt2qa._repair.guard import guarded
from pt2qa._repair.methods import METHODS
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Folds
from tests.padded_prompts import Running, padded, prompts, quantized


def test_the_sqnr_is_that_of_what_counts() -> None:
    torch.manual_seed(0)
    pair = quantized(Running(), "xnnpack")
    data = [padded(prompts(lengths), to=20) for lengths in ((5, 9, 13, 7), (4, 11, 6), (3, 8))]
    measured_on = [padded(prompts((6, 10)), to=16)]
    found = pt2qa.repair(pair, measured_on, calibration=data, mask="attention_mask", verify_code=False, progress=False)
    stages = {stage.name: stage.quality for stage in found.stages}
    for stage, measured, batches in (
        ("before", pair, measured_on),
        ("converted", found.pair, measured_on),
        ("converted, calibration", found.pair, data),
    ):
        expected = pt2qa.compare_layers(measured, batches, mask="attention_mask", progress=False).outputs[0].sqnr
        assert stages[stage] == pytest.approx(expected, abs=1e-6)


def test_a_fit_is_measured_where_positions_count() -> None:
    torch.manual_seed(0)
    pair = quantized(Running(), "xnnpack")
    prompted = [padded(prompts(lengths)) for lengths in ((5, 9), (13, 7))]

    def counting(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["attention_mask"].bool()

    gains = [
        guarded(METHODS["biases"], pair, Folds(pair, Data("calibration", prompted, mask=mask))).gain
        for mask in (None, "attention_mask", counting)
    ]
    assert gains[1] == gains[2] != gains[0]
