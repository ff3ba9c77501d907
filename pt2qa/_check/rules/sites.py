"""What the numbers say: values that are clamped, ranges that do not fit, repeated rounding, channels and biases."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pt2qa._check.context import CheckContext, require
from pt2qa._check.products import FEW_CHANNELS, IntegerProduct
from pt2qa._check.rules.specs import VALUE_PRESERVING, mixed_parameters
from pt2qa._decibels import LOW_SQNR
from pt2qa._layers.rows import LayerRow
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import decibel, number, share
from pt2qa._simulator import quant_ops
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.plugins import Found
from pt2qa.plugins.registry import of_backend
from pt2qa.plugins.rules import Severity, rule

VISIBLE_NOISE = 30.0
"""dB of rounding alone below which a site is worth a look: the noise has more than 0.1 % of the signal's power.

8 bits give a value that is spread evenly over the range 50 dB, and what convolutions and activations make of pictures
about 40; each site of a healthy MNIST CNN, ResNet-18, speech encoder and x86 EfficientNet-Lite0 stays above 34.
"""

DB_PER_BIT = 20 * math.log10(2)
"""6.02 dB: what one bit more or less does to rounding noise."""


def site_rows(context: CheckContext) -> tuple[LayerRow, ...]:
    """The rows of static sites with one scale, except for ops that pass on another row's values."""
    found: dict[tuple[float, ...], LayerRow] = {}
    for row in context.layers.rows:
        if row.observed_at == "dq" and row.scale > 0 and not math.isnan(row.zero_point):
            key = (row.scale, row.zero_point, row.ref_min, row.ref_max, row.rounding_sqnr)
            found.setdefault(key if not any(map(math.isnan, key)) else (*key, row.handle), row)
    return tuple(found.values())


def given_rows(context: CheckContext) -> tuple[LayerRow, ...]:
    """The rows of :func:`site_rows`; none if no data was given, or it could not be run."""
    return () if context.known("layers") is None else site_rows(context)


def clamp_cost(row: LayerRow) -> float:
    """How far the noise of rounding and clamping exceeds that of rounding alone, ``scale**2 / 12``, in dB.

    A row holds ratios: the signal's mean square is ``mse * 10**(sqnr / 10)``, from the cumulative error.
    """
    signal = row.mse * 10 ** (row.sqnr / 10)
    noise = signal / 10 ** (row.rounding_sqnr / 10)
    return 10 * math.log10(12 * noise / row.scale**2) if 0 < noise < math.inf else math.nan


@rule(
    severity="warning",
    title="values beyond the range that calibration chose",
    why="Values outside the range are clamped to its ends. Listed if the noise of that exceeds that of rounding by "
    f"more than a bit (6 dB), and the two leave less than {VISIBLE_NOISE:.0f} dB.",
    fix="if calibration did not see such values, calibrate on data like this; if it did, its observer cut them off, "
    'and one that keeps them makes the steps coarser: pt2qa.Edit("observer", (name,), observer="minmax")',
    needs=("pair", "layers"),
)
def saturation(context: CheckContext) -> Iterator[Found]:
    for row in site_rows(context):
        cost = clamp_cost(row)
        if row.saturation > 0 and cost > DB_PER_BIT and row.rounding_sqnr < VISIBLE_NOISE:
            beyond = f"{row.ref_min:.3g}..{row.ref_max:.3g}, up to {number(row.excess_lsb)} steps beyond its range"
            why = f"{share(row.saturation)} % of its values are clamped ({beyond}), which takes it from "
            why += f"{decibel(row.rounding_sqnr + cost)} to {decibel(row.rounding_sqnr)} dB"
            yield Found(row.name, why, value=cost)


@rule(
    severity="warning",
    title="ranges set by a few outliers",
    why="The range fits the data, but most values are so much smaller than the largest that they get few integers. "
    f"Listed below {LOW_SQNR:.0f} dB, where the noise of rounding has more than 1 % of the signal's power.",
    fix='keep the ops that read it in float or give them more bits (pt2qa.Edit("float", (name,)), "int16" if the '
    "backend has it), or remove the outliers in the model before it is trained",
    needs=("pair", "layers"),
)
def range_outliers(context: CheckContext) -> Iterator[Found]:
    for row in site_rows(context):
        if row.range_use >= LEAST_RANGE_USE and row.rounding_sqnr < LOW_SQNR and not clamp_cost(row) > DB_PER_BIT:
            # Rounding alone: signal / (scale**2 / 12) is the ratio in dB.
            steps = (10 ** (row.rounding_sqnr / 10) / 12) ** 0.5
            why = f"the data spans {share(row.range_use)} % of its range, and its root mean square is {steps:.1f} steps"
            yield Found(row.name, f"{why}: rounding leaves {decibel(row.rounding_sqnr)} dB", value=-row.rounding_sqnr)


LEAST_RANGE_USE = 0.45
"""Share of the range below which more than one bit is lost: one-sided values under a symmetric scale use 127/255."""


