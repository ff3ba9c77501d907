"""What XNNPACK's kernels take, as data.

From ExecuTorch 1.4.1: ``backends/xnnpack/partition/config/gemm_configs.py`` and ``generic_node_configs.py``, and what
became of tiny lowered models that break a line (``tests/quantizers/test_backend_specs.py``). Activations of another
dtype are not lowered, nor convolutions in four bits, nor one scale for the weight where the input is dynamic. Weights
along another axis, affine convolutions with one scale, and moves with two scales give programs that do not load. Other
affine weights run with another zero point, and the output is wrong.
"""

from __future__ import annotations

from dataclasses import replace

from pt2qa.plugins import BackendSpec, OpSpec, TensorSpec

FLOAT = TensorSpec("float32")
INT8 = TensorSpec("int8", "affine", None, -128, 127)
"""The kernels clamp at these ends, whatever the quantize op says."""

DYNAMIC = replace(INT8, dynamic=True)
PER_TENSOR = TensorSpec("int8", "symmetric", None, -127, 127)
"""ExecuTorch's quantizer and LiteRT's specification leave -128 out."""

FUSABLE = ("hardtanh", "relu6")
"""Activations that a product's kernel applies, though ExecuTorch's quantizer rounds before them."""

_MOVES = (
    *("cat", "max_pool2d", "view", "reshape", "flatten", "unflatten", "slice", "unsqueeze"),
    *("permute", "transpose", "t", "movedim", "swapaxes"),
)
"""Ops whose kernels hand integers on."""


def _per_channel(ops: tuple[str, ...], axis: int) -> tuple[TensorSpec, ...]:
    """Weights with a scale for each output channel; those of a linear also in four bits."""
    whole = replace(PER_TENSOR, axis=axis)
    return (whole, replace(whole, quant_min=-8, quant_max=7)) if ops == ("linear",) else (whole,)


def _static(ops: tuple[str, ...], axis: int, fusable: tuple[str, ...]) -> OpSpec:
    return OpSpec(
        ops=ops,
        mode="static",
        input=(INT8,),
        weight=(*_per_channel(ops, axis), PER_TENSOR),
        bias=(FLOAT,),
        output=(INT8,),
        fused=("relu",),
        fusable=fusable,
    )


def _dynamic(ops: tuple[str, ...], axis: int) -> OpSpec:
    return OpSpec(ops=ops, mode="dynamic", input=(DYNAMIC,), weight=_per_channel(ops, axis), bias=(FLOAT,))


SPEC = BackendSpec(
    "XNNPACK",
    (
        _static(("conv1d",), 0, ()),
        _static(("conv2d",), 0, FUSABLE),
        _static(("linear",), 0, FUSABLE),
        _static(("conv_transpose1d",), 1, ()),
        _static(("conv_transpose2d",), 1, FUSABLE),
        _dynamic(("conv2d",), 0),
        _dynamic(("linear",), 0),
        _dynamic(("conv_transpose2d",), 1),
        OpSpec(ops=("conv3d", "conv_transpose3d"), input=(FLOAT,), weight=(FLOAT,)),
        OpSpec(ops=("add",), input=(INT8,), output=(INT8,), fused=("relu",)),
        OpSpec(
            ops=("sub", "mul", "relu", "hardtanh", "clamp", "mean", "adaptive_avg_pool2d"),
            input=(INT8,),
            output=(INT8,),
        ),
        OpSpec(ops=_MOVES, input=(INT8,), output=(INT8,), one_scale=True),
    ),
)
"""What :attr:`pt2qa_xnnpack.XNNPACK.spec` is."""
