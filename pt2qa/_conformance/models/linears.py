"""Linears, and activations whose range is known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2qa._conformance.model import ConformanceModel, Inputs


class Linear(nn.Linear):
    """A linear of the user's own class."""


class Functional(nn.Linear):
    """A linear called as a function."""

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        return F.linear(x, self.weight, self.bias)


class Then(nn.Module):
    """A linear and something behind it."""

    def __init__(self, activation: Callable[[Tensor], Tensor], make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.fc = make(8, 6)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        return self.activation(self.fc(x))


def rows() -> Inputs:
    """Four rows of eight numbers."""
    return (torch.randn(4, 8),)


LINEARS = (
    ConformanceModel(
        "linear",
        "two linears",
        lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)),
        rows,
        {
            "functional": lambda: nn.Sequential(Functional(8, 6), Functional(6, 4)),
            "subclass": lambda: nn.Sequential(Linear(8, 6), Linear(6, 4)),
        },
    ),
    ConformanceModel(
        "linear_relu",
        "linear, ReLU",
        lambda: Then(nn.ReLU(), nn.Linear),
        rows,
        {
            "functional": lambda: Then(F.relu, Functional),
            "nn.ReLU(inplace=True)": lambda: Then(nn.ReLU(inplace=True), nn.Linear),
            "relu_": lambda: Then(lambda x: x.relu_(), nn.Linear),
        },
    ),
    ConformanceModel(
        "linear_3d",
        "a linear on a batch of sequences, without bias",
        lambda: nn.Linear(8, 6, bias=False),
        lambda: (torch.randn(2, 5, 8),),
    ),
    ConformanceModel(
        "sigmoid",
        "linear, sigmoid: the range is 0..1 whatever the data",
        lambda: Then(nn.Sigmoid(), nn.Linear),
        rows,
        {"torch.sigmoid": lambda: Then(torch.sigmoid, nn.Linear)},
    ),
    ConformanceModel("layer_norm", "linear, layer norm", lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), rows),
)
