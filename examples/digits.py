"""Trains a small CNN on scikit-learn's digits, quantizes it for two backends, and shows what each layer loses.

Run it with ``make demo``. It takes well under a minute, and needs no download: the 1,797 pictures of 8×8 pixels come
with scikit-learn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pt2qa

QUANTIZERS = ("xnnpack", "x86")
BATCH = 64
TRAINING = 1_437  # the remaining 360 pictures are for testing


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


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], pictures: Tensor, labels: Tensor) -> float:
    """Share of the pictures that a model classifies correctly, in percent."""
    return (model(pictures).argmax(1) == labels).double().mean().item() * 100


def main(folder: Path = Path("demo-reports"), epochs: int = 6) -> dict[str, pt2qa.LayerReport]:
    """Trains, quantizes and compares; one report for each quantizer, also saved in the folder."""
    # When they are first imported, torch and torchao log which of their parts this machine cannot use.
    for name in ("torch", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)

    pictures, labels = digits()
    print(f"Training on {TRAINING} digits ...")
    model = train(pictures[:TRAINING], labels[:TRAINING], epochs)
    unseen, truth = pictures[TRAINING:], labels[TRAINING:]
    print(f"Accuracy on {len(truth)} others, in float: {accuracy(model, unseen, truth):.1f} %")

    batches = list(pictures[: 8 * BATCH].split(BATCH))
    capture = pt2qa.capture(model, (batches[0],), dynamic_shapes=({0: torch.export.Dim("pictures")},))
    folder.mkdir(parents=True, exist_ok=True)
    reports = {}
    for name in QUANTIZERS:
        pair = pt2qa.quantize(capture, name, batches)
        report = pt2qa.compare_layers(pair, unseen.split(BATCH))
        path = folder / f"{name}-layers.safetensors"
        report.save(path)
        print(f"\n{name}: accuracy in int8: {accuracy(pair.quantized, unseen, truth):.1f} %\n\n{report}\n")
        print(f"Saved. Look at it again with: pt2qa show {path}")
        reports[name] = report
    return reports


def flow() -> tuple[nn.Module, Tensor, list[Tensor]]:
    """The same model for the command line: ``pt2qa analyze examples/digits.py:flow -o reports``."""
    pictures, labels = digits()
    model = train(pictures[:TRAINING], labels[:TRAINING], epochs=6)
    batches = list(pictures[: 8 * BATCH].split(BATCH))
    return model, batches[0], batches


if __name__ == "__main__":
    main()
