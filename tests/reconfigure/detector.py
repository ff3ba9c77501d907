"""A small net with several outputs of very different size, and layers that int8 hurts each in another output."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import pt2qa
from pt2qa.overrides.plan import Edit
from tests.flows import direct_sqnr, quantized_pair


class Detector(nn.Module):
    """Boxes are a thousand times as large as scores, so that noise that is added up over both is that of the boxes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.stem, self.mid = nn.Linear(16, 32), nn.Linear(32, 32)
        self.head, self.boxes, self.scores = nn.Linear(32, 24), nn.Linear(32, 4), nn.Linear(24, 2)
        with torch.no_grad():
            for module in (self.stem, self.mid, self.head, self.boxes, self.scores):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) / 4)
            self.boxes.weight *= 100
            self.scores.weight *= 0.1
            self.mid.weight[:, 5] *= 12
            self.head.weight[:, 7] *= 30

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.mid(torch.relu(self.stem(x))))
        scores = self.scores(torch.relu(self.head(features)))
        return {"boxes": self.boxes(features), "scores": scores, "best": scores.argmax(-1)}


def data() -> list[Tensor]:
    """Two batches of eight samples."""
    return list(torch.randn(16, 16, generator=torch.Generator().manual_seed(4)).split(8))


@functools.cache
def detector_pair(quantizer: str = "xnnpack") -> pt2qa.QuantizedPair:
    """Its pair, calibrated on all batches."""
    return quantized_pair(Detector().eval(), data()[0], quantizer, batches=data())


def measured(pair: pt2qa.QuantizedPair) -> dict[str, float]:
    """The SQNR of each output, from the graphs themselves."""
    with torch.no_grad():
        reference, quantized = ([graph(batch) for batch in data()] for graph in (pair.reference, pair.quantized))
    return {
        name: direct_sqnr(torch.cat([each[name] for each in reference]), torch.cat([each[name] for each in quantized]))
        for name in ("boxes", "scores")
    }


def subsets(edits: tuple[Edit, ...]) -> Iterator[tuple[Edit, ...]]:
    """All choices of fewer edits."""
    for count in range(len(edits)):
        yield from itertools.combinations(edits, count)
