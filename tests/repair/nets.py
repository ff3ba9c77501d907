"""Small nets that int8 hurts in ways that another range can repair."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import pt2qa


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
