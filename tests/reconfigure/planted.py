"""A trained CNN with one layer that int8 cannot hold: huge weights for a channel that is always zero."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

import pt2qa
from examples import digits

HOSTILE = "deep.0/conv2d"
OUTLIER = 300.0


@dataclass(frozen=True)
class Planted:
    """The network, its capture, and its data in batches.

    Attributes:
        model: float, in eval mode.
        capture: of it.
        pictures, labels: unseen ones.
        batches: of ``pictures``, as the model takes them.
    """

    model: digits.DigitNet
    capture: pt2qa.Capture
    pictures: Tensor
    labels: Tensor
    batches: list[Tensor]

    def accuracy(self, model: object) -> float:
        """Share of the pictures that a model tells right, 0..1; it is called with batches of the captured size."""
        right = 0
        with torch.no_grad():
            for batch, labels in zip(self.batches, self.labels.split(len(self.batches[0])), strict=True):
                right += int((model(batch).argmax(1) == labels).sum())  # type: ignore[operator]
        return right / len(self.labels)


@functools.cache
def planted() -> Planted:
    """The network: a channel of ``down`` is always zero, and ``deep`` has huge weights for it."""
    pictures, labels = digits.digits()
    model = digits.train(pictures[: digits.TRAINING], labels[: digits.TRAINING], epochs=4)
    with torch.no_grad():
        model.down[1].weight[3], model.down[1].bias[3] = 0.0, -1.0
        model.deep[0].weight[:, 3] = OUTLIER
    unseen, truth = pictures[digits.TRAINING :][:320], labels[digits.TRAINING :][:320]
    batches = list(unseen.split(64))
    return Planted(model, pt2qa.capture(model, (batches[0],)), unseen, truth, batches)


@functools.cache
def planted_pair(quantizer: str = "xnnpack") -> pt2qa.QuantizedPair:
    """Its pair."""
    made = planted()
    return pt2qa.quantize(made.capture, quantizer, made.batches, progress=False)
