"""What quantizers declare, in each of the ways that there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2qa._conformance.properties.soundness import patterns_of


def torchaos(*patterns: list[Any]) -> SimpleNamespace:
    """As torchao's quantizers declare."""
    return SimpleNamespace(get_supported_operators=lambda: [SimpleNamespace(operators=list(patterns))])


@pytest.mark.parametrize(
    ("declared", "kinds"),
    [
        ([nn.Conv2d, nn.ReLU], ("conv2d", "relu")),
        ([F.conv2d, F.relu], ("conv2d", "relu")),
        ([nn.ConvTranspose2d], ("conv_transpose2d",)),
        ([nn.AdaptiveAvgPool2d], ("adaptive_avg_pool2d",)),
        ([nn.BatchNorm2d], ("batch_norm",)),
        ([nn.ReLU6], ("hardtanh",)),
        ([nn.LSTM], ("lstm",)),
        ([torch.add], ("add",)),
        ([torch.ops.aten.add_.Tensor], ("add",)),
    ],
)
def test_classes_functions_and_overloads_are_kinds_of_op(declared: list[Any], kinds: tuple[str, ...]) -> None:
    assert patterns_of(torchaos(declared)) == (kinds,)


def test_parts_of_a_quantizer_declare_what_they_look_for() -> None:
    looks_for = SimpleNamespace(partition_types=lambda: [torch.ops.aten.linear.default])
    parts = [SimpleNamespace(pattern=looks_for), torchaos([torch.add])]
    assert patterns_of(SimpleNamespace(quantizers=parts)) == (("linear",), ("add",))


def test_its_own_declaration_goes_before_all_others() -> None:
    own = torchaos([torch.add])
    own.declared_patterns = [["conv2d", "relu"]]
    assert patterns_of(own) == (("conv2d", "relu"),)
    assert patterns_of(SimpleNamespace(), object()) == ()
