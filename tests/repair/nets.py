"""Small nets that int8 hurts in ways that another range can repair."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._repair.guard import Fit
from pt2qa._simulator.simulator import Simulator


class Clipped(nn.Module):
    """Convolutions whose outputs reach far beyond the ReLU6 that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.act1, self.act2, self.fc = nn.ReLU6(), nn.ReLU6(), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act2(self.second(self.act1(self.first(x))))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def batches(count: int = 4, seed: int = 0) -> list[Tensor]:
    """Pictures whose last channel is large, and hardly read."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([1.0, 1.0, 30.0]).reshape(3, 1, 1)
    return [torch.randn(4, 3, 12, 12, generator=generator) * size for _ in range(count)]


@functools.cache
def clipped_pair(quantizer: str = "xnnpack") -> pt2qa.QuantizedPair:
    """The net with large weights, calibrated on four batches."""
    torch.manual_seed(0)
    model = Clipped().eval()
    with torch.no_grad():
        model.first.weight.mul_(12.0)
        model.first.weight[:, 2] *= 1e-4
        model.second.weight.mul_(12.0)
    return pt2qa.quantize(pt2qa.capture(model, (batches()[0],)), quantizer, batches(), progress=False)


class Encoder(nn.Module):
    """A pre-norm transformer of two layers, and a norm that is an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.norm, self.head = nn.Linear(16, 64), nn.RMSNorm(64), nn.Linear(64, 10)
        self.layers = nn.Sequential(layer, copy.deepcopy(layer))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.layers(self.embed(x))))
        return result


def sequences(count: int = 4, seed: int = 0) -> list[Tensor]:
    """Batches of eight sequences of twelve tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 12, 16, generator=generator) for _ in range(count)]


@functools.cache
def encoder_pair(quantizer: str, planted: float = 1.0) -> pt2qa.QuantizedPair:
    """The transformer, with outliers in three channels of each norm that the linears behind it take back."""
    torch.manual_seed(0)
    model = Encoder().eval()
    found: list[tuple[nn.Module, Tensor]] = [(model.norm, model.head.weight)]
    for layer in model.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        found += [(layer.norm1, layer.self_attn.in_proj_weight), (layer.norm2, layer.linear1.weight)]
    with torch.no_grad():
        for norm, weight in found:
            norm.get_parameter("weight").uniform_(0.5, 1.5)
            for parameter in norm.parameters():
                parameter[[3, 17, 40]] *= planted
            weight[:, [3, 17, 40]] /= planted
    return pt2qa.quantize(pt2qa.capture(model, sequences()[0]), quantizer, sequences(), progress=False)


class PostNorm(nn.Module):
    """A post-norm transformer of two layers: residuals read the norms, too."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
        self.layers = nn.Sequential(layer, copy.deepcopy(layer))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.embed(x)))
        return result


@functools.cache
def post_norm_pair(quantizer: str, planted: float = 0.0) -> pt2qa.QuantizedPair:
    """The transformer; channels of its norms lie apart by what is planted, and the biases around them take it back."""
    torch.manual_seed(0)
    model = PostNorm().eval()
    first, second = model.layers
    assert isinstance(first, nn.TransformerEncoderLayer)
    assert isinstance(second, nn.TransformerEncoderLayer)
    heads = [(second.self_attn.in_proj_weight, second.self_attn.in_proj_bias), (model.head.weight, model.head.bias)]
    with torch.no_grad():
        for layer, (weight, bias) in zip((first, second), heads, strict=True):
            offset = torch.linspace(-planted, planted, 64)
            for norm, read, own in (
                (layer.norm1, layer.linear1.weight, layer.linear1.bias),
                (layer.norm2, weight, bias),
            ):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias += offset
                own -= read @ offset
            layer.linear2.bias -= offset
        second.self_attn.out_proj.bias -= torch.linspace(-planted, planted, 64)
    return pt2qa.quantize(pt2qa.capture(model, sequences()[0]), quantizer, sequences(), progress=False)


def played(fit: Fit, pair: pt2qa.QuantizedPair, x: Tensor) -> Tensor:
    """The first output of a pair with a fit, without quantizing again."""
    found: Tensor = Simulator(fit.program(pair), fused=pair.simulator.fused).run(pair.values((x,)), on=True)[0]
    return found
