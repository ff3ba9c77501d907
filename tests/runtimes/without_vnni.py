"""What OpenVINO computes without VNNI, as JSON: ``ONEDNN_MAX_CPU_ISA=AVX2 python -m tests.runtimes.without_vnni``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops

import pt2qa
from tests.runtimes.nets import NETS, quantized, seven_bits

SCALE = 2.0**-6


def simulated(integers: Any, weights: Any, zero_point: int, bits: int) -> Any:
    """Sums of products in NumPy; those of two neighbours are cut off at a number of bits."""
    products = integers[:, None] * weights
    pairs = products.reshape(*products.shape[:2], -1, 2).sum(-1)
    return pairs.clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).sum(-1) - zero_point * weights.sum(1)


def computed(op: str, values: Any, weights: Any, low: int) -> Any:
    """A linear or pointwise convolution by OpenVINO alone, in units of both scales."""
    ones = (1, 1) if op == "conv2d" else ()
    given = ops.parameter((*values.shape, *ones), np.float32)
    limits = [np.float32(SCALE * end) for end in (low, low + 255)] * 2
    rounded = ops.fake_quantize(given, *limits, 256)
    scales = np.full((len(weights), 1, *ones), SCALE, np.float32)
    held = ops.constant(weights.astype(np.int8).reshape(*weights.shape, *ones))
    weight = ops.multiply(ops.convert(held, np.float32), scales)
    made = (
        ops.convolution(rounded, weight, [1, 1], [0, 0], [0, 0], [1, 1])
        if ones
        else ops.matmul(rounded, weight, False, True)
    )
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    model = openvino.Core().compile_model(openvino.Model([made], [given]), "CPU", config)
    found = model([(SCALE * values).astype(np.float32).reshape(*values.shape, *ones)])[0]
    return found.reshape(len(values), len(weights)) / SCALE**2


def products() -> Iterator[dict[str, Any]]:
    """With weights of 8 and of 7 bits, how far OpenVINO is from sums of two products in 16 and in 32 bits."""
    random = np.random.default_rng(0)
    for op in ("linear", "conv2d"):
        for largest in (127, 63):
            for zero_point in (0, 100, 128, 156):  # int8 inputs with the zero points -128, -28, 0 and 28
                weights = random.integers(largest // 2, largest + 1, (4, 32))
                integers = random.integers(0, 256, (8, 32))
                found = computed(op, integers - zero_point, weights, -zero_point)
                apart = [np.abs(found - simulated(integers, weights, zero_point, bits)).max() for bits in (16, 32)]
                case = {"op": op, "largest": largest, "zero_point": zero_point}
                yield {**case, "from_16_bits": float(apart[0]), "from_32_bits": float(apart[1])}


def nets() -> Iterator[dict[str, Any]]:
    """What is said of the nets, with weights of eight and of seven bits."""
    for net in NETS:
        for quantizer in ("xnnpack", "x86"):
            for bits in (8, 7):
                pair, batches = quantized(net, quantizer if bits == 8 else seven_bits(quantizer))
                report = pt2qa.compare_deployed(pair, batches, backend="openvino", progress=False)
                yield {
                    "net": net,
                    "quantizer": quantizer,
                    "bits": bits,
                    "facts": report.facts,
                    "on_integers": sum(row.delegated for row in report.rows),
                    "causes": [row.cause for row in report.suspects],
                    "max_lsb": max((row.isolated_max_lsb for row in report.rows), key=lambda lsb: (lsb == lsb, lsb)),
                    "apart": min(row.cumulative_sqnr for row in report.outputs),
                    "sqnr": report.sqnr,
                }


if __name__ == "__main__":
    print(json.dumps({"products": list(products()), "nets": list(nets())}))
