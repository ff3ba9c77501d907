"""What a backend's kernels take, as data: dtypes, schemes, channel axes, ranges, shared scales, fused activations.

The vocabulary is that of LiteRT's 8-bit quantization specification and of the configurations of ExecuTorch's
partitioners.  An author states it once; the check and the conformance kit compare annotations with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["input", "weight", "bias", "output", "scales", "fused", "fusable"]
"""What a line of a spec is about."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How a kernel takes one tensor.

    Attributes:
        dtype: as torch calls it; ``float32`` if the kernel takes it unrounded.
        scheme: ``symmetric``: the zero point is 0, or the middle of the range; ``affine``: any, so symmetric too. Of a
            float dtype, it says nothing.
        axis: the axis along which scales differ; None if the tensor has one.
        quant_min, quant_max: the integers at the ends of the range; None where the dtype is a float.
        dynamic: whether the scale is computed from each input.

    >>> str(TensorSpec("int8", "symmetric", 0, -127, 127))
    'int8, per channel (axis 0), symmetric, -127..127'
    """

    dtype: str
    scheme: Literal["symmetric", "affine"] = "affine"
    axis: int | None = None
    quant_min: int | None = None
    quant_max: int | None = None
    dynamic: bool = False

    def __str__(self) -> str:
        return ", ".join(self.words)

    @property
    def words(self) -> tuple[str, ...]:
        """What it says, word by word."""
        if self.quant_min is None:
            return (self.dtype,)
        scales = "per tensor" if self.axis is None else f"per channel (axis {self.axis})"
        words = (self.dtype, scales, self.scheme, f"{self.quant_min}..{self.quant_max}")
        return (*words, "dynamic") if self.dynamic else words

    def differing(self, asked: TensorSpec) -> tuple[str, ...]:
        """In what an annotation differs from what the kernel takes: ``dtype``, ``scheme``, ``axis``, ``range``, ...

        A kernel with affine scales takes symmetric ones.
        """
        fits = {
            "dtype": self.dtype == asked.dtype,
            "scheme": self.scheme in ("affine", asked.scheme),
            "axis": self.axis == asked.axis,
            "range": (self.quant_min, self.quant_max) == (asked.quant_min, asked.quant_max),
            "dynamic": self.dynamic == asked.dynamic,
        }
        if not fits["dtype"] and None in (self.quant_min, asked.quant_min):
            return ("dtype",)  # a float has nothing else
        return tuple(name for name, same in fits.items() if not same)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """What one kind of kernel takes: a row of the backend's table.

    Each of the four tensors is a tuple of what it may be; empty if the spec says nothing of it. A tensor that stays in
    float fits every line.

    Attributes:
        ops: the op types that have this kernel, as pt2qa names them: ``("conv1d", "conv2d")``.
        mode: which of an op's kernels it is, if there are several: ``dynamic``. An annotation fits if one takes it.
        input: what is computed with, other than the weight.
        weight: the second operand of a convolution or linear.
        bias: the third.
        output: what the op gives, after an activation that is fused.
        one_scale: whether all inputs and the output have one scale and zero point.
        fused: activations that the kernel applies to its output: nothing is rounded before them.
        fusable: ditto, but the quantizer may round before them, and the kernel then takes the op alone.
    """

    ops: tuple[str, ...]
    mode: str = ""
    input: tuple[TensorSpec, ...] = ()
    weight: tuple[TensorSpec, ...] = ()
    bias: tuple[TensorSpec, ...] = ()
    output: tuple[TensorSpec, ...] = ()
    one_scale: bool = False
    fused: tuple[str, ...] = ()
    fusable: tuple[str, ...] = ()

    def line(self, op: str, part: Part) -> SpecLine | None:
        """What the spec says of a part of an op; None if nothing."""
        if part == "scales":
            return SpecLine(op, self.mode, part) if self.one_scale else None
        said = getattr(self, part)
        if not said:
            return None
        named = part in ("fused", "fusable")
        return SpecLine(op, self.mode, part, () if named else said, said if named else ())


@dataclass(frozen=True, slots=True)
class SpecLine:
    """One line of a spec, as findings quote it.

    Attributes:
        op: the op type.
        mode: of the row; empty if the op has one.
        part: what it is about.
        takes: what the tensor may be.
        fused: the activations that are fused, or can be.

    >>> str(SpecLine("conv2d", "", "weight", (TensorSpec("int8", "symmetric", 0, -127, 127),)))
    'conv2d: weight int8, per channel (axis 0), symmetric, -127..127'
    """

    op: str
    mode: str
    part: Part
    takes: tuple[TensorSpec, ...] = ()
    fused: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.op} ({self.mode})" if self.mode else self.op
        if self.part == "scales":
            return f"{what}: one scale for all inputs and the output"
        if self.part in ("fused", "fusable"):
            return (
                f"{what}: {'' if self.part == 'fused' else 'can be '}fused with the {' or '.join(self.fused)} after it"
            )
        return f"{what}: {self.part} {_alternatives(self.takes)}"


def _alternatives(takes: tuple[TensorSpec, ...]) -> str:
    """What a tensor may be, each word once if all combinations of them are meant: ``uint8, ..., 0..255 or 0..127``."""
    lengths = {len(spec.words) for spec in takes}
    words = [tuple(dict.fromkeys(each)) for each in zip(*(spec.words for spec in takes), strict=False)]
    if len(lengths) == 1 and math.prod(map(len, words)) == len(takes):
        return ", ".join(" or ".join(each) for each in words)
    return "; or ".join(map(str, takes))


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend takes; ``print`` shows it line by line.

    Attributes:
        name: the backend, as findings call it.
        ops: its kernels. Of an op that is in none, the spec says nothing.

    >>> weight = TensorSpec("int8", "symmetric", 0, -127, 127)
    >>> spec = BackendSpec("npu", (OpSpec(ops=("conv2d",), weight=(weight,)), OpSpec(ops=("cat",), one_scale=True)))
    >>> print(spec)
    conv2d: weight int8, per channel (axis 0), symmetric, -127..127
    cat: one scale for all inputs and the output
    """

    name: str
    ops: tuple[OpSpec, ...]

    def rows(self, op: str) -> tuple[OpSpec, ...]:
        """The kernels that an op type has."""
        return tuple(row for row in self.ops if op in row.ops)

    @property
    def lines(self) -> tuple[SpecLine, ...]:
        """All that it says, op by op."""
        every = [row.line(op, part) for row in self.ops for op in row.ops for part in get_args(Part)]
        return tuple(line for line in every if line is not None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))
