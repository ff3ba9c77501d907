"""Prepare changes nothing that a model returns, of whatever dtype; where it does, that is an error that says what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2qa
from tests.check.plain_quantizer import PlainQuantizer
from tests.flows import direct_sqnr, quantized_pair
from tests.models import SharedConv, images, randomize_batch_norms


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


def half(dtype: torch.dtype, *, outputs: torch.dtype) -> nn.Module:
    """Convolutions with batch norms in a dtype, and the result in another."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.body(x).to(outputs)
            return result

    torch.manual_seed(0)
    return randomize_batch_norms(Half()).to(dtype)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 60), (torch.float16, 80)])
@pytest.mark.parametrize("outputs", [torch.float32, torch.float16])
def test_batch_norms_in_half_precision_are_folded_to_what_their_dtype_has(
    dtype: torch.dtype, most: float, outputs: torch.dtype
) -> None:
    """Trap 55: folding costs the rounding of the dtype, which is more than 60 dB have room for."""
    x = images().to(dtype)
    model = half(dtype, outputs=outputs)
    pair = quantized_pair(model, x, "x86")
    report = pt2qa.compare_layers(pair, [x], progress=False)
    with torch.no_grad():
        assert direct_sqnr(model(x), pair.reference(x)) < most
        expected = direct_sqnr(pair.reference(x), pair.quantized(x))
    assert report.outputs[0].sqnr == pytest.approx(expected, abs=1e-3)


def test_a_batch_norm_that_is_folded_wrongly_is_an_error_in_half_precision_too() -> None:
    x = images().to(torch.bfloat16)
    model = randomize_batch_norms(SharedConv(same_norm=False)).to(torch.bfloat16)
    with pytest.raises(
        pt2qa.QuantizeError, match=r"at least 30 dB.*capture model\.float\(\) to tell that from a fault"
    ):
        quantized_pair(model, (x, x.flip(0)), "x86")