@rule(
    severity="warning",
    title="ranges that are too wide for the data",
    why="Integers that no value uses are lost: half of the range costs a bit, 6 dB. Listed if more than one is lost "
    f"and rounding leaves less than {VISIBLE_NOISE:.0f} dB.",
    fix="look for what made the range wide: an outlier in the calibration data, a scale shared with the input of the "
    "op, or an activation that is rounded before its ReLU6 instead of after it",
    needs=("pair", "layers"),
)
def unused_range(context: CheckContext) -> Iterator[Found]:
    for row in site_rows(context):
        if 0 < row.range_use < LEAST_RANGE_USE and row.rounding_sqnr < VISIBLE_NOISE:
            bits = -math.log2(row.range_use)
            why = f"the data spans {share(row.range_use)} % of its range, which costs {bits:.1f} bits"
            yield Found(row.name, f"{why} and leaves {decibel(row.rounding_sqnr)} dB", value=bits)


@rule(
    severity="warning",
    title="values rounded twice with different parameters",
    why="Two observers chose two scales for one value: the second rounding adds error and costs a kernel, and kernels "
    "that only move data refuse different parameters (executorch#19836, executorch#22238).",
    fix="share one observer between the two: a SharedQuantizationSpec in the quantizer, or no annotation of the op "
    "between",
    needs=("pair",),
)
def requantize_mismatch(context: CheckContext) -> Iterator[Found]:
    pair = context.pair
    yield from _dequantized_otherwise(context)
    annotations = context.known("annotations")
    # The rules mixed-parameters and backend-spec report these if the annotation is known.
    told = {found.name for found in mixed_parameters.find(context)} if annotations and annotations.edges else set()
    told |= context.unshared
    static = [site for site in pair.sites if site.kind == "activation" and isinstance(site.params.scale, float)]
    require(static, "to models without scales from calibration")
    for site in static:
        if site.name in told:
            continue
        for before, through in _rounded_before(pair, site.source):
            if names := _differing(before.params, site.params):
                what = f"is rounded before {through[0]} and again{_after(through)}" if through else "is rounded twice"
                ratio = site.params.largest_scale / before.params.largest_scale
                how = ", ".join(f"{name} {_of(before, name)} then {_of(site, name)}" for name in names)
                severity: Severity | None = "note" if _is_moved(pair, site) else None
                yield Found(site.name, f"{what}: {how}", severity, value=abs(math.log2(ratio)))


def _is_moved(pair: QuantizedPair, site: Site) -> bool:
    """Whether an op that moves the value reads it alone, and rounds its output alike, as its kernel needs."""
    readers = pair.program.readers().get(site.result, ())
    after = [other for other in pair.sites if other.source in {step.out for step in readers}]
    alike = bool(after) and not any(_differing(site.params, other.params) for other in after)
    return alike and len(readers) == 1 and readers[0].op in VALUE_PRESERVING


def _differing(one: QuantParams, other: QuantParams) -> tuple[str, ...]:
    names = ("dtype", "quant_min", "quant_max", "axis", "scale", "zero_point")
    return tuple(name for name in names if not _equal(getattr(one, name), getattr(other, name)))


def _equal(one: object, other: object) -> bool:
    kinds = (torch.Tensor, float)
    if one is None or other is None or not (isinstance(one, kinds) or isinstance(other, kinds)):
        return one == other
    left, right = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    # float32 has seven digits.
    return left.shape == right.shape and bool(torch.allclose(left, right, rtol=1e-6, atol=0))


def _rounded_before(pair: QuantizedPair, slot: int) -> Iterator[tuple[Site, tuple[str, ...]]]:
    """The sites whose values reach a slot unchanged, with the ops that passed them on."""
    producer = pair.program.producers.get(slot)
    if producer is None:
        return
    step = pair.program.steps[producer]
    if step.site is not None:
        yield pair.sites[step.site], ()
    elif step.op in VALUE_PRESERVING or step.op == "getitem":
        for source in step.reads:
            for site, through in _rounded_before(pair, source):
                yield site, (*through, step.op) if step.op != "getitem" else through


def _after(through: tuple[str, ...]) -> str:
    return " after it" if len(through) == 1 else f" after {through[-1]}, and no op between changes it"


def _dequantized_otherwise(context: CheckContext) -> Iterator[Found]:
    graph_module = context.pair.quantized
    for node in graph_module.graph.nodes:
        source = node.args[0] if node.args else None
        if not quant_ops.is_dequantize(node) or not isinstance(source, torch.fx.Node):
            continue
        if not quant_ops.is_quantize(source) or not quant_ops.is_static_per_tensor(source):
            continue
        before, after = (quant_ops.read_params(one, lambda constant: None) for one in (source, node))
        if names := _differing(before, after):
            made = source.args[0]
            name = context.name_of(made) if isinstance(made, torch.fx.Node) else ""
            how = ", ".join(f"{name} {getattr(before, name)} and {getattr(after, name)}" for name in names)
            fix = "a pass changed one of the two in the converted graph; apply it to both or to neither"
            yield Found(name, f"is quantized and dequantized with different parameters: {how}", "error", fix)


