"""The causes that a diagnosis can name."""

from __future__ import annotations

from typing import Final

CAUSES: Final = {
    "nonfinite": "quantization makes NaN or infinities",
    "capture-changed": "the exported program computes something else than the model",
    "prepare-changed": "preparing or converting changed the model beyond quantization",
    "masked-values": "a mask value such as -1e9 is rounded together with ordinary values, and takes the range",
    "dynamic-by-row": "the kernels scale each row by itself, where the converted graph has one scale for all",
    "unfused-activation": "ops that the backend runs as one kernel are rounded in between",
    "per-tensor-weights": "one scale serves all channels of a weight, whose ranges differ",
    "weight-scheme": "weights are rounded more coarsely than the kernels need",
    "activation-scheme": "activations have fewer integer steps than their type holds",
    "bad-sample": "one sample makes most of the error",
    "calibration-outlier": "one calibration batch sets the ranges that all others do not need",
    "narrow-calibration": "values exceed the ranges that calibration saw, and are clamped",
    "wide-calibration": "calibration saw larger values than the model gets, so few integer steps are used",
    "broken-sharing": "a value is rounded twice, with different parameters",
    "shared-scale": "values of different ranges share one scale",
    "site-range": "a range does not fit the values, although calibration saw such data",
    "observer": "another observer chooses better ranges from the same data",
    "outlier-channel": "a few channels need a range that the others do not",
    "norm-offsets": "the channels of a norm lie far apart, and the biases around it can take that over",
    "norm-outliers": "a few channels of a norm are far larger than the others, and what reads them can take that over",
    "range": "ranges fitted to the output cost it less than those that the observers chose",
    "weight-rounding": "weights are rounded one by one, and their errors add up",
    "bias": "rounding shifts the mean of what ops compute",
    "precision": "the op needs more than 8 bits",
    "saturation": "sums of products exceed 16 bits on CPUs without VNNI",
    "deployed-kernel": "a kernel computes something else than the converted graph",
}
"""What each one means.  Of two remedies that give the same, the one whose cause is listed first is preferred."""

ORDER: Final = {cause: number for number, cause in enumerate(CAUSES)}
