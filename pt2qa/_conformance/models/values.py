"""Values that are not activations: integers, booleans, constants, parameters outside of convolutions and linears."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pt2qa._conformance.model import ConformanceModel, Inputs
from pt2qa._conformance.models.linears import rows


class Embedded(nn.Module):
    """Words looked up in a table, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(self.table(words))
        return result


class Indexed(nn.Module):
    """Positions that are computed, then looked up: integers added, multiplied and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """What it computes."""
        wanted = torch.cat([positions + positions, positions * 2 + 1], 0)
        result: Tensor = self.fc(x[wanted])
        return result


class Masked(nn.Module):
    """A linear, and zeros where a mask says so."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        return torch.where(x > 0, self.fc(x), torch.zeros_like(x))


class Buffered(nn.Module):
    """A linear, then a buffer multiplied and another one added."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.register_buffer("scale", torch.rand(6) + 0.5)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(x) * self.scale + self.shift
        return result


class Literal(nn.Module):
    """A linear and a tensor that the forward itself makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(x) + torch.tensor([0.5, -0.5, 1.0, -1.0])
        return result


class Gain(nn.Module):
    """A linear and a parameter that is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(x) * self.gain
        return result


def words() -> Inputs:
    """Two sentences of five words."""
    return (torch.randint(0, 10, (2, 5)),)


def rows_and_positions() -> Inputs:
    """Eight rows, and three positions."""
    return torch.randn(8, 8), torch.randint(0, 3, (3,))


VALUES = (
    ConformanceModel("embedding", "words looked up", Embedded, words),
    ConformanceModel("integers", "arithmetic of integers", Indexed, rows_and_positions),
    ConformanceModel("mask", "a boolean mask", Masked, rows),
    ConformanceModel("buffer", "buffers multiplied and added", Buffered, rows),
    ConformanceModel("literal", "a constant that forward makes", Literal, rows),
    ConformanceModel("parameter", "a parameter multiplied", Gain, rows),
)
