"""What a conformance model is, and the nets and inputs of those that ship with pt2qa, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = tuple[Tensor, ...]
MODULE = "module"
"""The spelling that all properties except ``spelling`` use."""


@dataclass(frozen=True, eq=False)
class ConformanceModel:
    """A small model that shows one pattern.

    Args:
        name: short, as used in test ids: ``conv_bn_relu``.
        pattern: what it shows, in one line.
        make: makes the module; its parameters are drawn from a fixed seed.
        inputs: makes one batch of inputs; two batches are drawn for calibration, from fixed seeds.
        spellings: other ways to write the same computation, by name.  Their ops must come in the same
            order, and their parameters must be made in the same order, so that both have the same values.
        dynamic_shapes: as ``torch.export.export`` takes it.
        decompose: recurrent ops to decompose, as :func:`pt2qa.capture` takes it.

    >>> from pt2qa.testing import ConformanceModel
    >>> model = ConformanceModel("doubled", "adds a value to itself", torch.nn.Identity, lambda: (torch.randn(2),))
    >>> model.batches()[0][0].shape
    torch.Size([2])
    """

    name: str
    pattern: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    spellings: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    dynamic_shapes: Any = None
    decompose: tuple[str, ...] = ()

    def build(self, spelling: str = MODULE) -> nn.Module:
        """The module in eval mode; batch norms have statistics as if trained.

        Args:
            spelling: a key of ``spellings``; without it, what ``make`` makes.
        """
        make = self.make if spelling == MODULE else self.spellings[spelling]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
            # Nontrivial running means and variances, so that folding has an effect.
            for name, buffer in model.named_buffers():
                if name.rpartition(".")[2] == "running_mean":
                    buffer.normal_(0.0, 0.2)
                elif name.rpartition(".")[2] == "running_var":
                    buffer.uniform_(0.5, 1.5)
        return model.eval()

    def batches(self) -> tuple[Inputs, Inputs]:
        """Two batches of inputs; the first one is the example for export."""
        drawn = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                drawn.append(self.inputs())
        return drawn[0], drawn[1]


Make = Callable[[], nn.Module]
Activation = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Modules, parameters, buffers and functions by name, and a forward that takes the net and its input."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def net(compute: Callable[[Any, Tensor], Tensor], **parts: tuple[Any, ...]) -> Make:
    """A net of modules, each given by its class and arguments."""
    return lambda: Net(compute, **{name: make(*args) for name, (make, *args) in parts.items()})


def drawn(*shape: int) -> Callable[[], Inputs]:
    """One input of normally distributed numbers."""
    return lambda: (torch.randn(shape),)


images, rows, sequences = drawn(2, 3, 8, 8), drawn(4, 8), drawn(2, 3, 8)


def chain(*makes: Make) -> Make:
    return lambda: nn.Sequential(*(make() for make in makes))


class Conv(nn.Conv2d):
    """A user's subclass of convolution."""


def conv(activation: Activation, *, norm: bool = False, make: type[nn.Conv2d] = nn.Conv2d) -> Make:
    return lambda: Net(
        lambda m, x: m.activation(m.bn(m.conv(x))),
        conv=make(3, 8, 3, padding=1),
        bn=nn.BatchNorm2d(8) if norm else nn.Identity(),
        activation=activation,
    )


def functional_conv(activation: Activation, *, norm: bool = False) -> Make:
    """The same with functional calls."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x = F.conv2d(x, m.conv.weight, m.conv.bias, padding=1)
        if norm:
            x = F.batch_norm(x, m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias)
        return activation(x)

    bn = nn.BatchNorm2d if norm else nn.Identity
    return lambda: Net(compute, conv=nn.Conv2d(3, 8, 3, padding=1), bn=bn(8), activation=activation)


def between(make: Callable[..., nn.Module], *args: int, **options: int) -> Make:
    """A module between a 1×1 convolution and a ReLU."""
    return lambda: Net(
        lambda m, x: m.relu(m.second(m.first(x))),
        first=nn.Conv2d(3, 8, 1),
        second=make(*args, **options),
        relu=nn.ReLU(),
    )


class Linear(nn.Linear):
    """A user's subclass of linear."""


class Functional(nn.Linear):
    """A linear called as a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def linears(make: type[nn.Linear]) -> Make:
    return lambda: nn.Sequential(make(8, 6), make(6, 4))


def linear(activation: Activation, make: type[nn.Linear] = nn.Linear) -> Make:
    return lambda: Net(lambda m, x: m.activation(m.fc(x)), fc=make(8, 6), activation=activation)


def residual(join: Join) -> Make:
    """A value joined with its convolution."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return join(m.branch(x), x)

    return net(compute, stem=(nn.Conv2d, 3, 8, 1), branch=(nn.Conv2d, 8, 8, 3, 1, 1))


def both(join: Join) -> Make:
    """One value as both operands of an op."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        return join(x, x)

    return net(compute, conv=(nn.Conv2d, 3, 4, 1))


def before_and_after_relu() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Any:
        x = m.conv(x)
        return m.relu(x) + x

    return Net(compute, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU())


def add_in_place(left: Tensor, right: Tensor) -> Tensor:
    left += right
    return left


def cat(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right], 1)


def tied_weights() -> nn.Module:
    encode, decode = nn.Linear(8, 8), nn.Linear(8, 8)
    decode.weight = encode.weight
    return Net(lambda m, x: m.decode(torch.tanh(m.encode(x))), encode=encode, decode=decode)


def half_unused() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Any:
        m.unused(x)
        return m.used(x)

    return Net(compute, used=nn.Linear(8, 4), unused=nn.Linear(8, 4))


def pooled(pool: nn.Module, features: int) -> Make:
    """A convolution, a pool, and a linear on the flattened result."""
    return lambda: Net(
        lambda m, x: m.fc(m.pool(m.conv(x)).flatten(1)),
        conv=nn.Conv2d(3, 4, 3, padding=1),
        pool=pool,
        fc=nn.Linear(features, 5),
    )


def attention(compute: Callable[[Any, Tensor], Tensor]) -> Make:
    return net(compute, **dict.fromkeys(("query", "key", "value"), (nn.Linear, 8, 8)))


def by_matmul(m: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(torch.matmul(m.query(x), m.key(x).transpose(1, 2)) / 8**0.5, -1)
    return torch.matmul(weights, m.value(x))


def recurrent() -> nn.Module:
    return Net(lambda m, x: m.fc(m.rnn(x)[0]), rnn=nn.LSTM(8, 6, batch_first=True), fc=nn.Linear(6, 4))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Any:
        return self.fc(self.table(words))


class Indexed(nn.Module):
    """Computed positions, then looked up: integers added, multiplied and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        return self.fc(x[torch.cat([positions + positions, positions * 2 + 1], 0)])
