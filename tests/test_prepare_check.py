"""Prepare changes nothing that a model returns, of whatever dtype; where it does, that is an error that says what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2qa
from tests.check.plain_quantizer import PlainQuantizer
from tests.flows import quantized_pair


class Head(nn.Module):
    """Logits, what is largest, which are positive, and their logarithms, NaN where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.fc(x)
        return logits, logits.argmax(-1), logits > 0, logits.log()


class Rewrites(PlainQuantizer):
    """Changes the graph before it annotates."""

    def __init__(self, change: Callable[[GraphModule], None]) -> None:
        super().__init__()
        self.change = change

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        self.change(model)
        model.recompile()
        return model


def argmin(model: GraphModule) -> None:
    (node,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.argmax.default)
    node.target = torch.ops.aten.argmin.default


def negative(model: GraphModule) -> None:
    (node,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.gt.Scalar)
    node.target = torch.ops.aten.le.Scalar


def magnitude(model: GraphModule) -> None:
    (node,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.log.default)
    with model.graph.inserting_before(node):
        node.args = (model.graph.call_function(torch.ops.aten.abs.default, node.args),)


def batch() -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def test_integers_booleans_and_nan_that_stay_are_no_change() -> None:
    torch.manual_seed(0)
    quantized_pair(Head(), batch(), Rewrites(lambda model: None))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (argmin, r"output\[1\] differs in 4 of 4 values, .*, first at argmax"),
        (negative, r"output\[2\] differs in 20 of 20 values, .*, first at gt"),
        (magnitude, r"output\[3\] is NaN or infinite at \d+ other places, .*, first at log"),
    ],
)
def test_what_prepare_does_to_them_is_an_error(change: Callable[[GraphModule], None], what: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(pt2qa.QuantizeError, match=f"prepare changed the model before any quantization: {what}"):
        quantized_pair(Head(), batch(), Rewrites(change))
