"""Rules on the model and on plain programs, on real models: what they find is true, and healthy models get notes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import pt2qa
from tests.check.test_model_rules import RULES
from tests.zoo import models
from tests.zoo.pairs import captured

pytestmark = pytest.mark.zoo


def test_efficientnet_as_torch_export_writes_it_leaves_49_convs_in_float_and_each_is_named_with_the_reason() -> None:
    program = torch.export.export(models.efficientnet_lite0(), (torch.zeros(1, 3, 224, 224),), strict=False)
    findings = pt2qa.check(program, quantizer="x86", rules=["plain-program"])
    first, *rest = findings
    assert first.why == "x86 annotates 1 op of this program, 60 after pt2qa.capture"
    convs = [row for row in rest if row.name.endswith("/conv2d")]
    assert len(convs) == 49
    assert {row.severity for row in rest} == {"error"}
    reason = (
        "nn_module_stack says Conv2dStaticSamePadding, the quantizer looks for exactly Conv2d (strict=False "
        "writes no source_fn_stack)"
    )
    assert {row.why for row in convs} == {reason}


@pytest.mark.parametrize(
    ("name", "here", "there", "said"),
    [
        pytest.param("googlenet", 58, 81, "BasicConv2d", id="googlenet"),
        pytest.param("swin_t", 29, 53, "ShiftedWindowAttention", id="swin_t"),
    ],
)
def test_trap_14_what_is_quietly_left_out_of_plain_programs(name: str, here: int, there: int, said: str) -> None:
    made = getattr(models.torchvision_models(), name)
    model = made(weights=None, **({"init_weights": False} if name == "googlenet" else {})).eval()
    program = torch.export.export(model, (torch.zeros(1, 3, 224, 224),))
    first, *rest = pt2qa.check(program, quantizer="x86", rules=["plain-program"])
    assert first.why == f"x86 annotates {here} ops of this program, {there} after pt2qa.capture"
    assert len(rest) == there - here
    assert all(f"nn_module_stack says {said}" in row.why for row in rest)


def test_trap_14_every_relu_that_stops_x86_on_a_plain_resnet_is_named() -> None:
    program = torch.export.export(models.healthy_resnet("resnet18"), (torch.zeros(1, 3, 64, 64),))
    rows = pt2qa.check(program, quantizer="x86", rules=["plain-program"])
    assert [row.name for row in rows] == [f"layer{stage}.{block}.relu" for stage in range(1, 5) for block in range(2)]
    assert all("Input partition has more than one output node" in row.why for row in rows)


def test_trap_33_densenet_has_62_batch_norms_that_nothing_folds() -> None:
    model = models.torchvision_models().densenet121(weights=None).eval()
    rows = pt2qa.check(model, torch.zeros(1, 3, 64, 64), rules=["unfoldable-batch-norm"])
    assert len(rows) == 62
    assert {row.severity for row in rows} == {"warning"}


@pytest.mark.parametrize("quantizer", ["x86", "xnnpack"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("digit_net", {("fixed-batch", "note"): 1}, id="digit_net"),
        pytest.param("mobilenet_v2", {("fixed-batch", "note"): 1}, id="mobilenet_v2"),
        pytest.param("resnet18", {("fixed-batch", "note"): 1, ("shared-module", "note"): 8}, id="resnet18"),
        pytest.param(
            "efficientnet_lite0", {("fixed-batch", "note"): 1, ("shared-module", "note"): 16}, id="efficientnet_lite0"
        ),
        # 95 % of its weights stay in float: that is the mistake to find in it.
        pytest.param(
            "speech_encoder", {("fixed-batch", "note"): 1, ("opaque-recurrent", "error"): 1}, id="speech_encoder"
        ),
    ],
)
def test_rules_on_the_model_are_quiet(name: str, quantizer: str, expected: dict[tuple[str, str], int]) -> None:
    made = captured(name)
    findings = pt2qa.check(made.model, (made.batches[0],), quantizer=quantizer, rules=RULES)
    assert Counter((row.rule, row.severity) for row in findings) == expected
