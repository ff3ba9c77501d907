"""Random nets and their data: a seed gives an architecture, briefly trained weights, and samples to go with them."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2qa._graph.internals.torch import pytree
from tests.zoo import models as zoo

BATCH, CLASSES, TOKENS, FEATURES, WORDS = 8, 6, 10, 12, 40
MEAN, DEVIATION = 0.45, 0.225
"""How pictures are normalised."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two products, the second of which alone reads the first's channels.

    Attributes:
        product, reader: paths of their modules.
        norm: path of the batch norm after the product.
        first: the reader's column of the first channel.
        scales: whether a positive factor on a channel can be taken out in the reader; else a constant can.
    """

    product: str
    reader: str
    norm: str = ""
    first: int = 0
    scales: bool = True


class Unit(nn.Sequential):
    """A convolution, its batch norm, its activation."""

    def __init__(
        self, before: int, after: int, kernel: int, act: type[nn.Module], stride: int = 1, groups: int = 1
    ) -> None:
        conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(OrderedDict(conv=conv, norm=nn.BatchNorm2d(after), act=act()))


class Block(nn.Module):
    """Two units, the first of which may be followed by a depthwise one, and perhaps a skip."""

    def __init__(self, width: int, act: type[nn.Module], separable: bool, skips: bool) -> None:
        super().__init__()
        wide = 2 * width if separable else width
        self.a = Unit(width, wide, 1 if separable else 3, act)
        self.deep = Unit(wide, wide, 3, act, groups=wide) if separable else nn.Identity()
        self.b = Unit(wide, width, 1 if separable else 3, nn.Identity)
        self.act, self.skips = act(), skips

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.deep(self.a(x)))
        return self.act(x + y if self.skips else y)


class Cnn(nn.Module):
    """Blocks of one width on an image."""

    def __init__(self, r: random.Random, act: type[nn.Module]) -> None:
        super().__init__()
        width, separable, skips = r.choice((12, 16, 24)), r.random() < 0.4, r.random() < 0.6
        self.stem = Unit(3, width, 3, act, stride=r.choice((1, 2)))
        self.blocks = nn.Sequential(*(Block(width, act, separable, skips) for _ in range(r.choice((1, 2, 3)))))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, CLASSES)
        names = [] if act in CURVED or separable else [f"blocks.{i}" for i in range(len(self.blocks))]
        self.links = [Link(f"{name}.a.conv", f"{name}.b.conv", f"{name}.a.norm") for name in names]
        self.streams = act is nn.ReLU and skips

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


class Detector(nn.Module):
    """Two scales that are concatenated; scores and boxes, which are concatenated and taken apart again."""

    late: float

    def __init__(self, r: random.Random, act: type[nn.Module]) -> None:
        super().__init__()
        width = r.choice((12, 16))
        self.stem, self.down = Unit(3, width, 3, act, stride=2), Unit(width, 2 * width, 3, act, stride=2)
        self.side, self.top = Unit(width, width, 1, act), Unit(2 * width, width, 1, act)
        self.mix = Unit(2 * width, width, 3, act)
        self.scores, self.boxes = nn.Conv2d(width, CLASSES, 1), nn.Conv2d(width, 4, 1)
        self.late = 1.0
        self.links = [] if act in CURVED else [Link("side.conv", "mix.conv", "side.norm")]
        self.links += [] if act in CURVED else [Link("top.conv", "mix.conv", "top.norm", width)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        y = F.interpolate(self.top(self.down(x)), scale_factor=2.0)
        x = self.mix(torch.cat([self.side(x), y], 1))
        x = F.max_pool2d(torch.cat([self.scores(x), self.boxes(x)], 1), 2)
        scores, boxes = x.split((CLASSES, 4), 1)
        return scores, boxes if self.late == 1 else boxes * self.late


class Attention(nn.Module):
    """Attention, written out, with an additive mask if there is one."""

    mask: Tensor | None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.mask is not None:
            scores = scores + self.mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer that normalises first."""

    def __init__(self, width: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.up, self.act, self.drop, self.down = (
            nn.Linear(width, 2 * width),
            act(),
            nn.Dropout(0.2),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.drop(self.act(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    """A transformer over vectors, or over words that are looked up in a table."""

    def __init__(self, r: random.Random, act: type[nn.Module], words: bool) -> None:
        super().__init__()
        width, depth = r.choice((16, 24, 32)), r.choice((1, 2))
        self.table = nn.Embedding(WORDS, width) if words else nn.Identity()
        self.embed = nn.Linear(width if words else FEATURES, width)
        self.layers = nn.Sequential(*(Layer(width, act) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        self.links = [Link(f"layers.{i}.up", f"layers.{i}.down") for i in range(depth) if act not in CURVED]
        self.links += [Link(f"layers.{i}.attention.v", f"layers.{i}.attention.out", scales=False) for i in range(depth)]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(self.table(x)))).mean(1))


class Recurrent(nn.Module):
    """An LSTM, of whose last state two linears make classes."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        width = r.choice((12, 16))
        self.embed, self.rnn = nn.Linear(FEATURES, width), nn.LSTM(width, width, batch_first=True)
        self.hidden, self.act, self.head = nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, CLASSES)
        self.links = [Link("hidden", "head")]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.hidden(self.rnn(self.embed(x))[0][:, -1])))


class Tabular(nn.Module):
    """Linears on rows of a table; classes, and a quantity that has channels of its own."""

    def __init__(self, r: random.Random, act: type[nn.Module]) -> None:
        super().__init__()
        width = r.choice((24, 32, 48))
        self.a, self.act_a = nn.Linear(FEATURES, width), act()
        self.b, self.act_b = nn.Linear(width, width), act()
        self.c, self.act_c, self.drop = nn.Linear(width, width), act(), nn.Dropout(0.2)
        self.classes, self.amount = nn.Linear(width - 6, CLASSES), nn.Linear(6, 1)
        self.links = [] if act in CURVED else [Link("a", "b"), Link("b", "c")]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.act_c(self.c(self.act_b(self.b(self.act_a(self.a(x)))))))
        large, small = x.split((x.shape[1] - 6, 6), 1)
        return self.classes(large), self.amount(small)


CURVED = (nn.SiLU, nn.Hardswish, nn.GELU)
KINDS = ("cnn", "detector", "encoder", "words", "lstm", "tabular")
REAL = {"digits": zoo.digit_net, "mobilenet_v2": zoo.mobilenet_v2}
"""Nets with pretrained weights, which ``make zoo`` installs."""


@dataclass(frozen=True)
class Net:
    """A float model with its data.

    Attributes:
        kind, model: which, and the net in eval mode; copy it before it is changed.
        draw: samples of a seed and their classes.
        links: where channels can be rescaled or shifted.
    """

    kind: str
    model: nn.Module
    draw: Callable[[int, int], tuple[Tensor, Tensor]]
    links: tuple[Link, ...] = ()
    decompose: tuple[str, ...] = field(default=())

    def batches(self, seed: int, count: int) -> list[Tensor]:
        """Batches that only this seed gives."""
        return list(self.draw(seed, count * BATCH)[0].split(BATCH))


@functools.lru_cache(8)
def net_of(kind: str, seed: int) -> Net:
    """The net of a seed.

    Raises:
        pytest.skip.Exception: it is pretrained, and its package is not installed.
    """
    if kind in REAL:
        samples = zoo.digits()[0][:400] if kind == "digits" else zoo.pictures()
        links = (Link("fc_layers.0", "fc_layers.2"),) if kind == "digits" else ()
        return Net(kind, REAL[kind]().requires_grad_(False), functools.partial(_part, samples), links)
    r = random.Random(f"net {kind} {seed}")
    torch.manual_seed(r.randrange(1 << 30))
    act = r.choice((nn.ReLU, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardswish))
    model = {
        "cnn": lambda: Cnn(r, act),
        "detector": lambda: Detector(r, act),
        "encoder": lambda: Encoder(r, r.choice((nn.ReLU, nn.GELU)), False),
        "words": lambda: Encoder(r, r.choice((nn.ReLU, nn.GELU)), True),
        "lstm": lambda: Recurrent(r),
        "tabular": lambda: Tabular(r, act),
    }[kind]()
    draw = functools.partial(_drawn, kind, seed)
    _trained(model, *draw(0, 128), steps=r.choice((0, 30, 80)))
    decompose = ("lstm",) if kind == "lstm" else ()
    return Net(kind, model.eval().requires_grad_(False), draw, tuple(model.links), decompose)


def _part(samples: Tensor, seed: int, count: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(7))
    rows = order[(torch.arange(count) + seed * 80) % len(samples)]
    return samples[rows], torch.zeros(count, dtype=torch.long)


def _drawn(kind: str, net: int, seed: int, count: int) -> tuple[Tensor, Tensor]:
    own, g = torch.Generator().manual_seed(net), torch.Generator().manual_seed(1000 * net + seed + 1)
    labels = torch.randint(CLASSES, (count,), generator=g)
    contrast = 0.6 + 0.8 * torch.rand(count, generator=g)
    if kind == "words":
        odds = torch.rand(CLASSES, WORDS, generator=own) ** 6 + 0.02
        return torch.multinomial(odds[labels], TOKENS, replacement=True, generator=g), labels
    if kind not in ("cnn", "detector"):
        shape = (FEATURES,) if kind == "tabular" else (TOKENS, FEATURES)
        noise = torch.randn(count, *shape, generator=g)
        if kind != "tabular":
            noise = (noise + noise.roll(1, 1) + noise.roll(2, 1)) / 2  # neighbours are alike
        x = torch.randn(CLASSES, *shape, generator=own)[labels] + 0.7 * noise
        return x * contrast.view(-1, *[1] * len(shape)), labels
    smooth = functools.partial(F.interpolate, size=(16, 16), mode="bilinear")
    x = smooth(torch.randn(CLASSES, 3, 4, 4, generator=own))[labels] * contrast.view(-1, 1, 1, 1)
    x = x + 0.6 * smooth(torch.randn(count, 3, 8, 8, generator=g)) + 0.15 * torch.randn(count, 3, 16, 16, generator=g)
    return ((MEAN + 0.16 * x).clamp(0, 1) - MEAN) / DEVIATION, labels


def _trained(model: nn.Module, x: Tensor, labels: Tensor, steps: int) -> None:
    """Towards outputs that are drawn for each class."""
    outputs = pytree.tree_leaves(model(x))
    wanted = [torch.randn(CLASSES, *each.shape[1:])[labels] for each in outputs]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        rows = slice(step % 4 * 32, step % 4 * 32 + 32)
        got = pytree.tree_leaves(model(x[rows]))
        loss = sum(F.mse_loss(one, other[rows]) for one, other in zip(got, wanted, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None  # averages over what it sees
            norm.reset_running_stats()
    with torch.no_grad():
        model(x)
