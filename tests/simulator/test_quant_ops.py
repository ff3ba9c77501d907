"""The ops of quantization: which they are, and what each says of its rounding, one node at a time."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED as OPS
from pt2qa._simulator import quant_ops, slice_ops
from pt2qa._simulator.program import QuantParams

ATEN = torch.ops.aten
SCALES, ZEROS = torch.tensor([0.5, 0.25]), torch.tensor([1, 3])
INT8 = (-128, 127, torch.int8)


class Nodes:
    """One node of each kind, and the constants that some of them read."""

    def __init__(self) -> None:
        graph = Graph()
        self.constants: dict[Node, Tensor] = {}

        def constant(name: str, value: Tensor) -> Node:
            node = graph.get_attr(name)
            self.constants[node] = value
            return node

        def call(target: Any, *args: Any, **kwargs: Any) -> Node:
            return graph.call_function(target, args, kwargs)

        x = self.x = graph.placeholder("x")
        scale, zero = constant("scale", torch.tensor(0.5)), constant("zero", torch.tensor(3))
        scales, zeros = constant("scales", SCALES), constant("zeros", ZEROS)
        self.chosen = call(OPS.choose_qparams.tensor, x, -128, 127, 1e-6, torch.int8)
        first, second = (call(operator.getitem, self.chosen, number) for number in (0, 1))
        self.picked = first
        self.static = call(OPS.quantize_per_tensor.default, x, 0.5, 3, *INT8)
        self.back = call(OPS.dequantize_per_tensor.default, self.static, 0.5, 3, *INT8)
        self.half = call(OPS.dequantize_per_tensor.default, self.static, 0.5, 3, *INT8, out_dtype=torch.float16)
        self.packet = call(OPS.quantize_per_tensor, x, 0.5, 3, *INT8)
        self.computed_packet = call(OPS.quantize_per_tensor, x, scale, zero, *INT8)
        self.held = call(OPS.quantize_per_tensor.tensor, x, scale, zero, *INT8)
        self.dynamic = call(OPS.quantize_per_tensor.tensor, x, first, second, *INT8)
        self.swapped = call(OPS.quantize_per_tensor.tensor, x, second, first, *INT8)
        self.foreign = call(OPS.quantize_per_tensor.tensor, self.back, first, second, *INT8)
        self.half_chosen = call(OPS.quantize_per_tensor.tensor, x, first, zero, *INT8)
        self.channels = call(OPS.quantize_per_channel.default, x, scales, zeros, 1, *INT8)
        self.channels_back = call(OPS.dequantize_per_channel.default, self.channels, scales, zeros, 1, *INT8)
        self.slices = call(slice_ops.choose_qparams_per_slice, x, [1], -128, 127)
        picks = [call(operator.getitem, self.slices, number) for number in (0, 1)]
        self.sliced = call(slice_ops.quantize_per_slice, x, *picks, [1], *INT8)
        self.cast = call(OPS.convert_element_type.no_fuse, x, torch.float16)
        self.relu = call(ATEN.relu.default, x)
        self.pick_of_another = call(operator.getitem, self.relu, 0)
        self.method = graph.call_method("quantize_per_tensor", (x,))

    def named(self, rule: Any) -> set[str]:
        return {name for name, node in vars(self).items() if isinstance(node, Node) and rule(node)}


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    return Nodes()


QUANTIZE = {
    *("static", "packet", "computed_packet", "held", "dynamic", "swapped", "foreign", "half_chosen", "channels"),
    "sliced",
}
DEQUANTIZE = {"back", "half", "channels_back"}


def test_which_nodes_are_of_quantization(nodes: Nodes) -> None:
    assert nodes.named(quant_ops.is_quantize) == QUANTIZE
    assert nodes.named(quant_ops.is_dequantize) == DEQUANTIZE
    assert nodes.named(quant_ops.is_choose_qparams) == {"chosen", "slices"}
    assert nodes.named(quant_ops.is_half_cast) == {"cast"}
    every = QUANTIZE | DEQUANTIZE | {"chosen", "slices", "cast"}
    assert nodes.named(quant_ops.is_quantization) == every
    assert nodes.named(quant_ops.serves_quantization) == every | {"picked"}
    computed = {"computed_packet", "held", "dynamic", "swapped", "foreign", "half_chosen"}
    assert nodes.named(quant_ops.is_static_per_tensor) == {"static", "packet", "back", "half"}
    assert nodes.named(quant_ops.is_dynamic_per_tensor) == computed
    assert nodes.named(quant_ops.is_plain_dequantize) == {"back", "channels_back"}


def test_who_chose_a_scale(nodes: Nodes) -> None:
    assert quant_ops.chosen_by(nodes.dynamic) is nodes.chosen
    assert quant_ops.chosen_by(nodes.sliced) is nodes.slices
    for node in (nodes.static, nodes.held, nodes.swapped, nodes.foreign, nodes.half_chosen, nodes.channels):
        assert quant_ops.chosen_by(node) is None, node


PLAIN = QuantParams("int8", 0.5, 3, -128, 127)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("static", PLAIN),
        ("back", PLAIN),
        ("packet", PLAIN),
        ("computed_packet", PLAIN),
        ("held", PLAIN),
        ("dynamic", replace(PLAIN, scale=None, zero_point=None, dynamic=True)),
        ("channels", replace(PLAIN, scale=SCALES, zero_point=ZEROS, axis=1)),
        ("channels_back", replace(PLAIN, scale=SCALES, zero_point=ZEROS, axis=1)),
        ("sliced", replace(PLAIN, scale=None, zero_point=None, dynamic=True, slice_axes=(1,))),
        ("cast", QuantParams("float16")),
    ],
)
def test_every_parameter_of_a_rounding(nodes: Nodes, name: str, expected: QuantParams) -> None:
    found = quant_ops.read_params(getattr(nodes, name), nodes.constants.get)
    for key in ("dtype", "quant_min", "quant_max", "axis", "dynamic", "slice_axes"):
        assert getattr(found, key) == getattr(expected, key), key
    for key in ("scale", "zero_point"):
        own, wanted = getattr(found, key), getattr(expected, key)
        assert type(own) is type(wanted)
        assert torch.equal(own, wanted) if isinstance(wanted, Tensor) else own == wanted


def test_numbers_that_stand_for_many() -> None:
    channels = QuantParams("int8", SCALES, ZEROS)
    assert (channels.largest_scale, PLAIN.largest_scale) == (0.5, 0.5)
    assert (QuantParams("int8", SCALES, torch.tensor([3, 3])).single_zero_point, PLAIN.single_zero_point) == (3.0, 3.0)
    unknown = (channels.single_zero_point, QuantParams("int8").single_zero_point, QuantParams("int8").largest_scale)
    assert all(each != each for each in unknown)
