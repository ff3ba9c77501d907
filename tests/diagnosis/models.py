"""Small nets that int8 holds well, so that whatever is planted in one of them is all that is wrong with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import models as zoo

BATCH, CALIBRATION, EVALUATION = 8, 16, 12
"""Samples of a batch, batches that calibrate, batches that the model receives in use: three sets of 32 samples."""

REAL_BATCH = 5
"""Samples of a batch of real data."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two products, the second of which reads the first's output channel by channel, and nothing else does.

    Attributes:
        product, reader: paths of their modules.
        norm: path of the batch norm after the product, if there is one.
        scales: whether a factor on a channel of the first can be taken out in the second.
        between: names of the ops between the two.
    """

    product: str
    reader: str
    norm: str = ""
    scales: bool = True
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Net:
    """A kind of model, with data.

    Attributes:
        name: what tables call it.
        build: the float model, in eval mode.
        shape: of one sample.
        links: pairs of products at which something can be planted.
        decompose: ops that are captured decomposed.
        fuse: on XNNPACK, pairs of ops to be fused in the healthy model: by op name.
        samples: real data, the first half of which calibrates; None: random samples.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    links: tuple[Link, ...]
    decompose: tuple[str, ...] = ()
    fuse: tuple[tuple[str, str], ...] = ()
    samples: Callable[[], Tensor] | None = None

    def calibration(self) -> list[Tensor]:
        """Batches that calibrate."""
        if self.samples is not None:
            return list(self.samples().chunk(2)[0].split(REAL_BATCH))
        return list(contrasts(self.shape, 1, CALIBRATION, 0.5).split(BATCH))

    def evaluation(self) -> list[Tensor]:
        """Other samples, of no more contrast than calibration has seen."""
        if self.samples is not None:
            return list(self.samples().chunk(2)[1].split(REAL_BATCH))
        return list(contrasts(self.shape, 2, EVALUATION, 0.3).split(BATCH))


def contrasts(shape: tuple[int, ...], seed: int, batches: int, spread: float) -> Tensor:
    """Normal samples, each with a contrast of its own, up to ``spread`` more or less than 1."""
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(BATCH * batches, *shape, generator=generator)
    factors = torch.linspace(1 - spread, 1 + spread, len(samples))[torch.randperm(len(samples), generator=generator)]
    return samples * factors.view(-1, *[1] * len(shape))


def settled(model: nn.Module, samples: Tensor) -> nn.Module:
    """In eval mode, with the batch norm statistics of these samples and affine parameters as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.7, 1.3, generator=generator)
                norm.bias.uniform_(-0.2, 0.4, generator=generator)
                norm.momentum = None  # averages over what it sees
        model.train()(samples)
    return model.eval()


def block(
    before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type | None = nn.ReLU
) -> nn.Sequential:
    """A convolution, its batch norm, its activation."""
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), *([] if act is None else [act()]))


class Plain(nn.Module):
    """Convolutions with batch norms and ReLUs, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(3, 16), block(16, 24, stride=2)
        self.c, self.d = block(24, 24), block(24, 32, stride=2)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.avg_pool2d(self.d(self.c(self.b(self.a(x)))), 2).flatten(1))


class BasicBlock(nn.Module):
    """Two convolutions and the input added to them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = block(channels, channels), block(channels, channels, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b(self.a(x)) + x)


class Residual(nn.Module):
    """A ResNet of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 16, stride=2)
        self.blocks = nn.Sequential(*(BasicBlock(16) for _ in range(3)))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.avg_pool2d(self.blocks(self.stem(x)), 4).flatten(1))


class Inverted(nn.Module):
    """Expand, convolve each channel, project: a block of MobileNetV2."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        wide = 3 * before
        self.expand = block(before, wide, 1, act=nn.ReLU6)
        self.depthwise = block(wide, wide, groups=wide, act=nn.ReLU6)
        self.project = block(wide, after, 1, act=None)
        self.adds = before == after

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.adds else y


class Depthwise(nn.Module):
    """A MobileNetV2 of four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 12, act=nn.ReLU6)
        self.blocks = nn.Sequential(Inverted(12, 16), Inverted(16, 20), Inverted(20, 20))
        self.last = block(20, 32, 1, act=nn.ReLU6)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.avg_pool2d(self.last(self.blocks(self.stem(x))), 8).flatten(1))


