"""Overrides on real models: the published cure of EfficientNet-Lite0, and the speed that a search needs."""

from __future__ import annotations

import time

import pytest
import torch

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa.overrides import annotations_of, fusions
from tests.overrides.flows import check_prediction
from tests.zoo.pairs import captured, decibels, pair_of

pytestmark = pytest.mark.zoo


def output_sqnr(pair: pt2qa.QuantizedPair, batches: tuple[torch.Tensor, ...]) -> float:
    with torch.no_grad():
        return decibels([pair.reference(batch) for batch in batches], [pair.quantized(batch) for batch in batches])


def test_fusing_relu6_gives_efficientnet_its_accuracy_back() -> None:
    """XNNPACK runs conv + ReLU6 as one kernel; its quantizer rounds what the ReLU6 is about to cut off."""
    made, before = captured("efficientnet_lite0"), pair_of("efficientnet_lite0", "xnnpack")
    edits = fusions(made.capture, "xnnpack")
    assert len(edits) == 33
    plan = OverridePlan(edits, quantizer="xnnpack", model=made.capture.model)
    after = pt2qa.quantize(made.capture, "xnnpack", made.batches, overrides=plan, progress=False)
    assert output_sqnr(before, made.batches) < 9
    assert output_sqnr(after, made.batches) >= 18
    check_prediction(annotations_of(made.capture, "xnnpack").with_edits(edits), before, after)
    after.verify(made.batches[0])


def test_a_search_can_try_hundreds_of_edits() -> None:
    made, pair = captured("mobilenet_v2"), pair_of("mobilenet_v2", "xnnpack")
    annotations = annotations_of(made.capture, "xnnpack")
    assert annotations.sites_on(pair.sites) == set(range(len(pair.sites)))
    names = [name for name, op in annotations.ops.items() if "float" in op.levels]
    start = time.perf_counter()
    for name in names:
        annotations.with_edits([Edit("float", (name,))]).sites_on(pair.sites)
    assert len(names) > 60
    assert (time.perf_counter() - start) / len(names) < 0.05
