"""Real faults of XNNPACK's kernels, each planted: the summary names the stage and the op."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import pt2qa
from pt2qa.report import DeployedReport
from tests.models import images


def deployed(pair: pt2qa.QuantizedPair, batch: Tensor) -> DeployedReport:
    return pt2qa.compare_deployed(pair, [batch], backend="xnnpack", progress=False)


def stage_and_op(report: DeployedReport) -> tuple[str, str]:
    """What the summary names, in its order."""
    found = re.search(r"Stage: (\w+) .*?Op: (\S+):", " ".join(report.summary().split()))
    assert found is not None, report.summary()
    return found[1], found[2]


@pytest.fixture(scope="module")
def rows() -> Tensor:
    """Six rows, each four times as large as the one before."""
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 6)[:, None]


@pytest.fixture(scope="module")
def dynamic(rows: Tensor) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return pt2qa.quantize(pt2qa.capture(nn.Linear(16, 8).eval(), rows), "xnnpack:mode=dynamic", [rows])


def test_a_dynamic_linear_with_a_scale_for_each_row(dynamic: pt2qa.QuantizedPair, rows: Tensor) -> None:
    report = deployed(dynamic, rows)
    assert [row.name for row in report.suspects] == ["linear"]
    assert stage_and_op(report)[1] == "linear"
    assert report.suspects[0].cause == "its input has a scale for each row (pair.as_deployed() computes so)"
    assert any("pair.as_deployed() simulates the kernels" in note for note in report.notes)


def test_the_pair_as_deployed_has_no_such_fault(dynamic: pt2qa.QuantizedPair, rows: Tensor) -> None:
    report = deployed(dynamic.as_deployed(), rows)
    assert report.suspects == ()
    (row,) = report.rows
    assert row.isolated_sqnr > 90
    assert report.stages[-1].step_sqnr > 90


def test_what_is_by_design_is_told_only_where_it_makes_the_difference(
    dynamic: pt2qa.QuantizedPair, rows: Tensor
) -> None:
    assert any("as_deployed" in note for note in dynamic.notes)
    report = deployed(dynamic, rows[-1:].repeat(6, 1))
    assert report.suspects == ()
    assert not any("as_deployed" in note for note in report.notes)


def test_a_narrow_range_that_the_kernels_ignore() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    config = get_symmetric_quantization_config(is_per_channel=True, act_qmin=-64, act_qmax=63)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, images()), XNNPACKQuantizer().set_global(config), [images()])
    healthy = deployed(pair, images())
    assert healthy.suspects == ()
    report = deployed(pair, 3 * images())
    assert [row.name for row in report.suspects] == ["input", "1/relu", "2/conv2d"]
    assert stage_and_op(report) == ("deployed", "input")
    assert {row.cause for row in report.suspects} == {"its integers are clamped to -128..127, not to -64..63"}
    assert "better than the converted graph says" in report.summary()
    assert "input: its range is -64..63, and the kernels clamp at -128..127 (xnnpack-ignored-range)" in report.notes


class Own(Quantizer):
    """Static int8 linears and cats, with a scale of their own for each value."""

    def __init__(self, eps: float = 2**-12) -> None:
        super().__init__()
        self.eps = eps

    def annotate(self, model: GraphModule) -> GraphModule:
        values = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)
        observer = PerChannelMinMaxObserver.with_args(eps=self.eps)
        weights = QuantizationSpec(torch.int8, observer, -127, 127, torch.per_channel_symmetric, 0)
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                inputs = {node.args[0]: values, node.args[1]: weights}
            elif node.target is torch.ops.aten.cat.default:
                inputs = dict.fromkeys(node.args[0], values)
            else:
                continue
            node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, values)
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def test_weight_scales_for_which_the_bias_overflows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight[2] *= 1e-7
        model[0].bias[2] = 3
    x = torch.randn(4, 16)
    report = deployed(pt2qa.quantize(pt2qa.capture(model, x), Own(eps=2**-40), [x]), x)
    assert [row.name for row in report.suspects] == ["0/linear"]
    assert report.suspects[0].isolated_max_lsb > 50
    assert stage_and_op(report) == ("deployed", "0/linear")
    assert report.suspects[0].cause == "its bias is beyond 32 bits in 1 of 8 channels"
    assert any(note.startswith("0/linear: 1 of 8 channels have a bias of") for note in report.notes)


class Cat(nn.Module):
    """A cat of values of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cat([self.first(x), 3 * x], 1))


def test_a_cat_with_unequal_scales_fails_and_the_error_names_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    pair = pt2qa.quantize(pt2qa.capture(Cat().eval(), x), Own(), [x])
    with pytest.raises(pt2qa.DeploymentError) as raised:
        deployed(pair, x)
    assert re.search(
        r"ExecuTorch could not load the program: .*: Failed to create .* node .*xnn_status_invalid_parameter\n"
        r"The check finds in this model: cat: cat has scale \S+, zero point \S+ before it and scale .* after it "
        r"\(xnnpack-refused-scales\)",
        str(raised.value),
    )