class Branches(nn.Module):
    """Branches that are concatenated, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 16)
        self.point, self.reduce, self.wide = block(16, 12, 1), block(16, 8, 1), block(8, 12)
        self.mix = block(24, 16, 1)
        self.left, self.right = block(16, 8), block(16, 8, 1)
        self.last = block(16, 24)
        self.fc = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.mix(torch.cat([self.point(x), self.wide(self.reduce(x))], 1))
        x = self.last(torch.cat([self.left(x), self.right(x)], 1))
        return self.fc(F.avg_pool2d(F.max_pool2d(x, 2), 4).flatten(1))


class Attention(nn.Module):
    """Scaled dot-product attention with an additive mask, written out."""

    mask: Tensor

    def __init__(self, width: int, tokens: int, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.heads = heads
        self.register_buffer("mask", torch.zeros(tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = (scores + self.mask).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """A transformer layer that normalises first."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, tokens)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two layers over twelve tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.Sequential(Layer(32, 12), Layer(32, 12))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(x))))


class Recurrent(nn.Module):
    """An LSTM over six frames, and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 24)
        self.rnn = nn.LSTM(24, 24, batch_first=True)
        self.hidden, self.head = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(F.relu(self.embed(x)))
        return self.head(F.relu(self.hidden(y)))


class Gated(nn.Module):
    """A GRU over five frames, read at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(12, 24, batch_first=True)
        self.hidden, self.head = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(F.relu(self.hidden(y[:, -1])))


class Linears(nn.Module):
    """Linears and ReLUs on each of ten rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 64)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


class Searched(nn.Module):
    """Depthwise-separable blocks with hard swishes, squeeze and excitation, and a skip: a small MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stem = block(3, 12), block(12, 16, act=nn.Hardswish)
        self.expand, self.depthwise = block(16, 32, 1, act=nn.ReLU), block(32, 32, groups=32, act=nn.ReLU)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project = block(32, 16, 1, act=None)
        self.last = block(16, 24, stride=2, act=nn.Hardswish)
        self.fc = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.first(x))
        y = self.depthwise(self.expand(x))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return self.fc(F.avg_pool2d(self.last(x + self.project(y)), 4).flatten(1))


