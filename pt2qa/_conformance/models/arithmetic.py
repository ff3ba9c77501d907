"""Sums, products and concatenations of values."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pt2qa._conformance.model import ConformanceModel
from pt2qa._conformance.models.convolutions import images


class Residual(nn.Module):
    """A value, and what a convolution makes of it, put together."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        x = self.stem(x)
        return self.join(self.branch(x), x)


class Same(nn.Module):
    """One value in both places of an op."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        x = self.conv(x)
        return self.join(x, x)


class TwoUsers(nn.Module):
    """A value that a ReLU and an addition read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        x = self.conv(x)
        result: Tensor = self.relu(x) + x
        return result


def _joined(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right], 1)


def _added_to(left: Tensor, right: Tensor) -> Tensor:
    left += right
    return left


ARITHMETIC = (
    ConformanceModel(
        "residual_add",
        "a residual connection",
        lambda: Residual(operator.add),
        images,
        {
            "torch.add": lambda: Residual(torch.add),
            "+=": lambda: Residual(_added_to),
            "add_": lambda: Residual(lambda left, right: left.add_(right)),
        },
    ),
    ConformanceModel(
        "residual_add_relu",
        "a residual connection with a ReLU behind it",
        lambda: Residual(lambda left, right: torch.relu(left + right)),
        images,
        {"+= and relu_": lambda: Residual(lambda left, right: _added_to(left, right).relu_())},
    ),
    ConformanceModel("cat", "two values joined", lambda: Residual(_joined), images),
    ConformanceModel(
        "mul",
        "two values multiplied",
        lambda: Residual(operator.mul),
        images,
        {"mul_": lambda: Residual(lambda left, right: left.mul_(right))},
    ),
    ConformanceModel("add_self", "x + x: two uses, one edge", lambda: Same(operator.add), images),
    ConformanceModel("cat_self", "cat([x, x]): two uses, one edge", lambda: Same(_joined), images),
    ConformanceModel("two_users", "a value before and after its ReLU", TwoUsers, images),
    ConformanceModel("scalars", "a value times and plus a number", lambda: Same(lambda x, _: 0.5 * x + 1.0), images),
)
