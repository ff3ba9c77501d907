"""Why a kernel differs: its region is run again under hypotheses until one gives the deployed value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from pt2qa._decibels import agreement
from pt2qa._deployed.report import BY_DESIGN, FLOAT_MATCH_DB, LSB
from pt2qa._graph.handles import OpName, attribute_of, computed_from, name_of, op_of
from pt2qa._metrics import error_sums
from pt2qa._quantize.deployed import SLICES
from pt2qa._report.prose import counted, decibel
from pt2qa._simulator import quant_ops
from pt2qa._simulator.products import WEIGHTED
from pt2qa._simulator.slice_ops import choose_qparams_per_slice, dequantize_per_slice, quantize_per_slice

Instead = Mapping[Node, Callable[..., Any]]
"""What computes nodes in place of their own function."""


@dataclass(frozen=True, eq=False)
class Region:
    """The nodes of a converted graph from which one observed value is computed, on the deployed values of its inputs.

    Attributes:
        root: the graph.
        last: the node that was observed.
        given: by node, the deployed value.
        deployed: the deployed value of the last node.
        names: what reports call the ops, by handle.
    """

    root: GraphModule
    last: Node
    given: Mapping[Node, Any]
    deployed: Tensor
    names: Mapping[int, OpName]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """In graph order, with the last one."""
        needed = computed_from([self.last], self.given)
        return tuple(node for node in self.root.graph.nodes if node in needed)

    def run(self, instead: Instead | None = None) -> Any:
        values = dict(self.given)
        for node in self.nodes:
            if node.op == "get_attr":
                values[node] = self.constant(node)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                function: Any = (instead or {}).get(node, node.target)
                values[node] = function(*args, **kwargs)
        return values[self.last]

    def constant(self, node: Node) -> Any:
        """The value of a constant; None for what is computed."""
        return attribute_of(self.root, node)

    def named(self, node: Node) -> str:
        return name_of(node, self.names) or node.name

    def real(self, value: Tensor) -> Tensor:
        """A value of the last node, dequantized if it is integers."""
        if not quant_ops.is_static_per_tensor(self.last):
            return value.double()
        scale, zero_point = (float(number) for number in self.last.args[1:3])  # type: ignore[arg-type]
        return (value.double() - zero_point) * scale

    def gives(self, value: Tensor) -> bool:
        """Whether a value is the deployed one, as closely as a right kernel's."""
        same = isinstance(value, Tensor) and value.shape == self.deployed.shape
        return same and not apart(value, self.deployed)

    def called(self, *ops: str) -> Iterator[Node]:
        yield from (node for node in self.nodes if node.op == "call_function" and op_of(node.target) in ops)


def apart(expected: Tensor, found: Tensor) -> str:
    """How far a kernel's value is from the converted graph's, if further than a right kernel's; else empty."""
    if not expected.is_floating_point():
        steps = (expected.long() - found.long()).abs().max().item() if expected.numel() else 0
        return f"up to {counted(int(steps), 'integer step')}" if steps > LSB else ""
    sqnr = error_sums(expected, found).sqnr
    least = agreement(FLOAT_MATCH_DB, [str(expected.dtype).removeprefix("torch.")])
    return "" if sqnr >= least else f"{decibel(sqnr)} dB"


def cause_of(region: Region) -> str:
    """What makes the deployed value of a region; empty if no hypothesis does."""
    # A kernel with finer dynamic scales may have a fault beside them.
    for design, beside in [("", {}), *finer_slices(region)]:
        for hypothesis in HYPOTHESES:
            for told, instead in hypothesis(region):
                if not beside.keys().isdisjoint(instead):
                    continue  # both are about one node
                try:
                    found = region.run({**beside, **instead})
                except IndexError:
                    continue  # slices along an axis that the value does not have
                if region.gives(found):
                    return f"{told}, and {design}" if design else told
    return ""


# -- biases ------------------------------------------------------------------------------------------------------------

Supposed = Iterator[tuple[str, Instead]]


def _with_bias(node: Node, change: Callable[[Tensor], Tensor | None]) -> Instead:
    target: Any = node.target
    return {node: lambda x, weight, bias, *rest: target(x, weight, change(bias), *rest)}


