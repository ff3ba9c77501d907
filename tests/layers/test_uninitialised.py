"""Memory that an op gives before another one writes to it holds anything, so it is not compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import pt2qa


class Filled(nn.Module):
    """A linear whose result is scattered into new memory, as routed tokens of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.empty_like(y).scatter(0, order, y)


def test_new_memory_has_no_number() -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 4), torch.tensor([[2], [0], [1]]).expand(3, 4).contiguous()
    pair = pt2qa.quantize(pt2qa.capture(Filled().eval(), batch), "xnnpack", [batch], progress=False)
    report = pt2qa.compare_layers(pair, [batch], progress=False)
    (row,) = (each for each in report.rows if each.op == "empty_like")
    assert math.isnan(row.sqnr)
    assert row.note == "memory that is not written yet"
    assert report.set_apart == ()
    assert report.sqnr > 30
