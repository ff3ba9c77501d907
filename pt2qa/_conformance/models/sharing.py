"""Modules and weights that are used more than once, and code that nothing uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pt2qa._conformance.model import ConformanceModel
from pt2qa._conformance.models.convolutions import images
from pt2qa._conformance.models.linears import rows


class SharedReLU(nn.Module):
    """One ReLU behind two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.relu(self.second(self.relu(self.first(x))))
        return result


class SharedConv(nn.Module):
    """One convolution on two values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.conv(torch.tanh(self.conv(x)))
        return result


class TiedWeights(nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.decode(torch.tanh(self.encode(x)))
        return result


class DeadCode(nn.Module):
    """A linear whose result nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        self.unused(x)
        result: Tensor = self.used(x)
        return result


SHARING = (
    ConformanceModel("shared_relu", "one ReLU module called twice", SharedReLU, images),
    ConformanceModel("shared_conv", "one convolution called twice", SharedConv, images),
    ConformanceModel("tied_weights", "two linears with one weight", TiedWeights, rows),
    ConformanceModel("dead_code", "an op that nothing reads", DeadCode, rows),
)
