"""A pretrained model gets its accuracy back at no cost, on pictures that nothing was fitted to."""

from __future__ import annotations

import pytest
import torch

import pt2qa
from tests.zoo import models
from tests.zoo.pairs import decibels

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize(("quantizer", "gain"), [("xnnpack", 6.0), ("x86", 2.5)])
def test_mobilenet_v2_with_other_ranges(quantizer: str, gain: float) -> None:
    calibration, held_out = (list(models.pictures()[start::2].split(5)) for start in (0, 1))
    model = models.mobilenet_v2()
    pair = pt2qa.quantize(pt2qa.capture(model, (calibration[0],)), quantizer, calibration, progress=False)
    report = pt2qa.repair(pair, held_out, progress=False)
    assert report.code_verified == "equal"
    with torch.no_grad():
        reference = [model(batch) for batch in held_out]
        before, after = (
            decibels(reference, [each.quantized(batch) for batch in held_out]) for each in (pair, report.pair)
        )
    assert after > before + gain
    stages = {stage.name: stage.quality for stage in report.stages}
    assert stages["converted"] == pytest.approx(after, abs=0.01)
