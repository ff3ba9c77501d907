"""Convolutions with what stands behind them, in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2qa._conformance.model import ConformanceModel, Inputs

Activation = Callable[[Tensor], Tensor]


class ConvActivation(nn.Module):
    """Convolution, batch norm if wanted, and something behind it."""

    def __init__(self, activation: Activation, *, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        return self.activation(self.bn(self.conv(x)))


class Conv(nn.Conv2d):
    """A convolution of the user's own class."""


class Subclassed(ConvActivation):
    """As :class:`ConvActivation`, its convolution and batch norm of other classes."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(), norm=True)
        self.conv.__class__ = Conv


class Functional(ConvActivation):
    """As :class:`ConvActivation`, by functions."""

    def __init__(self, activation: Activation, *, norm: bool) -> None:
        super().__init__(activation, norm=norm)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        x = F.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        if isinstance(self.bn, nn.BatchNorm2d):
            x = F.batch_norm(x, self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias)
        return self.activation(x)


class OneByOne(nn.Module):
    """A 1×1 convolution, another one, and a ReLU."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.second = make()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.relu(self.second(self.first(x)))
        return result


def images() -> Inputs:
    """Two pictures."""
    return (torch.randn(2, 3, 8, 8),)


def signals() -> Inputs:
    """Two signals of three channels."""
    return (torch.randn(2, 3, 16),)


def _behind(activation: Activation, *, norm: bool = False) -> Callable[[], nn.Module]:
    return partial(ConvActivation, activation, norm=norm)


def _relu6(x: Tensor) -> Tensor:
    return torch.clamp(x, 0.0, 6.0)


CONVOLUTIONS = (
    ConformanceModel(
        "conv_bn_relu",
        "convolution, batch norm, ReLU",
        _behind(nn.ReLU(), norm=True),
        images,
        {
            "functional": lambda: Functional(F.relu, norm=True),
            "nn.ReLU(inplace=True)": _behind(nn.ReLU(inplace=True), norm=True),
            "F.relu(inplace=True)": _behind(partial(F.relu, inplace=True), norm=True),
            "relu_": _behind(lambda x: x.relu_(), norm=True),
            "torch.relu": _behind(torch.relu, norm=True),
            "subclass": Subclassed,
        },
    ),
    ConformanceModel(
        "conv_relu",
        "convolution, ReLU",
        _behind(nn.ReLU()),
        images,
        {
            "functional": lambda: Functional(F.relu, norm=False),
            "nn.ReLU(inplace=True)": _behind(nn.ReLU(inplace=True)),
        },
    ),
    ConformanceModel(
        "conv_relu6",
        "convolution, ReLU6",
        _behind(nn.ReLU6()),
        images,
        {
            "F.relu6": _behind(F.relu6),
            "nn.ReLU6(inplace=True)": _behind(nn.ReLU6(inplace=True)),
            "nn.Hardtanh": _behind(nn.Hardtanh(0.0, 6.0)),
            "torch.clamp": _behind(_relu6),
        },
    ),
    ConformanceModel(
        "conv_bn",
        "convolution, batch norm",
        _behind(nn.Identity(), norm=True),
        images,
        {"functional": lambda: Functional(nn.Identity(), norm=True)},
    ),
    ConformanceModel(
        "conv1d", "convolution over time, ReLU", lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU()), signals
    ),
    ConformanceModel(
        "depthwise",
        "one filter a channel",
        lambda: OneByOne(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8)),
        images,
    ),
    ConformanceModel("grouped", "groups of channels", lambda: OneByOne(lambda: nn.Conv2d(8, 4, 3, groups=2)), images),
    ConformanceModel(
        "dilated", "dilation and stride", lambda: OneByOne(lambda: nn.Conv2d(8, 4, 3, dilation=2, stride=2)), images
    ),
    ConformanceModel(
        "conv_transpose",
        "transposed convolution: its channel axis is the second",
        lambda: OneByOne(lambda: nn.ConvTranspose2d(8, 4, 2, stride=2)),
        images,
    ),
)
