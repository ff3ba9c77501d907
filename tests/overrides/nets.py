"""Small models whose annotations share scales in one way or another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import SameInputTwice, SharedConv, TwoUsers, images, randomize_batch_norms, residual


class InvertedResidual(nn.Module):
    """MobileNet's block: expand and depthwise with ReLU6, project without; its input is added again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.project(self.depthwise(self.expand(x)))
        return result


class Mobile(nn.Module):
    """A stem with ReLU6, two blocks, mean, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(inplace=True))
        self.blocks = nn.Sequential(InvertedResidual(4), InvertedResidual(4))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3)))
        return result


class Pooled(nn.Module):
    """Pools that pass a scale on, one after the other, and a ``cat`` of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 1)
        self.right = nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = F.max_pool2d(F.max_pool2d(self.left(x), 2), 2)
        right = F.max_pool2d(F.relu(self.right(x)), 4)
        joined = torch.cat([left, right], 1)
        pooled = F.adaptive_avg_pool2d(self.last(joined), 1)
        return pooled.flatten(1)


class CalledTwice(nn.Module):
    """One linear on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.tanh(self.fc(x)))
        return result


class ConvTwice(nn.Module):
    """One convolution on two values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(torch.tanh(self.conv(x)))
        return result


class Chunks(nn.Module):
    """A linear for each half of another's output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.left, self.right = nn.Linear(8, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.fc(x).chunk(2, 1)
        result: Tensor = self.left(left) + self.right(right)
        return result


def _linear_input() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


NETS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "residual": lambda: (residual(), (images(),)),
    "mobile": lambda: (_seeded(Mobile), (images(),)),
    "pooled": lambda: (_seeded(Pooled), (images(),)),
    "two_users": lambda: (_seeded(TwoUsers), (images(),)),
    "same_input_twice": lambda: (_seeded(SameInputTwice), (images(),)),
    "linear_twice": lambda: (_seeded(CalledTwice), (_linear_input(),)),
    "chunks": lambda: (_seeded(Chunks), (_linear_input(),)),
    "conv_twice": lambda: (_seeded(ConvTwice), (images(),)),
    "shared_norm": lambda: (_seeded(lambda: SharedConv(same_norm=True)), (images(), images(seed=1))),
}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return randomize_batch_norms(make()).eval()
