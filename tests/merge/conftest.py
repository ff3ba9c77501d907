"""One quantized model and batches of different sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import pt2qa
from tests.models import images, residual

SIZES = (4, 2, 3, 1, 5, 2, 3)


@pytest.fixture(scope="session")
def capture() -> pt2qa.Capture:
    return pt2qa.capture(residual(), (images(4),), dynamic_shapes=({0: Dim("batch", min=1, max=64)},))


@pytest.fixture(scope="session")
def pair(capture: pt2qa.Capture) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(capture, "xnnpack", [images(4)])


@pytest.fixture(scope="session")
def batches() -> list[Tensor]:
    """Of unequal size; the last values exceed the ranges that were calibrated."""
    return [images(size, seed) * (1 + 0.3 * seed) for seed, size in enumerate(SIZES)]


@pytest.fixture(scope="session")
def not_finite() -> Tensor:
    """A batch that no model gives numbers for."""
    batch = images(3, 9).clone()
    batch[1, 0, 0, 0] = torch.nan
    return batch
