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


class Shifted(nn.Module):
    """Numbers of the forward, which XNNPACK's rewriting makes tensors and rounds, and a root that shows the error."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x).square() * 1e-4 + 0.03) ** 0.5


def test_a_number_that_was_made_a_tensor_keeps_its_float_value_in_a_pair_of_two_graphs() -> None:
    batch = torch.linspace(-3, 3, 32).reshape(4, 8)
    capture = pt2qa.capture(Shifted().eval(), batch)
    made = pt2qa.quantize(capture, "xnnpack", [batch], progress=False)
    pair = pt2qa.pair(capture.program, torch.export.export(made.quantized, (batch,)))
    assert not [note for note in pair.program.notes if "no float value" in note]
    literals = [each.reference.item() for each in pair.program.constants if each.reader in ("mul", "add")]
    assert literals == pytest.approx([1e-4, 0.03])
    first, second = (pt2qa.compare_layers(each, [batch], progress=False).rows for each in (pair, made))
    assert [row.isolated_sqnr for row in first] == pytest.approx([row.isolated_sqnr for row in second], nan_ok=True)