def _of(site: Site, attribute: str) -> str:
    value = getattr(site.params, attribute)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_ONE_SCALE_FIX = (
    "give each channel its own scale if the backend supports per-channel weights; if not, equalise the ranges of the "
    "channels across layers before capture (Nagel et al. 2019, Data-free quantization through weight equalization and "
    "bias correction)"
)


@rule(
    severity="warning",
    title="channels whose weights become zero",
    why="With one scale for the whole weight, a channel with much smaller values than the largest channel rounds to "
    "zero: its output is its bias, whatever the input, while the weight's SQNR stays high.",
    fix=_ONE_SCALE_FIX,
    needs=("pair",),
)
def dead_channel(context: CheckContext) -> Iterator[Found]:
    """Unless they are too small to change the rounded output in float, too."""
    rows = require([row for row in context.weights if row.quantized], "to models without quantized weights")
    products = {(product.name, "weight"): product for product in context.integer_products}
    for row in rows:
        product = products.get((row.name, row.attr))
        if not row.dead_channels:
            continue
        dead, scale, channels = row.dead_channels, row.scale, row.shape[max(row.axis, 0)]
        if product is not None:
            zero = product.zero & (product.largest > 0) & product.visible
            if not bool(zero.any()):
                continue
            dead, scale, channels = int(zero.sum()), float(product.scales[zero].max()), len(zero)
        why = f"{dead} of {channels} channels of its {row.attr} are zero: none of their values reaches half a step"
        own = "the scale is the smallest that the weight observer gives: give it a smaller eps, or scale the layer up"
        fix = _ONE_SCALE_FIX if row.axis < 0 else own
        yield Found(row.name, f"{why} of {scale:.3g}", fix=fix, value=dead / channels)


RATIO = 16.0
"""A channel with a sixteenth of the weight's range has 16 of its 256 integers: four bits of eight."""


@rule(
    severity="warning",
    title="channels of very different ranges under one scale",
    why="The largest channel sets the scale, so the others get few integers: four bits less for a 16th of its range. "
    f"Listed if that affects more than a tenth of the channels, and one is below {LOW_SQNR:.0f} dB.",
    fix=_ONE_SCALE_FIX,
    needs=("pair",),
)
def channel_range(context: CheckContext) -> Iterator[Found]:
    shared = [product for product in context.integer_products if product.weight_params.axis is None]
    require(shared, "to models without weights that have one scale for the whole tensor")
    worst = {(row.name, row.attr): row.worst_channel_sqnr for row in context.weights}
    for product in shared:
        largest = product.largest
        alive = ~product.zero & product.visible
        small = alive & (largest * RATIO <= largest.max())
        share = float(small.sum()) / len(small)
        if share <= FEW_CHANNELS or not worst[product.name, "weight"] < LOW_SQNR:
            continue
        ratio = float(largest.max() / largest[small].min())
        why = f"{int(small.sum())} of {len(largest)} channels have less than 1/{RATIO:.0f} of the weight's range"
        yield Found(product.name, f"{why}, the smallest 1/{ratio:.0f}", value=share)


@rule(
    severity="warning",
    title="biases beyond 32 bits",
    why="Integer kernels add the bias to a 32-bit sum, in steps of the input's scale times the weight's. If that "
    "product is tiny, as for a channel whose weights are zero, the bias exceeds 2^31 - 1 steps: it is clamped, or "
    "wraps around to the other sign.",
    fix="give the weight observer a larger eps (2**-12 is usual), or keep the layer in float",
    needs=("pair",),
)
def bias_overflow(context: CheckContext) -> Iterator[Found]:
    """Of more than 2^31 - 1 steps: ``|bias| / (scale of the input * scale of the weight)``."""
    in_int32 = of_backend(context.known("plugin"), "int32_bias")  # None if no plug-in says
    require(in_int32 is not False, "to kernels that add the bias in float")
    products = [product for product in context.integer_products if product.bias is not None]
    require(products, "to models without biases of quantized weights")
    for product in products:
        scales, bias = _bias_scales(product), product.bias.reference if product.bias else None
        if scales is None or not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
            continue
        values = bias.detach().cpu().double().abs().flatten()
        # A transposed convolution has one scale for the channels of the same number in every group.
        steps = values / scales.repeat(values.numel() // scales.numel())
        if over := int((steps > 2**31 - 1).sum()):
            stored = in_int32 or product.bias_params is not None
            most, step = float(steps.max()), float(scales.min())
            why = f"{over} of {len(steps)} channels have a bias of up to {most:.2g} steps of {step:.2g}"
            why += "" if stored else ", if the kernel stores it as int32"
            yield Found(product.name, why, "error" if stored else None, value=most)


def _bias_scales(product: IntegerProduct) -> torch.Tensor | None:
    """The steps of the 32-bit sum: float64 of shape (1,) or (channels,); None if they are unknown."""
    own, given = product.bias_params, product.input_params
    if own is not None and own.dtype == "int32" and own.scale is not None:
        return torch.as_tensor(own.scale).cpu().double().flatten()
    return given.scale * product.scales if given is not None and isinstance(given.scale, float) else None
