"""Quantizers that other people wrote, from the executorch package: each configured as its makers show."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule


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
    from executorch.backends.apple.coreml.quantizer import CoreMLQuantizer, _coreml_quantizer_utils

    _export_patterns_once(_coreml_quantizer_utils)
    settings = {
        "quantization_scheme": "symmetric",
        "activation_dtype": torch.quint8,
        "weight_dtype": torch.qint8,
        "weight_per_channel": True,
    }
    return CoreMLQuantizer(LinearQuantizerConfig.from_dict({"global_config": settings}))


@functools.cache
def _export_patterns_once(utils: ModuleType) -> None:
    """Core ML's quantizer exports hundreds of patterns at each ``annotate``, which takes minutes."""

    def once(pattern: Callable[..., GraphModule]) -> Callable[..., GraphModule]:
        exported = functools.cache(pattern)
        return lambda *args, **options: copy.deepcopy(exported(*args, **options))  # matching edits its pattern

    for name in ("conv", "conv_bn", "linear", "linear_bn", "binary_op_act"):
        function = f"get_{name}_pattern"
        setattr(utils, function, once(getattr(utils, function)))


STRANGERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "cadence": (cadence, False),
    "samsung": (samsung, False),
    "coreml": (coreml, True),
}
"""How to make each, and whether it is for quantization-aware training."""