def _biased(region: Region) -> Iterator[tuple[Node, Node]]:
    for node in region.called(*WEIGHTED):
        if len(node.args) > 2 and isinstance(node.args[2], Node):
            yield node, node.args[2]


def another_scale(region: Region) -> Supposed:
    """A bias that is held with the scale of another product that reads it."""
    for node, bias in _biased(region):
        own = _bias_scale(region, node)
        for reader in bias.users:
            other = _bias_scale(region, reader)
            if reader is node or own is None or other is None or other.shape not in (own.shape, ()):
                continue
            ratio = (own / other).to(torch.float32)
            if not torch.allclose(ratio, torch.ones(())):
                low, high = (f"{float(each):.3g}" for each in (ratio.min(), ratio.max()))
                times = low if low == high else f"{low} to {high}"
                told = f"its bias is held at {times} times its value: with the scale of {region.named(reader)}"
                yield told, _with_bias(node, partial(torch.mul, other=ratio))


def another_size(region: Region) -> Supposed:
    """A bias that is a multiple of its value: the factor that fits best, 0 for one that was lost."""
    for node, _ in _biased(region):
        whole, without = (region.real(region.run(_with_bias(node, part))) for part in (torch.clone, torch.zeros_like))
        deployed, part = region.real(region.deployed), whole - without
        inner = (deployed > deployed.min()) & (deployed < deployed.max()) & (without > without.min())
        inner &= without < without.max()
        factor = float((part * (deployed - without))[inner].sum() / (part**2)[inner].sum())
        if isfinite(factor) and abs(factor - 1) > 1e-3:
            told = f"its bias is held at {factor:.3g} times its value"
            yield told, _with_bias(node, partial(torch.mul, other=factor))


def beyond_32_bits(region: Region) -> Supposed:
    """A bias whose integers do not fit into 32 bits, and that comes out as the lowest one or wraps around."""
    for node, bias in _biased(region):
        scale = _bias_scale(region, node)
        value = region.constant(bias)
        if scale is None or value is None:
            continue
        steps = (value.double() / scale).round()
        beyond = (steps.abs() >= 2**31).sum()
        for limited in (
            torch.where(steps.abs() >= 2**31, -(2.0**31), steps),
            steps.clamp(-(2**31), 2**31 - 1),
            (steps + 2**31).remainder(2**32) - 2**31,
        ):
            told = f"its bias is beyond 32 bits in {int(beyond)} of {steps.numel()} channels"
            held = (limited * scale).to(value.dtype)
            if beyond:
                yield told, _with_bias(node, held.expand_as)


def _bias_scale(region: Region, node: Node) -> Tensor | None:
    """Scale of the input times that of the weight: one step of an integer bias; None for a product in float."""
    found = torch.ones((), dtype=torch.float64)
    for source in node.args[:2]:
        if not isinstance(source, Node) or not quant_ops.is_dequantize(source):
            return None
        scale = quant_ops.read_params(source, region.constant).scale
        if scale is None:
            return None
        found = found * torch.as_tensor(scale, dtype=torch.float64)
    return found


# -- limits and rounding -----------------------------------------------------------------------------------------------


def lost_limits(region: Region) -> Supposed:
    """An activation that clamps nothing."""
    for node in region.called("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"):
        yield f"the limits of {region.named(node)} are lost", {node: lambda x, *_, **__: x}


def wider_range(region: Region) -> Supposed:
    """Integers that are clamped to all of their type."""
    for node in region.nodes:
        if quant_ops.is_quantize(node) and quant_ops.is_static_per_tensor(node):
            low, high, dtype = node.args[3:6]
            limits, target = torch.iinfo(dtype), node.target  # type: ignore[arg-type]
            if (low, high) != (limits.min, limits.max):
                yield (
                    f"its integers are clamped to {limits.min}..{limits.max}, not to {low}..{high}",
                    {node: lambda x, scale, zero, *_, t=target, d=dtype, i=limits: t(x, scale, zero, i.min, i.max, d)},
                )


def other_rounding(region: Region) -> Supposed:
    """Integers that are cut off instead of rounded."""
    nodes: list[Any] = [
        node for node in region.nodes if op_of(node.target) in ("quantize_per_tensor", "quantize_per_slice")
    ]
    for way, cut in (("toward zero", torch.trunc), ("down", torch.floor)) if nodes else ():
        yield f"values are rounded {way}", {node: partial(_cut_off, cut, node.target) for node in nodes}


