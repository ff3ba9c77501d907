"""Rules on the annotation of real models: what they name, and how quiet they are elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import pt2qa
from tests.overrides.strangers import STRANGERS
from tests.zoo.models import efficientnet_lite0
from tests.zoo.pairs import QUANTIZERS, captured

pytestmark = pytest.mark.zoo

RULES = (
    *("unfused-pair", "quantizer-fails", "foreign-quantizer", "no-coverage", "broken-share", "unmatched-filter"),
    "backend-spec",
    *("integer-observed", "float-op", "half-quantized", "lost-write", "in-place-spelling", "residual-add"),
    *("mixed-parameters", "dynamic-conv", "strict-differs", "coverage", "float-island", "fixed-range"),
)

FOUND: dict[tuple[str, str], dict[str, int]] = {
    ("digit_net", "xnnpack"): {},
    ("digit_net", "x86"): {},
    ("resnet18", "xnnpack"): {},
    ("resnet18", "x86"): {},
    ("mobilenet_v2", "xnnpack"): {"unfused-pair": 35},
    # the flatten before the classifier
    ("mobilenet_v2", "x86"): {"float-island": 1},
    # the padding before each strided convolution
    ("efficientnet_lite0", "xnnpack"): {"unfused-pair": 33, "float-island": 1},
    ("efficientnet_lite0", "x86"): {"float-island": 1},
    # the LSTM, which opaque-recurrent names
    ("speech_encoder", "xnnpack"): {"coverage": 2},
    ("speech_encoder", "x86"): {"coverage": 2},
}
"""Findings of all rules on the annotation, by rule."""


@pytest.mark.parametrize(("model", "quantizer"), FOUND, ids=["-".join(key) for key in FOUND])
def test_what_is_found_in_good_models(model: str, quantizer: str) -> None:
    assert quantizer in QUANTIZERS
    findings = pt2qa.check(captured(model).capture, quantizer=quantizer, rules=RULES)
    assert Counter(finding.rule for finding in findings) == FOUND[model, quantizer]
    assert findings.error_count == 0


def test_the_unfused_pairs_of_efficientnet_come_first_among_the_warnings() -> None:
    findings = pt2qa.check(captured("efficientnet_lite0").capture, quantizer="xnnpack")
    warnings = [finding for finding in findings if finding.severity == "warning"]
    unfused = findings.of("unfused-pair")
    assert len(unfused) == 33
    assert tuple(warnings[:33]) == unfused
    assert {finding.why for finding in unfused} == {
        "is rounded before the ReLU6 that reads it; the backend has one kernel for both"
    }
    assert str(findings).split("\n\n")[1].startswith("WARNING unfused-pair (33): ")


def test_a_plain_export_leaves_the_49_convolutions_of_efficientnet_in_float_with_x86() -> None:
    program = torch.export.export(efficientnet_lite0(), (torch.randn(1, 3, 64, 64),))
    findings = pt2qa.check(program, quantizer="x86", rules=["coverage", "float-op", "plain-program", "no-coverage"])
    (coverage,) = (finding for finding in findings.of("coverage") if finding.name == "conv2d")
    assert coverage.why.startswith("49 eligible, 0 annotated, 0 with inputs and weights rounded; these do 0.0%")
    named = [finding for finding in findings.of("plain-program") if finding.name.endswith("/conv2d")]
    assert len(named) == 49
    assert all("nn_module_stack says Conv2dStaticSamePadding" in finding.why for finding in named)
    assert findings.of("float-op") == ()  # plain-program has named them


@pytest.mark.parametrize("stranger", [name for name, (_, qat) in STRANGERS.items() if not qat])
@pytest.mark.parametrize("model", ["mobilenet_v2", "resnet18"])
def test_quantizers_of_other_people_are_not_accused(model: str, stranger: str) -> None:
    quantizer = STRANGERS[stranger][0]()
    findings = pt2qa.check(captured(model).capture, quantizer=quantizer, rules=RULES)
    assert findings.error_count == 0
