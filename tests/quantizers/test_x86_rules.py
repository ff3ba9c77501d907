"""Trap 22: sums of two products that saturate at 16 bits, found from the weights and the CPU."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch
from torch import nn

import pt2qa
from pt2qa.report import Findings
from pt2qa_x86.rules import INT16_MAX
from tests.flows import quantized_pair
from tests.models import images

RULE = "x86-pair-sums"


def checked(pair: pt2qa.QuantizedPair, cpu: str | Collection[str] = "no-vnni") -> Findings:
    return pt2qa.check(pair, rules=[RULE], cpu=cpu)


def linear_pair(*weights: float, **options: bool) -> pt2qa.QuantizedPair:
    """A linear with these weights for every output; the largest of them becomes 127."""
    model = nn.Linear(len(weights), 3).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weights).expand(3, -1))
    return quantized_pair(model, torch.randn(4, len(weights)), pt2qa.quantizer("x86", **options))


def test_trap_22_pairs_of_8_bit_inputs_saturate_and_pairs_of_7_bits_do_not() -> None:
    (row,) = checked(linear_pair(1.0, 1.0, 0.0, 0.0)).rows
    assert (row.name, row.severity, row.value) == ("linear", "warning", 255 * 127 * 2)
    assert row.why == "inputs reach 255, and pairs of weights exceed 16 bits with that"
    assert row.value > INT16_MAX > 127 * 127 * 2
    assert checked(linear_pair(1.0, 1.0, 0.0, 0.0, reduce_range=True)).rows == ()


@pytest.mark.parametrize(
    ("weights", "saturates"),
    [
        ((-1.0, -1.0, 0.1, 0.1), True),
        ((1.0, -1.0, 1.0, -1.0), False),  # products of different sign
        ((1.0, 0.0, 1.0, 0.0), False),  # in different pairs
        ((0.0, 1.0, 1.0, 0.0), False),  # adjacent, but in different pairs
        ((0.0, 0.0, 1.0), False),  # the last of an odd number is alone
        ((1.0, 0.0), False),
    ],
)
def test_only_weights_that_can_do_it_are_named(weights: tuple[float, ...], saturates: bool) -> None:
    assert bool(checked(linear_pair(*weights)).rows) == saturates


def test_the_largest_sum_is_that_of_the_integer_weights() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(nn.Conv2d(5, 8, 3).eval(), images_of(5), "x86")
    (row,) = checked(pair).rows
    (product,) = [constant for constant in pair.program.constants if constant.site is not None]
    scale = pair.sites[product.site or 0].params.scale
    assert isinstance(scale, torch.Tensor)
    integers = np.rint(product.quantized.double().numpy() / scale.double().numpy()[:, None, None, None])
    sums = [
        max(255 * (max(a, 0) + max(b, 0)), -255 * (min(a, 0) + min(b, 0)))
        for out in integers
        for first in (0, 2)
        for a, b in zip(out[first].flat, out[first + 1].flat, strict=True)
    ]
    assert row.value == max(sums)


def images_of(channels: int) -> torch.Tensor:
    return torch.randn(2, channels, 8, 8)


def test_depthwise_kernels_multiply_in_32_bits() -> None:
    assert checked(quantized_pair(nn.Conv2d(3, 3, 3, groups=3).eval(), images(), "x86")).rows == ()


def test_dynamic_linears_have_8_bit_inputs_too() -> None:
    model = nn.Linear(2, 3).eval()
    nn.init.constant_(model.weight, 0.5)
    pair = quantized_pair(model, torch.randn(4, 2), pt2qa.quantizer("x86", mode="dynamic"))
    assert [row.value for row in checked(pair)] == [255 * 127 * 2]


@pytest.mark.parametrize(
    ("cpu", "reason"),
    [
        ("vnni", "to CPUs with VNNI, which add products in 32 bits"),
        ({"avx2", "avx_vnni"}, "to CPUs with VNNI, which add products in 32 bits"),
        ({"amx_int8"}, "to CPUs with VNNI, which add products in 32 bits"),
        ({"asimddp"}, 'to CPUs that are not known to be x86; give cpu="no-vnni"'),
    ],
    ids=["vnni", "avx_vnni", "amx", "arm"],
)
def test_other_cpus_add_in_32_bits(cpu: str | Collection[str], reason: str) -> None:
    findings = checked(linear_pair(1.0, 1.0), cpu)
    assert findings.rows == ()
    assert (findings.rules[0].outcome, findings.rules[0].reason) == ("not applied", reason)


def test_the_rule_comes_with_the_plug_in_alone() -> None:
    assert RULE not in {one.rule for one in pt2qa.check(nn.Linear(2, 2)).rules}
    assert RULE in {one.rule for one in pt2qa.check(nn.Linear(2, 2), quantizer="x86").rules}


# -- x86-ignored-range -------------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """Two layers with something between."""

    def __init__(self, layer: type[nn.Module], between: nn.Module) -> None:
        super().__init__()
        options = {"kernel_size": 1} if layer is nn.Conv2d else {}
        self.first, self.between, self.second = layer(4, 4, **options), between, layer(4, 4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.between(self.first(x)))
        return result


RANGES = {
    "conv": (nn.Conv2d, nn.Identity(), ["first/conv2d"]),
    "conv, relu": (nn.Conv2d, nn.ReLU(), ["between/relu"]),
    "conv, hardtanh": (nn.Conv2d, nn.Hardtanh(-4.0, 4.0), []),
    "linear, relu": (nn.Linear, nn.ReLU(), ["between/relu"]),
    "linear, gelu": (nn.Linear, nn.GELU(), []),
}


@pytest.mark.parametrize("case", RANGES)
def test_kernels_that_round_their_own_output_ignore_a_reduced_range(case: str) -> None:
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    layer, between, names = RANGES[case]
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, 6) if layer is nn.Conv2d else torch.randn(64, 4)
    pair = quantized_pair(Pairs(layer, between), x, pt2qa.quantizer("x86", reduce_range=True))
    rows = pt2qa.check(pair, rules=["x86-ignored-range"]).rows
    assert [row.name for row in rows] == names
    lowered = lower_pt2e_quantized_to_x86(pair.quantized, (x,))
    largest = 0

    class Watched(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            nonlocal largest
            value = super().run_node(node)
            if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
                largest = max(largest, int(value.max()))
            return value

    with torch.no_grad():
        Watched(lowered).run(4 * x)
    assert (largest > 127) == bool(names)


def test_x86_adds_biases_in_float() -> None:
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    model, x = nn.Linear(4, 4).eval(), torch.rand(16, 4)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 1e6)
    pair = quantized_pair(model, x, "x86")
    findings = pt2qa.check(pair, rules=["bias-overflow"])
    assert findings.rules[0].reason == "to kernels that add the bias in float"
    computed = lower_pt2e_quantized_to_x86(pair.quantized, (x,))(x)
    assert torch.equal(computed, torch.full((16, 4), 1e6))
