"""The ops of the sweep: each is a branch of one model, with inputs of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE, ROWS = (4, 8, 32, 32), (500, 32)


@dataclass(frozen=True)
class Op:
    """One branch: what it computes, and the shapes of its inputs."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def _unary(function: Callable[[Tensor], Tensor]) -> Op:
    return Op(function)


OPS: Final[Mapping[str, Op]] = {
    "conv2d": Op(_seeded(lambda: nn.Conv2d(8, 16, 3, padding=1))),
    "conv2d, no bias": Op(_seeded(lambda: nn.Conv2d(8, 16, 1, bias=False))),
    "conv2d, strided": Op(_seeded(lambda: nn.Conv2d(8, 8, 3, stride=2))),
    "conv2d, dilated": Op(_seeded(lambda: nn.Conv2d(8, 8, 3, dilation=2))),
    "conv2d, depthwise": Op(_seeded(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8))),
    "conv2d, grouped": Op(_seeded(lambda: nn.Conv2d(8, 8, 3, groups=2))),
    "conv2d + relu": Op(_seeded(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()))),
    "conv2d + hardtanh": Op(_seeded(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.Hardtanh(-1, 1)))),
    "conv1d": Op(_seeded(lambda: nn.Conv1d(8, 16, 3)), ((16, 8, 200),)),
    "conv_transpose2d": Op(_seeded(lambda: nn.ConvTranspose2d(8, 8, 3, stride=2))),
    "linear": Op(_seeded(lambda: nn.Linear(32, 16)), (ROWS,)),
    "linear, no bias": Op(_seeded(lambda: nn.Linear(32, 16, bias=False)), (ROWS,)),
    "linear + relu": Op(_seeded(lambda: nn.Sequential(nn.Linear(32, 16), nn.ReLU())), (ROWS,)),
    "add": Op(torch.add, (IMAGE, IMAGE)),
    "add + relu": Op(lambda a, b: F.relu(a + b), (IMAGE, IMAGE)),
    "sub": Op(torch.sub, (IMAGE, IMAGE)),
    "mul": Op(torch.mul, (IMAGE, IMAGE)),
    "matmul": Op(torch.matmul, ((8, 60, 32), (8, 32, 50))),
    "relu": _unary(F.relu),
    "hardtanh": _unary(lambda x: F.hardtanh(x, -0.5, 0.5)),
    "clamp": _unary(lambda x: x.clamp(-0.3, 0.7)),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "hardswish": _unary(F.hardswish),
    "leaky_relu": _unary(lambda x: F.leaky_relu(x, 0.1)),
    "elu": _unary(F.elu),
    "gelu": _unary(F.gelu),
    "exp": _unary(lambda x: torch.exp(x / 50)),
    "softmax": Op(lambda x: torch.softmax(x, -1), (ROWS,)),
    "mean": _unary(lambda x: x.mean((2, 3), keepdim=True)),
    "avg_pool2d": _unary(lambda x: F.avg_pool2d(x, 2)),
    "max_pool2d": _unary(lambda x: F.max_pool2d(x, 2, 2, 0)),
    "adaptive_avg_pool2d": _unary(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "upsample_bilinear": _unary(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)),
    "permute": _unary(lambda x: x.permute(0, 2, 3, 1)),
    "view": _unary(lambda x: x.reshape(x.shape[0], -1)),
    "cat": Op(lambda a, b: torch.cat([a, b], 1), (IMAGE, IMAGE)),
    "pad": _unary(lambda x: F.pad(x, (1, 1, 1, 1))),
    "slice": _unary(lambda x: x[:, 1:5]),
    "layer_norm": Op(_seeded(lambda: nn.LayerNorm(32)), (ROWS,)),
}


class Branches(nn.Module):
    """Some ops side by side; ``forward`` takes the inputs of all, and returns one output for each."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        modules = {name: OPS[name].function for name in names if isinstance(OPS[name].function, nn.Module)}
        self.branches = nn.ModuleDict({_key(name): module for name, module in modules.items()})

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        found, start = [], 0
        for name in self.names:
            op = OPS[name]
            own = inputs[start : start + len(op.shapes)]
            start += len(op.shapes)
            found.append(self._function(name)(*own))
        return found

    def _function(self, name: str) -> Callable[..., Tensor]:
        key = _key(name)
        return self.branches[key] if key in self.branches else OPS[name].function

    def inputs(self, scale: float, offset: float, seed: int) -> tuple[Tensor, ...]:
        """Normal random inputs of standard deviation ``scale`` around ``offset`` times it."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [shape for name in self.names for shape in OPS[name].shapes]
        return tuple((torch.randn(shape, generator=generator) + offset) * scale for shape in shapes)


def _key(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
