"""One bias for several calls and stacked activations: executorch alone computes them wrong, and right once edited."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

import pt2qa
from pt2qa._quantize.plain_flow import plain_flow
from pt2qa_xnnpack import for_xnnpack
from pt2qa_xnnpack.artefact import differences
from pt2qa_xnnpack.separation import GRID, overwriting
from tests.flows import direct_sqnr, quantized_pair
from tests.quantizers.device import XNNPACKDevice


class Twice(nn.Module):
    """A linear on values of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = self.linear(x)
        return self.linear(0.1 * x), large


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


X = 3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
STACKED = {
    "hardtanh, relu": lambda x: F.relu(F.hardtanh(x)),
    "relu, hardtanh": lambda x: F.hardtanh(F.relu(x)),
    "relu6, copy, relu": lambda x: F.relu(F.relu6(4 * x).clone()),
}
CAUSES = {
    "xnnpack-shared-bias": "its bias is held at 0.1 times its value: with the scale of linear/linear",
    "xnnpack-stacked-activations": "the limits of hardtanh are lost, and its input has a scale for each row "
    "(pair.as_deployed() computes so)",
}
HARMLESS = {
    "relu, relu": lambda x: F.relu(F.relu(x)),
    "relu, relu6": lambda x: F.relu6(F.relu(x)),
    "two readers": lambda x: (lambda y: y + F.relu(y))(F.hardtanh(x)),
    "clamp": lambda x: F.relu(torch.clamp(x, -1, 1)),
    "a move between": lambda x: F.relu(F.hardtanh(x).view(4, 32)),
}


def first(outputs: Any) -> Tensor:
    found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return found


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


@functools.cache
def converted(shared: bool) -> torch.fx.GraphModule:
    """A plain flow of torchao, for the shared linear with static scales, or stacked activations with dynamic ones."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    model = seeded(Twice) if shared else seeded(lambda: Calls(STACKED["hardtanh, relu"]))
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=not shared)
    graph = torch.export.export(model, (X,)).module()
    prepared = prepare_pt2e(graph, XNNPACKQuantizer().set_global(config))
    prepared(X)
    return convert_pt2e(prepared)


def rows_of(rule: str, pair: pt2qa.QuantizedPair) -> list[Any]:
    return list(pt2qa.check(pair, quantizer="xnnpack", rules=[rule], progress=False).rows)


@pytest.mark.parametrize("shared", [True, False], ids=["xnnpack-shared-bias", "xnnpack-stacked-activations"])
def test_a_plain_flow_gives_a_wrong_program_and_a_right_one_once_edited(shared: bool) -> None:
    graph = converted(shared)
    model = seeded(Twice) if shared else seeded(lambda: Calls(STACKED["hardtanh, relu"]))
    expected = first(graph(X))
    wrong = XNNPACKDevice(graph, X)
    assert direct_sqnr(expected, wrong(X)) < 10
    ((_, held, made_so),) = differences(bytes(wrong.buffer), graph)
    assert made_so
    assert held == (
        "its bias is held at 0.1 times its value, with the scale of another call, as ExecuTorch holds a shared bias "
        "(xnnpack-shared-bias)"
        if shared
        else "its limits are 0..inf, here 0..1, as ExecuTorch holds stacked activations (xnnpack-stacked-activations)"
    )
    pair = pt2qa.pair(torch.export.export(model, (X,)), graph, quantizer="xnnpack")
    rule = "xnnpack-shared-bias" if shared else "xnnpack-stacked-activations"
    (finding,) = rows_of(rule, pair)
    report = pt2qa.compare_deployed(pair, [X], progress=False)
    assert [row.name for row in report.suspects[:1]] == [finding.name]
    assert report.suspects[0].cause == CAUSES[rule]
    assert CAUSES[rule] in " ".join(report.summary().split())
    ((_, done),) = for_xnnpack(graph)
    assert done == ("has a bias of its own" if shared else "has the limits 0..1")
    assert torch.equal(first(graph(X)), expected)
    assert direct_sqnr(expected, XNNPACKDevice(graph, X)(X)) > 35
    assert direct_sqnr(first(model(X)), expected) > 30
    assert for_xnnpack(graph) == []


class Moves(nn.Module):
    """Each move has other values behind it than before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x) * torch.linspace(0.1, 3, 16)
        joined = torch.cat([y[:, :4], y[:, 4:8]])
        return self.linear(y.narrow(1, 0, 8).reshape(4, 16)), joined.relu()


