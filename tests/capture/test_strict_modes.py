"""Both modes of capture on definitions of real models: the same names, the same quantized ops (traps 14, 28)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from pt2qa import capture
from tests.capture.models import QUANTIZERS, annotated
from tests.zoo.models import efficientnet_lite0, torchvision_models

pytestmark = pytest.mark.zoo

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "swin_t": (64, {}),
    "mobilenet_v2": (64, {}),
    "inception_v3": (96, {"aux_logits": False, "init_weights": False}),
}
"""Definition, size of the pictures, and what its constructor takes."""

PLAIN_X86 = {"resnet18": "ValueError", "googlenet": 58, "swin_t": 41, "mobilenet_v2": 99, "inception_v3": 95}
"""What x86 annotates of a plain ``strict=False`` export, for comparison."""


def model(name: str) -> tuple[nn.Module, tuple[torch.Tensor]]:
    size, options = MODELS[name]
    return getattr(torchvision_models(), name)(weights=None, **options).eval(), (torch.randn(1, 3, size, size),)


@pytest.mark.parametrize("name", MODELS)
def test_both_modes_give_the_same_names_and_the_same_quantized_ops(name: str) -> None:
    definition, x = model(name)
    captures = [capture(definition, x, strict=strict) for strict in (False, True)]
    assert captures[0].names == captures[1].names
    for quantizer in QUANTIZERS:
        found = [annotated(captured.module(), quantizer) for captured in captures]
        assert found[0] == found[1]
        # All that strict export alone gives, op by op: capture adds ops to a mode, never takes one away.
        strict = annotated(export(definition, x, strict=True).module(check_guards=False), quantizer)
        assert Counter(op for _, op, *_ in found[0]) == Counter(op for _, op, *_ in strict)


def test_efficientnet_lite_whose_convolutions_are_a_subclass_trap_28() -> None:
    definition, x = efficientnet_lite0(), (torch.randn(1, 3, 64, 64),)
    convs = [
        sum("conv2d" in op for _, op, *_ in annotated(graph, "x86"))
        for graph in (
            export(definition, x).module(check_guards=False),
            capture(definition, x).module(),
            capture(definition, x, strict=True).module(),
        )
    ]
    assert convs == [0, 49, 49]


@pytest.mark.filterwarnings("ignore:The input of maxpool2d is not quantized")
@pytest.mark.parametrize("name", MODELS)
def test_without_capture_strict_false_fails_or_skips_ops_trap_14(name: str) -> None:
    definition, x = model(name)
    graph = export(definition, x).module(check_guards=False)
    if PLAIN_X86[name] == "ValueError":
        with pytest.raises(ValueError, match="more than one output node"):
            annotated(graph, "x86")
    else:
        assert len(annotated(graph, "x86")) == PLAIN_X86[name]
