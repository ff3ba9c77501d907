"""Small models that several tests share; each shows one pattern."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = (3, 8, 8)


def images(batch: int = 2, seed: int = 0) -> Tensor:
    """Normal random images of shape (batch, 3, 8, 8)."""
    return torch.randn(batch, *IMAGE, generator=torch.Generator().manual_seed(seed))


def randomize_batch_norms(model: nn.Module) -> nn.Module:
    """Statistics and affine parameters that are far from the identity, as in a trained model."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.2, generator=generator)
    return model.eval()


class Residual(nn.Module):
    """conv-bn-relu (in place), conv-bn, a residual add, mean, linear: what a ResNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(x)) + x)
        return self.fc(y.mean((2, 3)))


def residual() -> nn.Module:
    """A :class:`Residual` in eval mode with the batch norm of trap 1: weight 10, mean 5."""
    torch.manual_seed(0)
    model = Residual()
    randomize_batch_norms(model)
    with torch.no_grad():
        model.bn1.weight.fill_(10)
        model.bn1.running_mean.fill_(5)
        model.bn1.bias.fill_(45)
    return model.eval()


class Linears(nn.Module):
    """Two linear layers with a relu between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class TwoUsers(nn.Module):
    """The conv's output is read by the relu and by the add: conv and relu must not be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.relu(y) + y


class SameInputTwice(nn.Module):
    """``cat([y, y])`` and ``z + z``: one edge, two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = torch.cat([y, y], 1)
        return z + z


class InPlaceViews(nn.Module):
    """Writes to slices of a value, which reach the value itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).tanh()
        y[:, 0] = 0.25
        y[:, 1:3].mul_(2)
        y.add_(1)
        return self.last(F.hardtanh_(y))


class NestedOutputs(nn.Module):
    """Outputs of several types in tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        left, right = hidden.chunk(2, -1)
        logits = self.second(torch.cat([left, right], -1))
        return {"logits": logits, "rest": (hidden, hidden.argmax(-1), hidden > 0)}


class KeywordInputs(nn.Module):
    """A positional and a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.fc(x * scale)


class Counter(nn.Module):
    """A buffer that each call writes to."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.conv(x)


class Parameters(nn.Module):
    """A parameter that is multiplied (a weight) and a buffer that is multiplied (an activation)."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1, 4, 1, 1))
        self.register_buffer("table", torch.rand(1, 4, 1, 1))
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return (y * self.gain) + (self.table * y)


class SharedConv(nn.Module):
    """One conv on two inputs, with the same batch norm after each call, or another one."""

    def __init__(self, same_norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn1 = nn.BatchNorm2d(4)
        self.bn2 = self.bn1 if same_norm else nn.BatchNorm2d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bn1(self.conv(x)) + self.bn2(self.conv(y))


class Recurrent(nn.Module):
    """Embedding, two-layer LSTM, decoder; three inputs, three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(10, 16)
        self.rnn = nn.LSTM(16, 8, 2)
        self.decoder = nn.Linear(8, 10)

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, (h, c) = self.rnn(self.encoder(tokens), (h, c))
        return self.decoder(out), h, c


class Conditional(nn.Module):
    """A linear inside the branches of ``torch.cond``, another one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        branch = torch.cond(x.sum() > 0, lambda t: self.inner(t).relu(), lambda t: self.inner(t) - 1, (x,))
        return self.outer(branch)


class Loop(nn.Module):
    """A linear before a loop, one in its body, one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        def body(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.tanh(self.inner(value))

        _, value = torch.while_loop(lambda count, _: count < 3, body, (torch.tensor(0), self.first(x)))
        result: Tensor = self.last(value)
        return result