def _cut_off(cut: Any, target: Any, x: Tensor, scale: Any, *rest: Any) -> Any:
    return target((cut(x / scale) * scale).to(x.dtype), scale, *rest)


# -- dynamic scales, arithmetic, layout --------------------------------------------------------------------------------


def finer_slices(region: Region) -> Supposed:
    """A scale for each row, pixel or image of a dynamic input in place of one for the tensor."""
    pairs = [
        (node, node.args[0])
        for node in region.nodes
        if quant_ops.is_dequantize(node) and quant_ops.is_dynamic_per_tensor(node) and isinstance(node.args[0], Node)
    ]
    for axes, kind in SLICES.items() if pairs else ():
        told = f"its input has a scale for each {kind} ({BY_DESIGN})"
        yield told, {node: partial(_sliced, axes) for node, _ in pairs} | {q: lambda x, *_: x for _, q in pairs}


def _sliced(axes: Any, x: Tensor, scale: Any, zero: Any, low: int, high: int, dtype: Any, *_: Any) -> Any:
    given = (*choose_qparams_per_slice(x, axes, low, high), axes, low, high, dtype)
    return dequantize_per_slice(quantize_per_slice(x, *given), *given)


def fewer_digits(region: Region) -> Supposed:
    """Float arithmetic in 16 bits."""
    nodes = [node for node in region.nodes if node.op == "call_function" and not quant_ops.is_quantization(node)]
    for dtype in (torch.bfloat16, torch.float16):
        told = f"it is computed in {str(dtype).removeprefix('torch.')}"
        yield told, {node: partial(_shortened, dtype, node.target) for node in nodes}


