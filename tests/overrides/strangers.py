"""Quantizers that other people wrote, from the executorch package: each configured as its makers show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def cadence() -> Any:
    """Cadence: pattern by pattern, biases in int32 with a scale derived from input and weight."""
    from executorch.backends.cadence.aot.quantizer.quantizer import CadenceDefaultQuantizer

    return CadenceDefaultQuantizer()


def samsung() -> Any:
    """Samsung's Exynos: pools and concatenations share scales."""
    from executorch.backends.samsung.quantizer import EnnQuantizer

    return EnnQuantizer()


def coreml() -> Any:
    """Core ML: fake quantization, so it needs ``qat=True``."""
    from coremltools.optimize.torch.quantization.quantization_config import LinearQuantizerConfig
    from executorch.backends.apple.coreml.quantizer import CoreMLQuantizer

    settings = {
        "quantization_scheme": "symmetric",
        "activation_dtype": torch.quint8,
        "weight_dtype": torch.qint8,
        "weight_per_channel": True,
    }
    return CoreMLQuantizer(LinearQuantizerConfig.from_dict({"global_config": settings}))


STRANGERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "cadence": (cadence, False),
    "samsung": (samsung, False),
    "coreml": (coreml, True),
}
"""How to make each, and whether it is for quantization-aware training."""
