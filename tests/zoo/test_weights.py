"""Weights of the pretrained MobileNetV2: what the report says, against NumPy."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import pt2qa
from tests.zoo.pairs import captured, pair_of

pytestmark = [pytest.mark.zoo, pytest.mark.xdist_group("mobilenet_v2")]

PER_CHANNEL, PER_TENSOR = "xnnpack", "xnnpack:per_channel=false"
LAYERS = [("features.1.conv.0.0", "features.1.conv.0.1"), ("features.3.conv.1.0", "features.3.conv.1.1"),
          ("features.17.conv.0.0", "features.17.conv.0.1")]  # fmt: skip
"""Convs and their batch norms: the first two depthwise, the third 1 × 1."""
EPSILON = 2.0**-12
"""The smallest scale that XNNPACK's weight observers give."""


@dataclass(frozen=True)
class Expected:
    sqnr: float
    worst_channel: int
    worst_channel_sqnr: float
    dead_channels: int


def in_numpy(conv: str, norm: str, per_channel: bool) -> Expected:
    """Folds the batch norm, quantizes symmetrically to -127..127, and measures; float64 but for the stored numbers."""
    model = captured("mobilenet_v2").model
    weight = model.get_submodule(conv).weight.detach().double().numpy()
    bn = model.get_submodule(norm)
    gain = bn.weight.detach().double().numpy() / np.sqrt(bn.running_var.double().numpy() + bn.eps)
    channels = (weight * gain[:, None, None, None]).reshape(len(weight), -1)
    largest = np.abs(channels).max(1, keepdims=True) if per_channel else np.abs(channels).max()
    scale = np.maximum(largest / 127, EPSILON)
    quantized = np.clip(np.round(channels / scale), -127, 127) * scale
    signal, noise = (channels**2).sum(1), ((channels - quantized) ** 2).sum(1)
    with np.errstate(divide="ignore"):
        by_channel = 10 * np.log10(signal / noise)
    return Expected(
        sqnr=10 * np.log10(signal.sum() / noise.sum()),
        worst_channel=int(by_channel.argmin()),
        worst_channel_sqnr=float(by_channel.min()),
        dead_channels=int(((signal > 0) & (quantized == 0).all(1)).sum()),
    )


@functools.cache
def weights_of(quantizer: str) -> dict[str, pt2qa.WeightRow]:
    report = pt2qa.compare_weights(pair_of("mobilenet_v2", quantizer))
    return {row.module: row for row in report.rows if row.attr == "weight"}


@pytest.mark.parametrize("quantizer", [PER_CHANNEL, PER_TENSOR])
@pytest.mark.parametrize(("conv", "norm"), LAYERS)
def test_weight_numbers_equal_numpy(conv: str, norm: str, quantizer: str) -> None:
    row, expected = weights_of(quantizer)[conv], in_numpy(conv, norm, quantizer == PER_CHANNEL)
    assert row.sqnr == pytest.approx(expected.sqnr, abs=1e-3)
    assert row.worst_channel_sqnr == pytest.approx(expected.worst_channel_sqnr, abs=1e-3)
    assert row.worst_channel == expected.worst_channel
    assert row.dead_channels == expected.dead_channels
    assert row.axis == (0 if quantizer == PER_CHANNEL else -1)


def test_every_weight_is_a_row() -> None:
    rows = weights_of(PER_CHANNEL)
    model = captured("mobilenet_v2").model
    layers = [n for n, layer in model.named_modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear))]
    assert list(rows) == layers
    assert all(row.quantized and row.dtype == "int8" for row in rows.values())


def test_one_scale_for_the_tensor_kills_channels_that_per_channel_keeps() -> None:
    # Trap 12: folding scales channels apart, the small ones round to nothing while the SQNR of the whole stays high.
    per_channel, per_tensor = weights_of(PER_CHANNEL), weights_of(PER_TENSOR)
    dead = [sum(row.dead_channels for row in rows.values()) for rows in (per_channel, per_tensor)]
    assert dead[0] == 0
    assert dead[1] >= 5, dead
    for row in per_tensor.values():
        if row.dead_channels:
            assert row.worst_channel_sqnr == 0
            assert row.sqnr > 30
    worse = [n for n, row in per_tensor.items() if row.worst_channel_sqnr < per_channel[n].worst_channel_sqnr - 10]
    assert len(worse) >= 25, len(worse)
