"""What the tests of all runtimes run: a CNN, a transformer block and a detector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import pt2qa
from tests.flows import NARROW
from tests.models import images, residual

EXACT = "openvino:int8_kernels=false" if NARROW else "openvino"
"""OpenVINO as it computes what the graph says, whose sums saturate in int8 kernels without VNNI."""


class Block(nn.Module):
    """Attention, a norm and two linears on inputs of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Detector(nn.Module):
    """Two scales that are joined, and two outputs: boxes of 4 values, and scores of 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.Hardswish(), nn.Conv2d(8, 16, 1), nn.ReLU())
        self.lateral = nn.Conv2d(8, 16, 1)
        self.boxes, self.scores = nn.Conv2d(32, 4, 3, 1, 1), nn.Conv2d(32, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        near = self.stem(x)
        far = nn.functional.interpolate(self.down(near), scale_factor=2.0, mode="nearest")
        both = torch.cat([far, self.lateral(near)], 1)
        return {"boxes": self.boxes(both), "scores": torch.sigmoid(self.scores(both))}


def blocks(batch: int = 4, seed: int = 0) -> Tensor:
    """Sequences of five vectors."""
    return torch.randn(batch, 5, 16, generator=torch.Generator().manual_seed(seed))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Tensor]]] = {
    "cnn": (residual, images),
    "block": (Block, blocks),
    "detector": (Detector, images),
}


def seven_bits(quantizer: str) -> Any:
    """A quantizer with weights of seven bits: 255 * 64 * 2 is less than 2**15, so its sums are right without VNNI."""
    if quantizer == "x86":
        from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
            X86InductorQuantizer,
            get_default_x86_inductor_quantization_config,
        )

        config = get_default_x86_inductor_quantization_config()
        return X86InductorQuantizer().set_global(
            replace(config, weight=replace(config.weight, quant_min=-64, quant_max=63))
        )
    if quantizer == "tosa":
        from executorch.backends.arm.quantizer import TOSAQuantizer, get_symmetric_quantization_config
        from executorch.backends.arm.tosa import TosaSpecification

        made = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
        return made.set_global(get_symmetric_quantization_config(weight_qmin=-64, weight_qmax=63))
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer

    config = xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True, weight_qmin=-64, weight_qmax=63)
    return xnnpack_quantizer.XNNPACKQuantizer().set_global(config)


def fitting(quantizer: str) -> Any:
    """The quantizer; on a CPU without VNNI, which adds pairs of products in 16 bits, with weights of seven bits."""
    return seven_bits(quantizer) if NARROW else quantizer


def quantized(net: str, quantizer: Any) -> tuple[pt2qa.QuantizedPair, list[Tensor]]:
    """One of the nets, and two batches of other data than it was calibrated on."""
    make, data = NETS[net]
    torch.manual_seed(0)
    pair = pt2qa.quantize(pt2qa.capture(make().eval(), data(4, 0)), quantizer, [data(4, 0)], progress=False)
    return pair, [data(4, 1), data(4, 2)]
