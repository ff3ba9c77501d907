"""A tensor that forward makes (``torch.tensor([...])``) is a constant, whose ``detach_`` writes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pt2qa


class Literal(nn.Module):
    """A linear and a tensor that the forward itself makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x) + torch.tensor([0.5, -0.5, 1.0, -1.0])
        return result


@pytest.fixture
def pair() -> pt2qa.QuantizedPair:
    """XNNPACK quantizes the literal as an input of the addition."""
    batch = torch.randn(4, 8)
    return pt2qa.quantize(pt2qa.capture(Literal().eval(), batch), "xnnpack", [batch], progress=False)


def test_the_reference_reads_the_float_literal(pair: pt2qa.QuantizedPair) -> None:
    pair.verify(torch.randn(4, 8))
    assert pair.program.notes == ()
    literal = next(each for each in pair.program.constants if each.reader == "add")
    assert literal.reference.tolist() == [0.5, -0.5, 1.0, -1.0]
    assert literal.quantized.tolist() != literal.reference.tolist()


def test_its_detach_is_no_write(pair: pt2qa.QuantizedPair) -> None:
    assert not [each.attribute for each in pair.program.constants if each.mutated]
    assert not [step.name for step in pair.program.steps if step.mutates]
