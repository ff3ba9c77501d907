"""What the data does at each site: clamping, ranges that do not fit, repeated rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pt2qa._check.context import CheckContext, require
from pt2qa._check.rules.specs import VALUE_PRESERVING, mixed_parameters
from pt2qa._decibels import LOW_SQNR
from pt2qa._layers.rows import LayerRow
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.formats import decibel, number, share
from pt2qa._simulator import quant_ops
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.plugins import Found
from pt2qa.plugins.rules import rule

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
            yield Found(
                row.name,
                f"{share(row.saturation)} % of its values are clamped ({beyond}), which takes it from "
                f"{decibel(row.rounding_sqnr + cost)} to {decibel(row.rounding_sqnr)} dB",
                value=cost,
            )


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
            yield Found(
                row.name,
                f"the data spans {share(row.range_use)} % of its range, and its root mean square is "
                f"{steps:.1f} steps: rounding leaves {decibel(row.rounding_sqnr)} dB",
                value=-row.rounding_sqnr,
            )


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
            yield Found(
                row.name,
                f"the data spans {share(row.range_use)} % of its range, which costs {bits:.1f} bits and leaves "
                f"{decibel(row.rounding_sqnr)} dB",
                value=bits,
            )


SAME = 1e-6
"""Relative difference of two scales that are one: float32 has seven digits."""

_ATTRIBUTES = ("dtype", "quant_min", "quant_max", "axis", "scale", "zero_point")


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
                yield Found(site.name, f"{what}: {how}", value=abs(math.log2(ratio)))


def _differing(one: QuantParams, other: QuantParams) -> tuple[str, ...]:
    return tuple(name for name in _ATTRIBUTES if not _equal(getattr(one, name), getattr(other, name)))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        left, right = torch.as_tensor(one).double(), torch.as_tensor(other).double()
        return left.shape == right.shape and bool(torch.allclose(left, right, rtol=SAME, atol=0))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SAME)
    return one == other


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
            yield Found(name, f"is quantized and dequantized with different parameters: {how}", "error", _OTHERWISE_FIX)


_OTHERWISE_FIX = "a pass changed one of the two in the converted graph; apply it to both or to neither"


def _of(site: Site, attribute: str) -> str:
    value = getattr(site.params, attribute)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
