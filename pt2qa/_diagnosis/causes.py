"""The causes that a diagnosis can name."""

from __future__ import annotations

from typing import Final

CAUSES: Final = {
    "nonfinite": "quantization produces NaN or infinity",
    "capture-changed": "the exported program does not compute what the model computes",
    "prepare-changed": "preparing or converting changed the model beyond quantization",
    "masked-values": "a mask value such as -1e9 is quantized together with ordinary values and dominates the range",
    "dynamic-by-row": "the kernels compute dynamic scales per row, the converted graph per tensor",
    "unfused-activation": "values are quantized between ops that the backend runs as one kernel",
    "per-tensor-weights": "a weight has one scale for all channels, although their ranges differ",
    "weight-scheme": "weights are quantized more coarsely than the kernels require",
    "activation-scheme": "activations use fewer integer values than their dtype has",
    "bad-sample": "one sample causes most of the error",
    "calibration-outlier": "one calibration batch widens the ranges beyond what all others need",
    "narrow-calibration": "values exceed the calibrated ranges and are clamped",
    "wide-calibration": "the calibrated ranges are wider than the values, so few integer values are used",
    "broken-sharing": "a value is quantized twice with different parameters",
    "shared-scale": "values of different ranges share one scale",
    "site-range": "a range does not fit the values, although the calibration data does",
    "observer": "another observer chooses better ranges from the same data",
    "outlier-channel": "a few channels need a much larger range than the others",
    "norm-offsets": "the channels of a norm have different offsets, which the biases around it can absorb",
    "norm-outliers": "some channels are far larger than the others, which the weights around them can absorb",
    "range": "ranges fitted to the output error are better than those of the observers",
    "weight-rounding": "weights are rounded to nearest one by one, and their errors add up",
    "bias": "quantization shifts the mean of op outputs",
    "precision": "the op needs more than 8 bits",
    "saturation": "16-bit accumulators saturate on CPUs without VNNI",
    "deployed-kernel": "a kernel does not compute what the converted graph computes",
}
"""What each one means.  Of two remedies of equal gain, the one whose cause is listed first is preferred."""

ORDER: Final = {cause: number for number, cause in enumerate(CAUSES)}
