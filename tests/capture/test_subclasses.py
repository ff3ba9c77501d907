"""Models of torchao's ``quantize_`` have weights without memory of their own: refused by name but in a pair."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

import pt2qa
from tests.models import Linears

X = torch.linspace(-1, 1, 64).reshape(4, 16)
WHAT = r"weight is a tensor subclass, torchao\..*Int8Tensor \(1 more like it\), .* Capture the float model, as it was"


@functools.cache
def transformed(config: type) -> tuple[nn.Module, ExportedProgram]:
    model = Linears().eval()
    quantize_(model, config())
    return model, torch.export.export(model, (X,))


@functools.cache
def pair() -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(Linears().eval(), X), "xnnpack", [X], progress=False)


ENTRANCES: dict[str, tuple[type[pt2qa.Pt2qaError], Callable[[nn.Module, ExportedProgram], Any]]] = {
    "capture": (pt2qa.CaptureError, lambda model, program: pt2qa.capture(model, X)),
    "capture of its graph": (pt2qa.CaptureError, lambda model, program: pt2qa.capture(program.module(), X)),
    "with_handles": (pt2qa.CaptureError, lambda model, program: pt2qa.with_handles(program)),
    "check": (pt2qa.CaptureError, lambda model, program: pt2qa.check(model, X)),
    "check without inputs": (pt2qa.CaptureError, lambda model, program: pt2qa.check(model)),
    "check of the program": (pt2qa.CaptureError, lambda model, program: pt2qa.check(program)),
    "check of the graph": (pt2qa.CaptureError, lambda model, program: pt2qa.check(program.module())),
    "profile": (pt2qa.CaptureError, lambda model, program: pt2qa.profile(program, [X], progress=False)),
    "profile of the graph": (pt2qa.CaptureError, lambda model, program: pt2qa.profile(program.module(), [X])),
    "pair, reference": (pt2qa.PairingError, lambda model, program: pt2qa.pair(program, pair().quantized)),
    "pair, quantized": (pt2qa.PairingError, lambda model, program: pt2qa.pair(pair().reference, program.module())),
    "pair of the model": (pt2qa.PairingError, lambda model, program: pt2qa.pair(pair().reference, model)),
    "compare_graphs, a": (
        pt2qa.PairingError,
        lambda model, program: pt2qa.compare_graphs(program.module(), pair().reference, [X]),
    ),
    "compare_graphs, b": (
        pt2qa.PairingError,
        lambda model, program: pt2qa.compare_graphs(pair().reference, program.module(), [X]),
    ),
}


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_subclass_and_the_parameter_are_named(entrance: str, config: type) -> None:
    error, enter = ENTRANCES[entrance]
    with pytest.raises(error, match=WHAT):
        enter(*transformed(config))


def test_inputs_of_a_subclass_are_refused() -> None:
    model, _ = transformed(Int8WeightOnlyConfig)
    weight = model.get_parameter("first.weight")
    with pytest.raises(
        pt2qa.CaptureError, match=r"args\[0\] is of type Int8Tensor, a tensor subclass; expected a plain"
    ):
        pt2qa.capture(Linears().eval(), weight)
