"""What people bring from other tools: it works, or the error says what to call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub, fuse_modules

import pt2qa
from pt2qa._graph.handles import handle_of, op_of
from pt2qa.errors import CaptureError, PairingError, QuantizeError, SelectionError
from tests.flows import quantized_pair, residual_pair
from tests.models import images

X = torch.linspace(-1, 1, 8).reshape(2, 4)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized_pair(MODEL, X)


@pytest.fixture
def analysis(pair: pt2qa.QuantizedPair, tmp_path: Path) -> pt2qa.QuantAnalysis:
    return pt2qa.QuantAnalysis(pair, [X], out_dir=tmp_path, progress=False)


def test_a_name_that_is_not_there_is_answered_with_near_ones_and_the_table_of_other_tools() -> None:
    with pytest.raises(AttributeError, match=r"did you mean 'compare_weights'\? docs/numeric_suite\.md has"):
        pt2qa.compare_weight  # noqa: B018
    page = (Path(__file__).parent.parent / "docs" / "numeric_suite.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert len(table.splitlines()) > 60
    assert [name for name in re.findall(r"`pt2qa\.(\w+)", table) if not hasattr(pt2qa, name)] == []


def test_two_models_are_one_pair(pair: pt2qa.QuantizedPair) -> None:
    both: Any = (pair.reference, pair.quantized)
    for function in (pt2qa.compare_layers, pt2qa.find_bad_cases, pt2qa.sensitivity):
        with pytest.raises(SelectionError, match=r"got GraphModule, .* pair = pt2qa\.pair\(reference, quantized\)"):
            function(*both)


@pytest.mark.parametrize("metric", ["COSINE", "L1", "ATOL"])
def test_metrics_may_be_in_upper_case(analysis: pt2qa.QuantAnalysis, metric: str) -> None:
    assert analysis.auto_find_bad_case(metric=metric).rows[0].metric == metric.lower()
    assert analysis.sensitivity(metric=metric).metric == metric.lower()


ANALYSES: dict[str, Callable[[Any], Any]] = {
    "compare_layers": lambda given: pt2qa.compare_layers(given, [X]),
    "compare_modules": lambda given: pt2qa.compare_modules(given, [X], modules=["0"]),
    "compare_weights": pt2qa.compare_weights,
    "compare_deployed": lambda given: pt2qa.compare_deployed(given, [X]),
    "find_bad_cases": lambda given: pt2qa.find_bad_cases(given, [X]),
    "sensitivity": lambda given: pt2qa.sensitivity(given, [X]),
    "reconfigure": lambda given: pt2qa.reconfigure(given, [X], target=30),
    "diagnose": lambda given: pt2qa.diagnose(given, [X]),
    "QuantAnalysis": lambda given: pt2qa.QuantAnalysis(given, [X], out_dir="out"),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_of_something_else_than_a_pair_says_how_to_make_one(pair: pt2qa.QuantizedPair, name: str) -> None:
    for given, message in (
        (MODEL, r"got Sequential, .* pair = pt2qa\.quantize\(pt2qa\.capture\(model, example_inputs\), quantizer, "),
        (pair.reference, r"got GraphModule, .* pair = pt2qa\.pair\(reference, quantized\), of both graphs"),
        (pair.capture, r"got Capture, .* pair = pt2qa\.quantize\(capture, quantizer, batches\)"),
    ):
        with pytest.raises(SelectionError, match=message):
            ANALYSES[name](given)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_both_sides_of_a_row_are_the_same_op(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    ops = [
        {handle_of(node): op_of(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        for graph in (pair.reference, pair.quantized)
    ]
    rows = pt2qa.compare_layers(pair, [images()], progress=False).rows
    compared = [row for row in rows if row.op != "input"]
    assert len(compared) > 4
    assert [(ops[0][row.handle], ops[1][row.handle]) for row in compared] == [(row.op, row.op) for row in compared]


class WrittenForEagerMode(nn.Module):
    """Stubs, a sum as a module, fused modules: what the tutorial's ResNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.add = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.add.add_relu(self.relu(self.bn(self.conv(x))), x))


def test_a_float_model_that_was_written_for_eager_mode_is_captured() -> None:
    model = fuse_modules(WrittenForEagerMode().eval(), [["conv", "bn", "relu"]])
    pair = quantized_pair(model, images())
    rows = pt2qa.compare_layers(pair, [images()], progress=False).rows
    assert [row.name for row in rows if row.op != "input"] == ["conv.0/conv2d", "conv.1/relu", "add", "relu"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_model_that_eager_mode_or_fx_prepared_or_converted_is_refused() -> None:
    from torch.ao.quantization import QConfigMapping, convert, default_qconfig, prepare
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model: Any = WrittenForEagerMode().eval()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    prepared(images())
    fx = prepare_fx(MODEL, QConfigMapping().set_global(default_qconfig), (X,))
    fx(X)
    for made in (prepared, convert(prepared), fx, convert_fx(fx)):
        with pytest.raises(CaptureError, match="was prepared or quantized by eager mode or FX already: "):
            pt2qa.capture(made, images())
    with pytest.raises(CaptureError, match=r"by eager mode or FX already: .* Pass the float model"):
        pt2qa.check(convert(prepared))


def test_an_eager_model_is_captured_first() -> None:
    with pytest.raises(QuantizeError, match=r"got Sequential, expected a Capture\. Make one: pt2qa\.capture\("):
        pt2qa.quantize(MODEL, "xnnpack", [X])
    with pytest.raises(
        PairingError, match=r"is of type Sequential; expected .* Capture an eager model: pt2qa\.capture\("
    ):
        pt2qa.pair(MODEL, MODEL)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_model_that_eager_mode_quantized_is_named() -> None:
    from torch.ao.quantization import quantize_dynamic

    quantized = quantize_dynamic(MODEL, {nn.Linear})
    with pytest.raises(CaptureError, match=r"by eager mode or FX already: 0 \(Linear\), .* Pass the float model"):
        pt2qa.capture(quantized, X)
