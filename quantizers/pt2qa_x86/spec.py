"""What the x86 kernels take, as data.

From torchao 0.18's ``quantization/pt2e/inductor_passes/x86.py``, and what became of tiny lowered models that break a
line (``tests/quantizers/test_backend_specs.py``): weights with one scale for the tensor stay in float; those along
another axis, or affine, run as if they were not, and the output is wrong; a convolution of int8 fails.
"""

from __future__ import annotations

from dataclasses import replace

from pt2qa.plugins import BackendSpec, OpSpec, TensorSpec

FLOAT = TensorSpec("float32")
UINT8 = tuple(TensorSpec("uint8", "affine", None, 0, high) for high in (255, 127))
"""127 is for CPUs without VNNI."""

INT8 = TensorSpec("int8", "affine", None, -128, 127)
WEIGHTS = tuple(TensorSpec("int8", "symmetric", 0, low, 127) for low in (-128, -127))
SPEC = BackendSpec(
    "x86",
    (
        OpSpec(
            ops=("conv1d", "conv2d"),
            input=UINT8,
            weight=WEIGHTS,
            bias=(FLOAT,),
            output=UINT8,
            fused=("relu", "hardtanh", "hardswish", "silu"),
        ),
        OpSpec(
            ops=("linear",),
            mode="static",
            input=(*UINT8, INT8),
            weight=WEIGHTS,
            bias=(FLOAT,),
            output=(*UINT8, INT8),
            fused=("relu", "gelu"),
        ),
        OpSpec(
            ops=("linear",),
            mode="dynamic",
            input=tuple(replace(each, dynamic=True) for each in UINT8),
            weight=WEIGHTS,
            bias=(FLOAT,),
        ),
        OpSpec(ops=("linear",), mode="weight only", input=(FLOAT,), weight=(TensorSpec("float16"),), bias=(FLOAT,)),
        OpSpec(ops=("conv_transpose1d", "conv_transpose2d", "conv3d"), input=(FLOAT,), weight=(FLOAT,)),
        OpSpec(ops=("matmul", "mul", "avg_pool2d", "adaptive_avg_pool2d"), input=UINT8, output=UINT8),
        # Only then are the integers handed on; with two scales the op is computed in float.
        OpSpec(ops=("cat", "max_pool2d", "flatten"), input=UINT8, output=UINT8, one_scale=True),
    ),
)
"""What :attr:`pt2qa_x86.X86.spec` is."""
