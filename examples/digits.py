"""A small CNN for scikit-learn's digits, as a flow of the command line; ``make demo`` quantizes it with a mistake.

It trains in seconds, and needs no download: the 1,797 pictures of 8×8 pixels come with scikit-learn.

    pt2qa fix examples/digits.py:mistaken -q xnnpack -o demo-reports
    pt2qa analyze examples/digits.py -o reports
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 64  # in training
TRAINING = 1_437  # the remaining 360 pictures are for testing
PART = 120  # pictures that calibrate or test at once


class DigitNet(nn.Module):
    """Three convolutions with batch norm and ReLU, and a linear classifier: (N, 1, 8, 8) in, (N, 10) out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(1, 16)
        self.down = conv_block(16, 32, stride=2)
        self.deep = conv_block(32, 32)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(32, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        """Scores of the ten digits."""
        features = self.down(self.stem(pictures))
        features = features + self.deep(features)
        scores: Tensor = self.classify(self.pool(features).flatten(1))
        return scores


def conv_block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def digits() -> tuple[Tensor, Tensor]:
    """The pictures, shuffled, as float32 (1797, 1, 8, 8) in 0..1, and their labels (1797,)."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return pictures[order], torch.tensor(data.target)[order]


def train(pictures: Tensor, labels: Tensor, epochs: int) -> DigitNet:
    """A trained network, in eval mode."""
    torch.manual_seed(0)
    model = DigitNet().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pictures[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def flow() -> dict[str, Any]:
    """The trained network, pictures that calibrate it, and others to measure on."""
    pictures, labels = digits()
    model = train(pictures[:TRAINING], labels[:TRAINING], epochs=6)
    unseen, truth = pictures[TRAINING:].split(PART), labels[TRAINING:].split(PART)

    @torch.no_grad()
    def accuracy(net: Callable[[Tensor], Tensor]) -> float:
        """Percent of the unseen pictures."""
        right = sum(int((net(batch).argmax(1) == each).sum()) for batch, each in zip(unseen, truth, strict=True))
        return 100 * right / (len(pictures) - TRAINING)

    batches = list(pictures[: 4 * PART].split(PART))
    evaluation = list(unseen)
    return {
        "model": model,
        "example_inputs": batches[0],
        "batches": batches,
        "evaluation": evaluation,
        "metric": accuracy,
    }


def mistaken() -> dict[str, Any]:
    """The same, but nobody scaled the pictures that calibrate from 0..16 to 0..1, as training did."""
    right = flow()
    return {**right, "batches": [16 * batch for batch in right["batches"]]}