class UNet(nn.Module):
    """Down and up again, with a skip that is concatenated; the output is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.deep = block(3, 12), block(12, 16), block(16, 16)
        self.up, self.out = block(28, 12), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = F.interpolate(self.deep(self.down(F.max_pool2d(x, 2))), scale_factor=2.0)
        return self.out(self.up(torch.cat([x, y], 1)))


class Mixing(nn.Module):
    """Linears over the tokens, then over the channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across, self.back = nn.Linear(tokens, 2 * tokens), nn.Linear(2 * tokens, tokens)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back(F.gelu(self.across(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mixer(nn.Module):
    """An MLP-Mixer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 24)
        self.layers = nn.Sequential(Mixing(12, 24), Mixing(12, 24))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(x))).mean(1))


class Heads(nn.Module):
    """One block that runs twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(3, 16, stride=2), block(16, 16)
        self.again = nn.Conv2d(16, 16, 3, padding=1)
        self.labels, self.box = nn.Linear(64, 10), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.b(self.a(x))
        x = F.relu(self.again(x)) + F.relu(self.again(F.max_pool2d(x, 3, 1, 1)))
        x = F.avg_pool2d(x, 4).flatten(1)
        return self.labels(x), self.box(x)


def _built(kind: type[nn.Module], shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = kind()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):  # torch's own start is too small for the signal to get through
                    module.weight.normal_(0, 1.2 / module.in_features**0.5)
        return settled(model, contrasts(shape, 1, CALIBRATION, 0.5))

    return build


def _relu(product: str, reader: str, op: str) -> Link:
    return Link(f"{product}.0", f"{reader}.0", f"{product}.1", True, (op,))


IMAGE = (3, 16, 16)
_MIXED = [
    tuple(f"layers.{i}.attention/{op}" for op in ("view_2", "transpose_2", "matmul_1", "transpose_4", "reshape"))
    for i in range(2)
]
_RELU6 = tuple(
    (f"{path}.0/conv2d", f"{path}.2/hardtanh")
    for path in ("stem", *(f"blocks.{i}.{part}" for i in range(3) for part in ("expand", "depthwise")), "last")
)

NETS: dict[str, Net] = {
    net.name: net
    for net in (
        Net(
            "plain",
            _built(Plain, IMAGE),
            IMAGE,
            (_relu("b", "c", "b.2/relu"), _relu("c", "d", "c.2/relu"), _relu("a", "b", "a.2/relu")),
        ),
        Net(
            "residual",
            _built(Residual, IMAGE),
            IMAGE,
            tuple(_relu(f"blocks.{i}.a", f"blocks.{i}.b", f"blocks.{i}.a.2/relu") for i in (1, 0, 2)),
        ),
        Net(
            "depthwise",
            _built(Depthwise, IMAGE),
            IMAGE,
            (Link("blocks.0.project.0", "blocks.1.expand.0", "blocks.0.project.1"),),
            fuse=_RELU6,
        ),
        Net(
            "cat",
            _built(Branches, IMAGE),
            IMAGE,
            (_relu("reduce", "wide", "reduce.2/relu"),),
        ),
        Net(
            "transformer",
            _built(Transformer, (12, 16)),
            (12, 16),
            (
                Link("layers.0.attention.v", "layers.0.attention.out", between=_MIXED[0]),
                Link("layers.1.attention.v", "layers.1.attention.out", between=_MIXED[1]),
                Link("layers.0.up", "layers.0.down", scales=False, between=("layers.0/gelu",)),
            ),
        ),
        Net(
            "lstm",
            _built(Recurrent, (6, 12)),
            (6, 12),
            (Link("hidden", "head", between=("relu_1",)),),
            decompose=("lstm",),
        ),
        Net("gru", _built(Gated, (5, 12)), (5, 12), (Link("hidden", "head", between=("relu",)),), decompose=("gru",)),
        Net(
            "linears",
            _built(Linears, (10, 16)),
            (10, 16),
            (Link("b", "c", between=("relu_1",)), Link("a", "b", between=("relu",))),
        ),
        Net(
            "searched",
            _built(Searched, IMAGE),
            IMAGE,
            (_relu("first", "stem", "first.2/relu"),),
        ),
        Net("unet", _built(UNet, IMAGE), IMAGE, (_relu("down", "deep", "down.2/relu"),)),
        Net(
            "mixer",
            _built(Mixer, (12, 16)),
            (12, 16),
            tuple(Link(f"layers.{i}.up", f"layers.{i}.down", "", False, (f"layers.{i}/gelu_1",)) for i in range(2)),
        ),
        Net("heads", _built(Heads, IMAGE), IMAGE, (_relu("a", "b", "a.2/relu"),)),
    )
}


_FUSED_IN_MOBILENET = (
    ("features.0.0/conv2d", "features.0.2/hardtanh"),
    ("features.1.conv.0.0/conv2d", "features.1.conv.0.2/hardtanh"),
    *(
        (f"features.{i}.conv.{part}.0/conv2d", f"features.{i}.conv.{part}.2/hardtanh")
        for i in range(2, 18)
        for part in (0, 1)
    ),
    ("features.18.0/conv2d", "features.18.2/hardtanh"),
)

PRETRAINED: dict[str, Net] = {
    net.name: net
    for net in (
        Net(
            "digits",
            zoo.digit_net,
            (1, 28, 28),
            (
                Link("conv_layers.3", "conv_layers.6", between=("conv_layers.4/relu", "conv_layers.5/max_pool2d")),
                Link("fc_layers.0", "fc_layers.2", between=("fc_layers.1/relu",)),
            ),
            samples=lambda: zoo.digits()[0][:160],
        ),
        Net(
            "mobilenet_v2",
            zoo.mobilenet_v2,
            (3, 224, 224),
            (Link("features.1.conv.1", "features.2.conv.0.0", "features.1.conv.2"),),
            fuse=_FUSED_IN_MOBILENET,
            samples=zoo.pictures,
        ),
    )
}
"""Models with pretrained weights and real data, which ``make zoo`` installs; int8 does not hold MobileNetV2 well."""


def net_of(name: str) -> Net:
    """The net of a name, pretrained or not."""
    return NETS[name] if name in NETS else PRETRAINED[name]


@functools.cache
def model_of(name: str) -> nn.Module:
    """The float model of a net; copy it before you edit it."""
    return net_of(name).build().requires_grad_(False)