def _shortened(short: torch.dtype, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    def shorter(value: Any) -> Any:
        return value.to(short).to(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return shorter(target(*map(shorter, args), **kwargs))


def sums_in_16_bits(region: Region) -> Supposed:
    """Sums of two neighbouring products that saturate at 16 bits, as on x86 without VNNI, which takes int8 plus 128."""
    for node in region.called("linear", "conv2d"):
        source, step = node.args[0], _bias_scale(region, node)
        if step is None or not isinstance(source, Node) or not quant_ops.is_static_per_tensor(source):
            continue
        numbers: Any = source.args[1:6]
        scale, zero_point, *_, dtype = numbers
        if dtype in (torch.uint8, torch.int8) and (len(node.args) < 7 or node.args[6] == 1):
            whole = partial(_saturated, scale=scale, zero_point=zero_point + 128 * (dtype is torch.int8), step=step)
            yield "sums of two of its products saturate at 16 bits", {node: whole}


def _saturated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    *_: int,
    scale: float,
    zero_point: int,
    step: Tensor,
) -> Tensor:
    """A linear or conv2d of integers, which float64 holds exactly; the channels of a pixel are neighbours."""
    rows = (x.double() / scale).round() + zero_point
    weights = (weight.double() / (step / scale).reshape(-1, *[1] * (weight.dim() - 1))).round()
    if weight.dim() == 2:
        rows, weights = rows.flatten(0, -2)[..., None, None], weights[..., None, None]
    rows = F.pad(rows, [size for size in reversed(padding) for _ in range(2)], value=zero_point)
    (height, width), last = rows.shape[2:], [size - 1 for size in weights.shape[2:]]
    sums = -zero_point * weights.sum((1, 2, 3)).reshape(-1, 1, 1)
    for channel, i, j in product(range(0, rows.shape[1], 2), *map(range, weights.shape[2:])):
        own = slice(channel, channel + 2)
        down, right = ((at * d, (end - at) * d) for at, end, d in zip((i, j), last, dilation, strict=True))
        read = rows[:, own, down[0] : height - down[1], right[0] : width - right[1]]
        sums = sums + F.conv2d(read, weights[:, own, i, j, None, None], stride=stride).clamp(-(2**15), 2**15 - 1)
    found = (sums * step.reshape(-1, 1, 1)).to(x.dtype)
    found = found if bias is None else found + bias.reshape(-1, 1, 1)
    return found if weight.dim() == 4 else found.reshape(*x.shape[:-1], -1)


def padded_with_integer_zero(region: Region) -> Supposed:
    """A convolution whose padding is the integer 0, not the zero point."""
    for node in region.called("conv1d", "conv2d"):
        source = node.args[0]
        if not isinstance(source, Node) or not quant_ops.is_dequantize(source) or len(node.args) < 5:
            continue
        scale, zero = source.args[1:3]
        sides: Sequence[Any] = node.args[4]  # type: ignore[assignment]
        if not isinstance(zero, int) or zero == 0 or not any(sides):
            continue
        around = [size for size in reversed(sides) for _ in range(2)]
        fill: Any = -zero * scale  # type: ignore[operator]  # numbers
        yield "its padding is the integer 0, not the zero point", {node: partial(_padded, node.target, around, fill)}


def _padded(
    target: Any, around: Any, fill: Any, x: Any, weight: Any, bias: Any, stride: Any, pads: Any, *rest: Any
) -> Any:
    return target(F.pad(x, around, value=fill), weight, bias, stride, [0] * len(pads), *rest)


def padding_in_means(region: Region) -> Supposed:
    """An average pooling that counts its padding, or does not."""
    for node in region.called("avg_pool1d", "avg_pool2d", "avg_pool3d"):
        given: list[Any] = [*node.args[1:], *([], [0], False, True)[len(node.args) - 2 :]]
        counts = given[4] = not given[4]
        told = f"its padding is {'counted' if counts else 'not counted'} in its means"
        if any(given[2]):
            yield told, {node: lambda x, *_, target=node.target, given=given: target(x, *given)}


def other_weights(region: Region) -> Supposed:
    """Weights as they lie in memory before a transpose, or those of another op."""
    for node in region.called(*WEIGHTED):
        told = "its weight is read in another order of memory"
        yield told, {node: lambda x, w, *rest, f=node.target: f(x, w.transpose(0, 1).reshape(w.shape), *rest)}
        for other in node.graph.find_nodes(op="call_function", target=node.target):
            weights: Any = node.args[1], other.args[1]
            own, its = (Region(region.root, each, {}, region.deployed, {}) for each in weights)
            if own.last is its.last or any(each.op == "placeholder" for each in (*own.nodes, *its.nodes)):
                continue
            weight = its.run()
            if weight.shape == own.run().shape:
                told = f"it has the weights of {region.named(other)}"
                yield told, {node: lambda x, _, *rest, f=node.target, w=weight: f(x, w, *rest)}


def exact_sums(region: Region) -> Supposed:
    """Sums in another order, or of more digits, where float32 shows that: then they are nearer to those of float64."""
    nodes = [node for node in region.nodes if node.op == "call_function" and not quant_ops.is_quantization(node)]
    told = "its sums are exact, and the converted graph's, in another order, are not"
    yield told, {node: partial(_widened, node.target) for node in nodes}


def _widened(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    def wider(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    found = target(*map(wider, args), **kwargs)
    return found.float() if isinstance(found, Tensor) and found.dtype == torch.float64 else found


def other_layout(region: Region) -> Supposed:
    """An image that is returned or read with its channels last, as if they were first."""
    last: Any = region.last
    if region.deployed.dim() == 4:
        whole = partial(_turned, last.target, returned=True)
        yield "it is returned with the channels last, as if they were first", {last: whole}
    for node in region.nodes:
        images = [at for at, each in enumerate(node.args) if each in region.given and region.given[each].dim() == 4]  # type: ignore[index]
        if images and node.op == "call_function":
            told = "it reads an image with the channels last, as if they were first"
            yield told, {node: partial(_turned, node.target, images=images)}


def _turned(target: Any, *args: Any, images: Sequence[int] = (), returned: bool = False, **kwargs: Any) -> Any:
    def turn(value: Tensor) -> Tensor:
        return value.permute(0, 2, 3, 1).reshape(value.shape)

    found = target(*(turn(each) if at in images else each for at, each in enumerate(args)), **kwargs)
    return turn(found) if returned else found


HYPOTHESES: Final[tuple[Callable[[Region], Supposed], ...]] = (
    another_scale,
    beyond_32_bits,
    lost_limits,
    wider_range,
    finer_slices,
    other_layout,
    sums_in_16_bits,
    padded_with_integer_zero,
    padding_in_means,
    other_weights,
    exact_sums,
    fewer_digits,
    other_rounding,
    another_size,
)
"""In this order; the first that gives the deployed value is the cause."""
