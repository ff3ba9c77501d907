"""A converted graph that cannot run is refused by ``quantize``, and so are values that cannot be rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._graph.handles import op_of
from tests.check.plain_quantizer import AFFINE, EXACT, PlainQuantizer
from tests.flows import quantized_pair
from tests.models import Linears, images, residual


class Shifted(nn.Module):
    """An embedding of shifted indices, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(10, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.fc(self.table(tokens.clamp(max=8) + 1))
        return result


class Careless(Quantizer):  # type: ignore[misc]  # torchao is not typed
    """Rounds the results of additions and the inputs of linears, whatever their dtype."""

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function" and op_of(node.target) in ("add", "linear"):
                edges: dict[Any, Any] = {node.args[0]: AFFINE} if op_of(node.target) == "linear" else {}
                output = EXACT if op_of(node.target) == "add" else None
                node.meta["quantization_annotation"] = QuantizationAnnotation(edges, output, _annotated=True)
        return model

    def validate(self, model: GraphModule) -> None:
        return None


def test_a_converted_graph_that_cannot_run_is_refused_with_the_ops_name() -> None:
    """Trap 50."""
    tokens = torch.randint(0, 9, (2, 5))
    with pytest.raises(
        pt2qa.QuantizeError,
        match=r"Careless and convert_pt2e made cannot run: at add, quantized_decomposed.* int64\[2, 5",
    ) as error:
        quantized_pair(Shifted(), tokens, Careless())
    assert "overrides=OverridePlan((Edit('float', ('add',)),))" in str(error.value)
    assert "\n" not in str(error.value)
    plan = OverridePlan((Edit("float", ("add",)),))
    quantized_pair(Shifted(), tokens, Careless(), overrides=plan).verify(tokens)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic"])
def test_a_float64_model_is_refused_before_it_is_prepared(quantizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pt2qa._quantize.quantization._prepare", lambda *args: pytest.fail("was prepared"))
    message = r"the model computes in float64, which torch's quantize ops do not take. Pass model.float\(\)"
    for model, example in ((Linears(), torch.randn(4, 16)), (residual(), images())):
        with pytest.raises(pt2qa.QuantizeError, match=message):
            quantized_pair(model.double(), example.double(), quantizer)


class Precise(Linears):
    """Ends in float64."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x).double()
        return hidden.softmax(-1) + 1


def test_a_float64_part_is_refused_only_where_it_is_to_be_rounded() -> None:
    x = torch.randn(4, 16)
    quantized_pair(Precise(), x, PlainQuantizer()).verify(x)
    with pytest.raises(pt2qa.QuantizeError, match=r"PlainQuantizer asks for float64 values to be rounded, .*: softmax"):
        quantized_pair(Precise(), x, PlainQuantizer(("linear", "add")))
