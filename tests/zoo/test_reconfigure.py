"""Pretrained models that int8 hurts get their accuracy back: measured on the converted graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pt2qa
from tests.zoo import models
from tests.zoo.pairs import captured, decibels, pair_of

pytestmark = pytest.mark.zoo


def measured(name: str, pair: pt2qa.QuantizedPair) -> float:
    """The output SQNR, computed from the graphs' own outputs."""
    with torch.no_grad():
        batches = captured(name).batches
        return decibels([pair.reference(batch) for batch in batches], [pair.quantized(batch) for batch in batches])


@pytest.fixture(scope="module")
def fused() -> pt2qa.Reconfiguration:
    """EfficientNet-Lite0 on XNNPACK, asked for 18 dB."""
    name = "efficientnet_lite0"
    return pt2qa.reconfigure(pair_of(name, "xnnpack"), captured(name).batches, target=18.0, progress=False)


def test_efficientnet_needs_nothing_but_fusions(fused: pt2qa.Reconfiguration) -> None:
    """Trap 34: XNNPACK quantizes between a convolution and its ReLU6, although it runs them as one kernel."""
    assert fused.met
    assert {edit.kind for edit in fused.plan.edits} == {"fuse"}
    assert measured("efficientnet_lite0", fused.pair) >= 18.0
    stages = {stage.name: stage for stage in fused.stages}
    assert stages["converted"].macs == stages["before"].macs
    assert not [note for note in fused.notes if "meant to" in note]


def test_the_printed_code_gives_efficientnet_the_same_db(fused: pt2qa.Reconfiguration) -> None:
    """From torch.export to convert, without pt2qa; the float model is the eager one."""
    assert fused.code_verified == "equal"
    made, names = captured("efficientnet_lite0"), dict[str, Any](__name__="quantizer")
    exec(fused.code, names)
    assert "import pt2qa" not in fused.code
    quantized = names["quantize"](made.model, (made.batches[0],), made.batches)
    with torch.no_grad():
        outputs = [quantized(batch) for batch in made.batches]
        by_hand = decibels([made.model(batch) for batch in made.batches], outputs)
        assert all(torch.equal(mine, fused.pair.quantized(x)) for mine, x in zip(outputs, made.batches, strict=True))
    stages = {stage.name: stage for stage in fused.stages}
    assert by_hand == pytest.approx(stages["converted"].quality, abs=0.01)


def test_efficientnet_reaches_25_db_with_little_in_float() -> None:
    name = "efficientnet_lite0"
    fixed = pt2qa.reconfigure(pair_of(name, "xnnpack"), captured(name).batches, target=25.0, progress=False)
    assert fixed.met, fixed.verdict
    assert measured(name, fixed.pair) >= 25.0
    assert not [note for note in fixed.notes if "meant to" in note]


def test_mobilenet_reaches_20_db_or_says_what_is_the_best() -> None:
    name = "mobilenet_v2"
    pair = pair_of(name, "xnnpack")
    fixed = pt2qa.reconfigure(pair, captured(name).batches, target=20.0, budget={"macs": 0.2}, progress=False)
    stages = {stage.name: stage for stage in fixed.stages}
    assert stages["converted"].macs <= 0.2
    assert stages["converted"].quality == pytest.approx(measured(name, fixed.pair), abs=1e-3)
    assert bool(fixed.met) == (stages["converted"].quality >= 20.0)
    assert not [note for note in fixed.notes if "meant to" in note]
    assert fixed.evaluations <= 40


def cadence() -> object:
    from executorch.backends.cadence.aot.quantizer.quantizer import CadenceDefaultQuantizer

    return CadenceDefaultQuantizer()


def samsung() -> object:
    from executorch.backends.samsung.quantizer import EnnQuantizer

    return EnnQuantizer()


@pytest.mark.filterwarnings("ignore")  # third parties' own, at import and at use
@pytest.mark.parametrize(("make", "target"), [(cadence, 16.0), (samsung, 20.0)], ids=["cadence", "samsung"])
def test_quantizers_of_strangers_are_repaired_as_well(make: Callable[[], object], target: float) -> None:
    """Trap 40: nothing in pt2qa knows these quantizers."""
    batches = [models.pictures()[:2]]
    capture = pt2qa.capture(models.mobilenet_v2(), batches[0])
    pair = pt2qa.quantize(capture, make(), batches, progress=False)
    fixed = pt2qa.reconfigure(pair, batches, target=target, progress=False)
    stages = {stage.name: stage for stage in fixed.stages}
    assert stages["before"].quality < target
    assert fixed.met, fixed.verdict
    with torch.no_grad():
        outputs = [fixed.pair.reference(batches[0])], [fixed.pair.quantized(batches[0])]
    assert decibels(*outputs) >= target
    assert not [note for note in fixed.notes if "meant to" in note]
