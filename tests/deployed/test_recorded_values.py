"""Values inside that a device recorded, by the names of their ops, are compared op by op."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import pt2qa
from pt2qa.report import DeployedReport

NAMES = {
    "dequantize_per_tensor_default": "input",
    "conv2d": "0/conv2d",
    "dequantize_per_tensor_default_1": "1/relu",
    "dequantize_per_tensor_default_2": "2/flatten",
    "dequantize_per_tensor_default_3": "3/linear",
    "softmax": "4/softmax",
}
"""The op whose value a node of the converted graph has as its readers get it."""

OBSERVED = ["input", "1/relu", "2/flatten", "3/linear", "4/softmax"]
"""All but the convolution, which one kernel computes together with its ReLU."""


class Device(Interpreter):
    """Computes the converted graph, with a fault in its linear, and records values."""

    def __init__(self, pair: pt2qa.QuantizedPair, off: float) -> None:
        super().__init__(pair.quantized)
        self.off = off
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name == "linear":
            value = value + self.off
        if n.name in NAMES:
            self.values[NAMES[n.name]] = value
        return value


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def pair(batches: list[Tensor]) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Softmax(-1)).eval()
    return pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches[:1])


Compare = Callable[..., DeployedReport]


@pytest.fixture
def compared(pair: pt2qa.QuantizedPair, batches: list[Tensor], tmp_path: Path) -> Compare:
    def make(off: float = 0.0, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> DeployedReport:
        tensors: dict[str, Tensor] = {}
        for number, batch in enumerate(batches[1:]):
            device = Device(pair, off)
            output = device.run(batch)
            values = {f"batch{number}.value.{name}": value for name, value in device.values.items()}
            tensors |= {f"batch{number}.output0": output, **values}
        # A copy of each, since safetensors refuses tensors that share memory.
        copies = {name: value.clone() for name, value in change(tensors).items()}
        save_file(copies, tmp_path / "outputs.safetensors")
        return pt2qa.compare_deployed(pair, batches[1:], deployed=tmp_path / "outputs.safetensors", progress=False)

    return make


def test_right_values_are_equal(compared: Compare) -> None:
    report = compared()
    assert [row.name for row in report.rows] == OBSERVED
    assert not [row.note for row in report.rows if row.note]
    assert [row.isolated_max_lsb for row in report.rows[:-1]] == [0, 0, 0, 0]
    assert report.rows[-1].isolated_sqnr > 120
    assert "The kernels are right" in report.summary()
    assert report.facts[1] == "outputs.safetensors: has values of no op that is observed: 0/conv2d"


def test_the_op_with_a_fault_is_named(pair: pt2qa.QuantizedPair, compared: Compare) -> None:
    (scale,) = (node.args[1] for node in pair.quantized.graph.nodes if node.name == "quantize_per_tensor_default_3")
    report = compared(off=3 * scale)
    (suspect,) = report.suspects
    assert (suspect.name, suspect.isolated_max_lsb) == ("3/linear", 3)
    assert report.rows[-1].isolated_sqnr > 120


def test_values_that_were_not_recorded_are_told(compared: Compare) -> None:
    report = compared(change=lambda found: {name: value for name, value in found.items() if "relu" not in name})
    assert {row.name: row.note for row in report.rows if row.note} == {
        "1/relu": "not recorded",
        "2/flatten": "measured together with 1/relu, not observed",
    }
    assert math.isnan(report.rows[1].isolated_max_lsb)
    assert not report.suspects


def test_floats_of_half_precision_are_rounded_to_the_integers_that_they_stand_for(compared: Compare) -> None:
    report = compared(change=lambda found: {k: v.half() if "linear" in k else v for k, v in found.items()})
    assert [row.isolated_max_lsb for row in report.rows if row.name == "3/linear"] == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found | {"batch0.value.3/linear": found["batch0.value.3/linear"].to(torch.uint8)},
            r"batch0\.value\.3/linear is torch\.uint8, expected the floats that its integers stand for",
        ),
        (
            lambda found: {name: value for name, value in found.items() if name != "batch1.value.1/relu"},
            r"has no tensor 'batch1\.value\.1/relu', but has others",
        ),
        (
            lambda found: found | {"batch0.values.x": found["batch0.output0"]},
            r"has a tensor 'batch0\.values\.x'; expected .* and values inside: batch0\.value\.OP",
        ),
        (lambda found: found | {"batch2.value.x": found["batch0.output0"]}, r"has no tensor 'batch2\.output0'"),
    ],
    ids=["integers", "one-batch", "unknown", "no-output"],
)
def test_what_does_not_fit_is_refused(
    compared: Compare, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(pt2qa.DeploymentError, match=message):
        compared(change=change)


def test_another_shape_is_a_note_of_its_row(compared: Compare) -> None:
    report = compared(change=lambda found: {k: v.T.contiguous() if "linear" in k else v for k, v in found.items()})
    (row,) = (row for row in report.rows if row.name == "3/linear")
    assert row.note == ("the deployed value is float32 of shape (5, 2), the converted graph's float32 of shape (2, 5)")
