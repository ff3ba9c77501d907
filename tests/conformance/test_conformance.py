"""Quantizers that others wrote, looked at property by property; every expected failure is a fault that was found.

What each fault is, and where in the quantizer's source, is in docs/test_your_quantizer.md.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from pt2qa.testing import MODELS, QuantizerConformance
from tests.overrides.strangers import cadence, coreml, samsung

CLASS_NAMES = "torchao matches modules by exact class where torch.export ran with strict=False"
ONE_PARTITION = "with strict=False torchao puts both calls of one module into one partition"
PRIORITY = "SUPPORTED_PATTERNS is a list of priorities"


class TestX86(QuantizerConformance):
    xfail: ClassVar = {
        **{("spelling", model): CLASS_NAMES for model in ("conv_bn_relu", "conv_relu", "conv_bn")},
        **{("spelling", model): CLASS_NAMES for model in ("linear", "linear_relu")},
        ("spelling", "mul"): "mul.Tensor is looked for, mul_.Tensor is not",
        ("strict", "shared_relu"): ONE_PARTITION,
        ("strict", "shared_conv"): ONE_PARTITION,
    }

    def make_quantizer(self) -> Any:
        return "x86"


class TestXNNPACK(QuantizerConformance):
    xfail: ClassVar = {
        ("float_tensors", "integers"): "_annotate_cat does not ask for the dtype",
        ("calibrated", "integers"): "_annotate_cat does not ask for the dtype, and histograms take no integers",
        ("spelling", "conv_relu6"): "hardtanh passes the scale on, relu6 and clamp do not",
        ("order", "linear_relu"): PRIORITY,
        ("order", "residual_add_relu"): PRIORITY,
        ("order", "avg_pool"): PRIORITY,
    }

    def make_quantizer(self) -> Any:
        return "xnnpack"


class TestArmInductor(QuantizerConformance):
    xfail: ClassVar = {
        **{("spelling", model): CLASS_NAMES for model in ("conv_bn_relu", "conv_relu", "conv_bn")},
        **{("spelling", model): CLASS_NAMES for model in ("linear", "linear_relu")},
        ("strict", "shared_conv"): ONE_PARTITION,
    }

    def make_quantizer(self) -> Any:
        from torchao.quantization.pt2e.quantizer import arm_inductor_quantizer as arm

        return arm.ArmInductorQuantizer().set_global(arm.get_default_arm_inductor_quantization_config())


class TestVulkan(QuantizerConformance):
    def make_quantizer(self) -> Any:
        from executorch.backends.vulkan.quantizer import vulkan_quantizer as vulkan

        return vulkan.VulkanQuantizer().set_global(vulkan.get_symmetric_quantization_config(is_dynamic=False))


class TestCadence(QuantizerConformance):
    xfail: ClassVar = {
        ("strict", model): "it reads source_fn_stack, which strict=True alone writes"
        for model in MODELS
        if model != "lstm_decomposed"
    }

    def make_quantizer(self) -> Any:
        return cadence()


class TestSamsung(QuantizerConformance):
    xfail: ClassVar = {
        ("prepare", "add_self"): "the second input of x + x shares with the first, which is itself",
        ("shared_specs", "add_self"): "the second input of x + x shares with the first, which is itself",
        ("shared_specs", "multihead_attention"): "a walk back for a scale goes past the op before",
        ("float_tensors", "lstm_decomposed"): "the output of unbind is a list",
        ("spelling", "conv_relu6"): "relu6 and hardtanh are fused, clamp is not",
        (
            "sqnr",
            "sigmoid",
        ): "the output scale of sigmoid is for 0..255, its zero point too, but the range is -128..127",
        ("sqnr", "lstm_decomposed"): "the output scale of sigmoid is for 0..255, but the range is -128..127",
    }

    def make_quantizer(self) -> Any:
        return samsung()


@pytest.mark.zoo  # it exports hundreds of patterns before the first test, which takes minutes
class TestCoreML(QuantizerConformance):
    qat = True
    models: ClassVar = (
        *("conv_bn_relu", "conv_relu6", "conv1d", "linear", "sigmoid", "residual_add", "cat", "mul", "add_self"),
        *("two_users", "shared_relu", "shared_conv", "tied_weights", "max_pool", "avg_pool", "attention"),
        *("multihead_attention", "lstm", "embedding", "integers", "buffer", "literal"),
    )
    properties: ClassVar = (
        *("prepare", "calibrated", "convert", "simulator", "pairing", "shared_specs", "float_tensors", "sqnr"),
    )

    def make_quantizer(self) -> Any:
        return coreml()
