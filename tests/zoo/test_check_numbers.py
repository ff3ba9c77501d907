"""The rules on the numbers on pretrained models: what is found is there, and there is little of it."""

from __future__ import annotations

from collections import Counter

import pytest

import pt2qa
from tests.zoo.pairs import captured, pair_of

pytestmark = pytest.mark.zoo

RULES = (
    *("never-calibrated", "nonfinite-observed", "degenerate-scale", "dead-channel", "channel-range", "saturation"),
    *("range-outliers", "unused-range", "requantize-mismatch", "bias-overflow"),
)


def checked(name: str, quantizer: str) -> pt2qa.Findings:
    return pt2qa.check(pair_of(name, quantizer), batches=captured(name).batches[:2], rules=RULES, progress=False)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@pytest.mark.parametrize("name", ["digit_net", "resnet18", "speech_encoder"])
def test_healthy_models_are_quiet(name: str, quantizer: str) -> None:
    assert [(row.rule, row.name, row.why) for row in checked(name, quantizer)] == []


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_lite0"])
def test_models_that_int8_hurts_get_few_warnings_and_no_error(name: str, quantizer: str) -> None:
    findings = checked(name, quantizer)
    assert findings.error_count == 0
    assert findings.warning_count <= 8, Counter(row.rule for row in findings)


def test_the_worst_ranges_of_efficientnet_are_those_of_relu6_on_xnnpack() -> None:
    """Conv and ReLU6 are rounded one after the other with one scale: 96 % of it lies beyond 6."""
    unused = [row for row in checked("efficientnet_lite0", "xnnpack") if row.rule == "unused-range"]
    assert unused[0].name == "_blocks.0._swish/hardtanh"
    assert unused[0].value > 4
    assert not [row for row in checked("efficientnet_lite0", "x86") if row.rule == "unused-range"]


def test_outliers_are_named_where_mobilenet_rounds_worst() -> None:
    outliers = [row.name for row in checked("mobilenet_v2", "x86") if row.rule == "range-outliers"]
    assert outliers == ["features.16/add"]


def test_one_scale_for_depthwise_weights_is_what_equalisation_is_for() -> None:
    made = captured("efficientnet_lite0")
    pair = pt2qa.quantize(made.capture, "xnnpack:per_channel=false", made.batches[:1], progress=False)
    small = [row for row in checked_weights(pair) if row.rule == "channel-range"]
    assert sum("_depthwise_conv" in row.name for row in small) > len(small) / 2
    assert len(small) < 12


def checked_weights(pair: pt2qa.QuantizedPair) -> pt2qa.Findings:
    return pt2qa.check(pair, rules=("dead-channel", "channel-range"))


def test_trap_22_on_a_cpu_without_vnni() -> None:
    pair = pair_of("digit_net", "x86")
    names = {row.name for row in pt2qa.check(pair, rules=("x86-pair-sums",), cpu="no-vnni")}
    assert names <= {step.name for step in pair.program.steps if step.op in ("conv2d", "linear")}
    assert names
    assert not pt2qa.check(pair, rules=("x86-pair-sums",), cpu="vnni").rows
