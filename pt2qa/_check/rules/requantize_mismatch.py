"""Values that are rounded a second time, with other parameters, though nothing between has changed them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pt2qa._check.context import CheckContext
from pt2qa._check.rules import mixed_parameters
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator import quant_ops
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.plugins import DoesNotApplyError, Found, Rule

SAME = 1e-6
"""Relative difference of two scales that are one: float32 has seven digits."""

_ATTRIBUTES = ("dtype", "quant_min", "quant_max", "axis", "scale", "zero_point")


def find(context: CheckContext) -> Iterator[Found]:
    """Sites that round what another site has rounded, and values dequantized otherwise than they were quantized."""
    pair = context.pair
    yield from _dequantized_otherwise(context)
    annotations = context.known_annotations
    # What the rule mixed-parameters says already, where the annotation is known.
    told = {found.name for found in mixed_parameters.find(context)} if annotations and annotations.edges else set()
    static = [site for site in pair.sites if site.kind == "activation" and isinstance(site.params.scale, float)]
    if not static:
        raise DoesNotApplyError("to models without scales from calibration")
    for site in static:
        if site.name in told:
            continue
        for before, through in _rounded_before(pair, site.source):
            if names := differing(before.params, site.params):
                what = f"is rounded before {through[0]} and again{_after(through)}" if through else "is rounded twice"
                ratio = site.params.largest_scale / before.params.largest_scale
                how = ", ".join(f"{name} {_of(before, name)} then {_of(site, name)}" for name in names)
                yield Found(site.name, f"{what}: {how}", value=abs(math.log2(ratio)))


def differing(one: QuantParams, other: QuantParams) -> tuple[str, ...]:
    """The attributes in which two ways of rounding differ."""
    return tuple(name for name in _ATTRIBUTES if not _equal(getattr(one, name), getattr(other, name)))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        left, right = torch.as_tensor(one).double(), torch.as_tensor(other).double()
        return left.shape == right.shape and bool(torch.allclose(left, right, rtol=SAME, atol=0))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SAME)
    return one == other


def _rounded_before(pair: QuantizedPair, slot: int) -> Iterator[tuple[Site, tuple[str, ...]]]:
    """The sites whose values reach a slot unchanged, with the ops that handed them on."""
    producer = pair.program.producers.get(slot)
    if producer is None:
        return
    step = pair.program.steps[producer]
    if step.site is not None:
        yield pair.sites[step.site], ()
    elif step.op in mixed_parameters.VALUE_PRESERVING or step.op == "getitem":
        for source in step.reads:
            for site, through in _rounded_before(pair, source):
                yield site, (*through, step.op) if step.op != "getitem" else through


def _after(through: tuple[str, ...]) -> str:
    return " after" if len(through) == 1 else f" after {through[-1]}, and nothing between changes it"


def _dequantized_otherwise(context: CheckContext) -> Iterator[Found]:
    graph_module = context.pair.quantized
    for node in graph_module.graph.nodes:
        source = node.args[0] if node.args else None
        if not quant_ops.is_dequantize(node) or not isinstance(source, torch.fx.Node):
            continue
        if not quant_ops.is_quantize(source) or not quant_ops.is_static_per_tensor(source):
            continue
        before, after = (quant_ops.read_params(one, lambda constant: None) for one in (source, node))
        if names := differing(before, after):
            made = source.args[0]
            name = context.name_of(made) if isinstance(made, torch.fx.Node) else ""
            how = ", ".join(f"{name} {getattr(before, name)} and {getattr(after, name)}" for name in names)
            yield Found(name, f"is quantized and dequantized with different parameters: {how}", "error", _OTHERWISE_FIX)


_OTHERWISE_FIX = "a pass over the converted graph has changed one of the two; run it on both or on neither"


def _of(site: Site, attribute: str) -> str:
    value = getattr(site.params, attribute)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


RULE = Rule(
    id="requantize-mismatch",
    severity="warning",
    title="values rounded twice with different parameters",
    why="Two observers chose two scales for one value: the second rounding adds its own error, costs a kernel, and "
    "kernels that only move data refuse parameters that differ (executorch#19836, executorch#22238).",
    fix="let the two share one observer: a SharedQuantizationSpec in the quantizer, or no annotation of the op between",
    needs=("pair",),
    find=find,
)
