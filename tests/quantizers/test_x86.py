"""Each option of the x86 plug-in changes what is quantized as it says, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer, quantizable_ops

from pt2qa.errors import PluginError
from pt2qa.plugins import quantizer
from pt2qa_x86 import PLUGIN, X86
from tests.quantizers.graphs import Attention, export, quantized

FLOAT, HALF, TENSOR, CHANNEL, DYNAMIC = "float", "float16", "tensor", "channel", "dynamic"


def told(action: Callable[[], object]) -> str:
    with pytest.raises(PluginError) as caught:
        action()
    return str(caught.value)


def test_the_entry_point_holds_the_defaults() -> None:
    assert quantizer("x86") == PLUGIN == X86(mode="static", reduce_range=False)


def test_ops_that_can_be_set_are_those_that_the_quantizer_knows() -> None:
    from pt2qa_x86.plugin import QUANTIZED_OPS

    assert {str(op).split(".")[1] for op in quantizable_ops} == set(QUANTIZED_OPS)


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_plain_settings_quantize_weights_per_channel_and_inputs_to_8_bits(strict: bool) -> None:
    outcome = quantized(X86(), strict=strict)
    assert outcome.weights_of("conv2d") + outcome.weights_of("linear") == [CHANNEL] * 4
    assert outcome.inputs_of("mul") == [TENSOR] * 2
    assert set(outcome.range_of("conv2d") + outcome.range_of("linear")) == {(0, 255)}


def test_reduce_range_takes_one_bit_from_activations() -> None:
    outcome = quantized(X86(reduce_range=True))
    assert set(outcome.range_of("conv2d") + outcome.range_of("linear")) == {(0, 127)}
    assert outcome.weights_of("conv2d") == [CHANNEL] * 2


def test_dynamic_mode_quantizes_linears_by_their_input_and_nothing_else() -> None:
    outcome = quantized(X86(mode="dynamic"))
    assert outcome.inputs_of("linear") == [DYNAMIC, CHANNEL, FLOAT] * 2
    assert set(outcome.inputs_of("conv2d") + outcome.inputs_of("merge") + outcome.inputs_of("pool")) == {FLOAT}


def test_weight_only_mode_makes_linear_weights_float16_and_nothing_else() -> None:
    outcome = quantized(X86(mode="weight_only"))
    assert outcome.inputs_of("linear") == [FLOAT, HALF, FLOAT] * 2
    assert set(outcome.inputs_of("conv2d") + outcome.inputs_of("merge") + outcome.inputs_of("pool")) == {FLOAT}


@pytest.mark.parametrize("path", ["head", "head.1"])
def test_a_module_has_options_of_its_own(path: str) -> None:
    outcome = quantized(X86(modules={path: {"reduce_range": True}}))
    assert outcome.range_of("head.1") == [(0, 127)]
    assert outcome.range_of("blocks.1.conv") == [(0, 255)]


@pytest.mark.parametrize("path", ["blocks", "blocks.0", "blocks.0.conv"])
def test_a_module_is_left_in_float(path: str) -> None:
    outcome = quantized(X86(modules={path: None}))
    assert outcome.weights_of("blocks.0") == [FLOAT]
    assert outcome.weights_of("blocks.1") == [FLOAT if path == "blocks" else CHANNEL]
    assert outcome.weights_of("linear") == [CHANNEL] * 2


def test_an_op_type_is_left_in_float() -> None:
    outcome = quantized(X86(op_types={"conv2d": None, "mul": None}))
    assert outcome.weights_of("conv2d") == [FLOAT] * 2
    assert outcome.inputs_of("mul") == [FLOAT] * 2
    assert outcome.weights_of("linear") == [CHANNEL] * 2


def test_matmul_is_off_until_it_is_named() -> None:
    shape = (2, 5, 8)
    assert quantized(X86(), Attention(), shape).inputs_of("matmul") == [FLOAT] * 2
    assert quantized(X86(op_types={"matmul": {}}), Attention(), shape).inputs_of("matmul") == [TENSOR] * 2


def test_weight_only_modules_stand_beside_static_ones() -> None:
    outcome = quantized(X86(modules={"head": {"mode": "weight_only"}, "head.3": None}))
    assert outcome.inputs_of("head.1") == [FLOAT, HALF, FLOAT]
    assert outcome.inputs_of("head.3") == [FLOAT] * 3
    assert outcome.weights_of("conv2d") == [CHANNEL] * 2


def test_weight_only_in_a_module_leaves_its_convolutions_in_float() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(256, 4))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.part(x)
            return result

    outcome = quantized(X86(modules={"part": {"mode": "weight_only"}}), Mixed())
    assert outcome.inputs_of("conv2d") == [FLOAT] * 3
    assert outcome.inputs_of("linear") == [FLOAT, HALF, FLOAT]


def test_the_deepest_module_decides_then_the_op_type() -> None:
    plugin = X86(
        modules={"blocks": None, "blocks.1": {"reduce_range": True}},
        op_types={"conv2d": {}, "linear": {"reduce_range": True}},
    )
    outcome = quantized(plugin)
    assert outcome.weights_of("blocks.0") == [FLOAT]
    assert outcome.range_of("blocks.1.conv") == [(0, 127)]
    assert set(outcome.range_of("linear")) == {(0, 127)}


def test_qat_takes_all_options() -> None:
    outcome = quantized(X86(modules={"head.1": None, "head.3": {"reduce_range": True}}), qat=True)
    assert outcome.weights_of("conv2d") == [CHANNEL] * 2
    assert outcome.inputs_of("head.1") == [FLOAT] * 3
    assert outcome.range_of("head.3") == [(0, 127)]


def test_dynamic_qat_fake_quantizes_linears() -> None:
    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(torch.sigmoid(self.first(x)))
            return result

    plugin = X86(mode="dynamic", modules={"second": {"reduce_range": True}})
    outcome = quantized(plugin, Linears(), (4, 8), qat=True)
    assert outcome.inputs_of("linear") == [DYNAMIC, CHANNEL, FLOAT] * 2
    assert outcome.range_of("linear") == [(0, 255), (0, 127)]


def test_what_the_quantizer_would_only_warn_about_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from pt2qa_x86 import configure

    def skip(self: X86InductorQuantizer, name: str, config: object) -> None:
        warnings.warn(f"Skip the quantization config for {name}.", stacklevel=2)

    monkeypatch.setattr(X86InductorQuantizer, "set_module_name_qconfig", skip)
    assert told(lambda: X86(modules={"head": None}).build(export(), qat=False)) == (
        "quantizer 'x86': torchao's quantizer refused 'head': Skip the quantization config for head."
    )
    assert configure.quantizer_for(X86(), (), export(), False).module_name_qconfig == {}


def test_building_does_not_change_the_graph() -> None:
    graph = export()
    before = (str(graph.graph), [sorted(node.meta) for node in graph.graph.nodes])
    X86(modules={"blocks.0": None, "head": {"mode": "weight_only"}}, op_types={"mul": None}).build(graph, qat=False)
    assert (str(graph.graph), [sorted(node.meta) for node in graph.graph.nodes]) == before


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (
            X86(modules={"L['self'].head": None}),
            "quantizer 'x86': modules[\"L['self'].head\"]: no op of the graph comes from a module of this path; "
            "did you mean 'head' or 'head.3' or 'head.2'? Modules with something to quantize: blocks, ",
        ),
        (
            X86(op_types={"maxpool2d": None}),
            "quantizer 'x86': op_types['maxpool2d']: cannot be set; did you mean 'max_pool2d' or "
            "'avg_pool2d'? It takes conv1d, conv2d, linear, mul, max_pool2d, cat",
        ),
        (
            X86(op_types={"matmul": {}}),
            "quantizer 'x86': op_types['matmul']: the graph has no matmul; it has conv2d (2), mul (1), cat (1), "
            "adaptive_avg_pool2d (1), flatten (1), linear (2)",
        ),
        (
            X86(modules={"head": {"mode": "dynamic"}}),
            "quantizer 'x86': static and dynamic quantization do not mix in one model, but mode is 'static', "
            "modules['head'] is 'dynamic'. Use one of the two, and None for what shall stay in float",
        ),
        (
            X86(modules={"blocks.0": {"mode": "weight_only"}}),
            "quantizer 'x86': modules['blocks.0']: mode 'weight_only' is for linear, and there is only conv2d. "
            "Use 'static', or None to leave it in float",
        ),
        (
            X86(mode="weight_only", reduce_range=True),
            "quantizer 'x86': reduce_range is about int8 activations, and mode 'weight_only' has none: drop "
            "one of them",
        ),
    ],
    ids=["prefix", "op name", "op not there", "mixed modes", "not linear", "no activations"],
)
def test_what_the_graph_or_the_backend_does_not_have_is_refused(plugin: X86, text: str) -> None:
    assert told(lambda: plugin.build(export(), qat=False)).startswith(text)


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (
            X86(modules={"head.1": {"mode": "weight_only"}}),
            "quantizer 'x86': modules['head.1'] is 'weight_only', which has no QAT: float16 weights need no training. "
            "Use 'static' or 'dynamic', or quantize with qat=False",
        ),
        (
            X86(modules={"blocks.0": None}),
            "quantizer 'x86': modules['blocks.0']: blocks.0.conv is a convolution with a batch norm, which torchao's "
            "QAT cannot leave in float. Quantize it, or use qat=False",
        ),
    ],
    ids=["weight only", "float conv-bn"],
)
def test_what_qat_does_not_have_is_refused(plugin: X86, text: str) -> None:
    assert told(lambda: plugin.build(export(), qat=True)) == text


def test_a_linear_that_shares_its_module_with_other_ops_cannot_be_weight_only() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x * x, self.weight)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inline = Inline()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inline(x)
            return result

    plugin = X86(modules={"inline": {"mode": "weight_only"}})
    assert told(lambda: plugin.build(export(Outer(), (4, 8)), qat=False)) == (
        "quantizer 'x86': modules['inline']: this mode is for linear only, and 'inline' calls mul beside it. "
        "Put the linear into a module of its own, or use None"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fp16"}, "quantizer 'x86': option mode: got 'fp16', expected static|dynamic|weight_only."),
        ({"per_channel": False}, "quantizer 'x86' has no option 'per_channel'. Its options: mode (static|dynamic|"),
        ({"op_types": {"linear": {"reduce": True}}}, "op_types['linear']: quantizer 'x86' has no option 'reduce'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    assert told(lambda: quantizer("x86", **options)).startswith(text)