def test_a_move_between_unequal_scales_does_not_load_and_is_exact_once_edited() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    class EachItsOwn(XNNPACKQuantizer):  # type: ignore[misc]
        """A scale of its own for all that a slice, cat or view returns."""

        def annotate(self, model: GraphModule) -> GraphModule:
            annotated = super().annotate(model)
            for node in annotated.graph.nodes:
                if node.name.startswith(("slice", "narrow", "cat", "reshape")):
                    own = self.global_config.input_activation
                    inputs = dict.fromkeys(node.all_input_nodes, own)
                    node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, own, _annotated=True)
            return annotated

    config = get_symmetric_quantization_config(is_per_channel=True)
    model = seeded(Moves)
    prepared = prepare_pt2e(torch.export.export(model, (X,)).module(), EachItsOwn().set_global(config))
    prepared(X)
    plain = convert_pt2e(copy.deepcopy(prepared))
    with pytest.raises(RuntimeError, match="Failed to load method forward"):
        XNNPACKDevice(plain, X)
    assert GRID not in {done for _, done in for_xnnpack(prepared)}
    graph = copy.deepcopy(plain)
    assert GRID in {done for _, done in for_xnnpack(graph)}
    assert all(map(torch.equal, graph(X), plain(X)))
    assert direct_sqnr(first(plain(X)), XNNPACKDevice(graph, X)(X)) > 45
    assert GRID not in {done for _, done in for_xnnpack(graph)}
    exported = torch.export.export(model, (X,))
    before, after = (rows_of("requantize-mismatch", pt2qa.pair(exported, each)) for each in (plain, graph))
    assert "warning" in {row.severity for row in before}
    assert {row.severity for row in after} == {"note"}
    assert any(row.why.startswith("is rounded twice: scale") for row in after)


class ConvTwice(nn.Module):
    """ExecuTorch's quantizer annotates a convolution at its first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized = self.conv(x)
        return self.conv(0.1 * x), quantized


def test_a_bias_of_a_call_in_float_too_does_not_load_and_does_once_edited() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    x, model = torch.randn(2, 3, 8, 8), seeded(ConvTwice)
    prepared = prepare_pt2e(
        torch.export.export(model, (x,)).module(),
        XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True)),
    )
    prepared(x)
    graph = convert_pt2e(prepared)
    (finding,) = rows_of("xnnpack-shared-bias", pt2qa.pair(torch.export.export(model, (x,)), graph))
    assert finding.why == "it is in float, and conv/conv2d holds its bias as integers: the program does not load"
    with pytest.raises(RuntimeError, match="Failed to load method forward"):
        XNNPACKDevice(graph, x)
    assert len(for_xnnpack(graph)) == 1
    assert direct_sqnr(first(model(x)), XNNPACKDevice(graph, x)(x)) > 40


@pytest.mark.parametrize("case", [*STACKED, *HARMLESS])
def test_activations_are_overwritten_where_executorch_alone_gives_another_result(case: str) -> None:
    graph = torch.export.export(seeded(lambda: Calls((STACKED | HARMLESS)[case])), (X,)).module()
    found = [node for node in graph.graph.nodes if overwriting(node) is not None]
    assert (direct_sqnr(first(graph(X)), XNNPACKDevice(graph, X)(X)) < 60) == bool(found) == (case in STACKED)


def test_quantize_edits_them_and_the_printed_code_does_too() -> None:
    pair = quantized_pair(seeded(Twice), X)
    told = "edited for the backend's kernels, without changing a number: linear/linear_1 has a bias of its own"
    assert told in pair.notes
    assert rows_of("xnnpack-shared-bias", pair) == []
    assert direct_sqnr(first(pair.quantized(X)), XNNPACKDevice(pair.quantized, X)(X)) > 45
    flow = plain_flow(pair)
    assert flow.equal, flow.verified
    names: dict[str, Any] = {"__name__": "quantizer"}
    exec(flow.code, names)
    made = names["quantize"](seeded(Twice), (X,), [X])
    assert direct_sqnr(first(pair.quantized(X)), XNNPACKDevice(made, X)(X)) > 45


def test_a_dynamic_pair_keeps_its_numbers_and_its_ops() -> None:
    pair = quantized_pair(seeded(lambda: Calls(STACKED["hardtanh, relu"])), X, "xnnpack:mode=dynamic")
    assert rows_of("xnnpack-stacked-activations", pair) == []
    assert any("relu has the limits 0..1" in note for note in pair.notes)
    assert pt2qa.compare_layers(pair, [X], progress=False).rows
    assert direct_sqnr(first(pair.quantized(X)), XNNPACKDevice(pair.quantized, X)(X)) > 30


def test_a_model_without_either_is_not_edited() -> None:
    pair = quantized_pair(nn.Sequential(nn.Linear(16, 16), nn.ReLU6()), X)
    assert not any("edited for" in note for note in pair.notes)
    assert "for_xnnpack" not in plain_flow(pair, verify=False).code
