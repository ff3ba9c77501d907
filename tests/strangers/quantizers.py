"""The quantizers, each configured as its makers show; what one imports is imported when it is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.conformance.outcomes import arm, vulkan
from tests.overrides.strangers import coreml, samsung


@dataclass(frozen=True)
class Stranger:
    """A quantizer, and the packages beyond torchao and executorch that it imports.

    Attributes:
        package: whose quantizer it is.
        make: makes a new one.
        needs: modules without which it cannot be imported.
        qat: whether it is for quantization-aware training.
        fold: ``fold_quantize`` of ``convert_pt2e``, as its makers call it.
    """

    package: str
    make: Callable[[], Any]
    needs: tuple[str, ...] = ()
    qat: bool = False
    fold: bool = True


def inductor(name: str, *, dynamic: bool = False) -> Any:
    """One of torchao's quantizers for Inductor."""
    module = importlib.import_module(f"torchao.quantization.pt2e.quantizer.{name}_inductor_quantizer")
    config = getattr(module, f"get_default_{name}_inductor_quantization_config")
    made = {"x86": "X86InductorQuantizer", "xpu": "XPUInductorQuantizer"}[name]
    return getattr(module, made)().set_global(config(is_dynamic=True) if dynamic else config())


def embedding() -> Any:
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

    return EmbeddingQuantizer()


def xnnpack(*, dynamic: bool = False) -> Any:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer

    config = xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
    return xnnpack_quantizer.XNNPACKQuantizer().set_global(config)


def cadence(name: str) -> Any:
    return getattr(importlib.import_module("executorch.backends.cadence.aot.quantizer.quantizer"), name)()


def vulkan_dynamic() -> Any:
    from executorch.backends.vulkan.quantizer import vulkan_quantizer

    config = vulkan_quantizer.get_symmetric_quantization_config(is_dynamic=True)
    return vulkan_quantizer.VulkanQuantizer().set_global(config)


def example() -> Any:
    from executorch.backends.example.example_quantizer import ExampleQuantizer

    return ExampleQuantizer()


def tosa(*, wide: bool = False) -> Any:
    from executorch.backends.arm.quantizer import (
        TOSAQuantizer,
        get_symmetric_a16w8_quantization_config,
        get_symmetric_quantization_config,
    )
    from executorch.backends.arm.tosa import TosaSpecification

    made = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT+int16" if wide else "TOSA-1.0+INT"))
    return made.set_global(get_symmetric_a16w8_quantization_config() if wide else get_symmetric_quantization_config())


def ethos_u() -> Any:
    from executorch.backends.arm.ethosu import EthosUCompileSpec
    from executorch.backends.arm.quantizer import EthosUQuantizer, get_symmetric_quantization_config

    return EthosUQuantizer(EthosUCompileSpec("ethos-u55-128")).set_global(get_symmetric_quantization_config())


def vgf() -> Any:
    from executorch.backends.arm.quantizer import VgfQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.vgf import VgfCompileSpec

    return VgfQuantizer(VgfCompileSpec("TOSA-1.0+INT")).set_global(get_symmetric_quantization_config())


def cortex_m() -> Any:
    # The package imports in a circle, unless its passes come first.
    importlib.import_module("executorch.backends.cortex_m.passes")
    from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer

    return CortexMQuantizer()


def openvino(mode: str) -> Any:
    from executorch.backends.openvino.quantizer import OpenVINOQuantizer, QuantizationMode

    return OpenVINOQuantizer(mode=QuantizationMode[mode])


_TOSA = ("tosa_serializer", "ml_dtypes")
_CADENCE = (
    *("Default", "Nop", "RmsNormNop", "WithLayerNorm", "WakeWord", "FusedConvRelu", "W8A32Mixed", "WithSoftmax"),
    *("With16BitLinearActivations", "With16BitConvActivations", "With16BitMatmulActivations"),
)

STRANGERS: dict[str, Stranger] = {
    # It annotates for seconds, so it comes first.
    "Core ML": Stranger("executorch", coreml, ("coremltools",), qat=True),
    "x86": Stranger("torchao", partial(inductor, "x86")),
    "x86, dynamic": Stranger("torchao", partial(inductor, "x86", dynamic=True)),
    "Arm Inductor": Stranger("torchao", arm),
    "XPU": Stranger("torchao", partial(inductor, "xpu")),
    "Embedding": Stranger("torchao", embedding),
    "XNNPACK": Stranger("executorch", xnnpack),
    "XNNPACK, dynamic": Stranger("executorch", partial(xnnpack, dynamic=True)),
    **{f"Cadence, {n}": Stranger("executorch", partial(cadence, f"Cadence{n}Quantizer")) for n in _CADENCE},
    "Samsung": Stranger("executorch", samsung),
    "Vulkan": Stranger("executorch", vulkan),
    "Vulkan, dynamic": Stranger("executorch", vulkan_dynamic),
    "Example": Stranger("executorch", example),
    "TOSA": Stranger("executorch", tosa, _TOSA),
    "TOSA, 16 bits": Stranger("executorch", partial(tosa, wide=True), _TOSA),
    "Ethos-U": Stranger("executorch", ethos_u, (*_TOSA, "ethosu")),
    "VGF": Stranger("executorch", vgf, _TOSA),
    "Cortex-M": Stranger("executorch", cortex_m, _TOSA),
    "OpenVINO": Stranger("executorch", partial(openvino, "INT8_SYM"), ("nncf", "openvino"), fold=False),
    "OpenVINO, mixed": Stranger("executorch", partial(openvino, "INT8_MIXED"), ("nncf", "openvino"), fold=False),
}
"""By the name in the table."""
