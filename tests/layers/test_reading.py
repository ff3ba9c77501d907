"""What a layer report says of the inputs of its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from tests.flows import quantized_pair


class Parts(nn.Module):
    """Two parts of one convolution, which are used apart and then together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one, two = torch.split(y, 4, 1)
        return self.last(torch.cat([torch.relu(one) + two, y[:, :4]], 1))


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized_pair(Parts().eval(), torch.randn(2, 3, 8, 8), "x86")


def test_inputs_are_the_nearest_rows_whose_values_an_op_reads(pair: pt2qa.QuantizedPair) -> None:
    rows = pt2qa.compare_layers(pair, [torch.randn(2, 3, 8, 8)], progress=False).rows
    assert {row.name: row.inputs for row in rows} == {
        "x": "",
        "first/conv2d": "x",
        "split[0]": "first/conv2d",
        "split[1]": "first/conv2d",
        "relu": "split[0]",
        "add": "relu, split[1]",
        "slice": "first/conv2d",
        "cat": "add, slice",
        "last/conv2d": "cat",
    }


def test_ops_that_are_not_compared_are_skipped(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.compare_layers(pair, [torch.randn(2, 3, 8, 8)], ops=["conv2d"], progress=False)
    assert [(row.name, row.inputs) for row in report.rows] == [("first/conv2d", ""), ("last/conv2d", "first/conv2d")]
    assert report.outputs[0].inputs == ""
