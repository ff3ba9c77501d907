"""Ops that move values without changing them, pools, and shapes that change from batch to batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from pt2qa._conformance.model import ConformanceModel
from pt2qa._conformance.models.convolutions import images


class Transposed(nn.Module):
    """Two linears with a transposition between them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 6)
        self.columns = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.columns(self.rows(x).transpose(1, 2))
        return result


class ChannelsLast(nn.Module):
    """A linear over channels, between two permutations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        x = self.conv(x).permute(0, 2, 3, 1)
        result: Tensor = self.fc(x)
        return result.permute(0, 3, 1, 2)


class Head(nn.Module):
    """A convolution, a pool, and a linear on the flat result."""

    def __init__(self, pool: nn.Module, features: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = pool
        self.fc = nn.Linear(features, 5)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(self.pool(self.conv(x)).flatten(1))
        return result


class Reshaped(nn.Module):
    """A convolution whose result is regrouped by ``reshape`` and read by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.second(self.first(x).reshape(-1, 16, 4, 4))
        return result


class Mean(nn.Module):
    """A convolution, the mean of each channel, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(F.relu(self.conv(x)).mean((2, 3)))
        return result


SHAPES = (
    ConformanceModel("transpose", "linears around a transpose", Transposed, lambda: (torch.randn(2, 5, 8),)),
    ConformanceModel("permute", "permute before and after a linear", ChannelsLast, images),
    ConformanceModel("reshape", "convolutions around a reshape", Reshaped, images),
    ConformanceModel(
        "max_pool",
        "convolution, max pool, flatten, linear",
        lambda: Head(nn.MaxPool2d(2), 64),
        images,
    ),
    ConformanceModel(
        "avg_pool",
        "convolution, adaptive average pool, flatten, linear",
        lambda: Head(nn.AdaptiveAvgPool2d(1), 4),
        images,
    ),
    ConformanceModel("mean", "convolution, ReLU, mean, linear", Mean, images),
    ConformanceModel(
        "dynamic_batch",
        "any number of samples",
        lambda: Head(nn.MaxPool2d(2), 64),
        images,
        dynamic_shapes=({0: Dim("batch", max=64)},),
    ),
)
