"""What a quantizer annotates at a value, compared with what the converted model does there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import nan

import torch

from pt2qa._annotations.rows import AnnotationRow
from pt2qa._annotations.values import AnnotatedValue
from pt2qa._report.prose import few
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.points import OUTPUT, Derives, Point, SpecFacts
from pt2qa.overrides.sharing import root_of

_WITH_LIMITS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
"""The integer types of quantized values whose limits torch knows."""


class SpecResolver:
    """Finds the specs of one model's values; annotations are None if unknown, sites before conversion."""

    def __init__(self, annotations: Annotations | None, sites: Sequence[Site] | None) -> None:
        self.annotations = annotations
        self.converted = sites is not None
        self.by_site = {} if annotations is None or sites is None else annotations.points_at(sites)
        self.members: dict[Point, list[Point]] = defaultdict(list)
        for point, first in (annotations.groups if annotations is not None else {}).items():
            self.members[first].append(point)

    def row(self, value: AnnotatedValue, module: str) -> AnnotationRow:
        """What is annotated at a value of an op of a module, and what is done."""
        own = self._own_point(value)
        unmet = value.site is None and own is not None and self.converted
        point = own if unmet else self._point(value, own)
        facts = None if point is None or self.annotations is None else self.annotations.facts(point)
        params = None if value.site is None else value.site.params
        done: QuantParams | SpecFacts | None = params if params is not None else None if unmet else facts
        shares, group, derived = self._sharing(point if done is not None else None)
        low, high = (0, 0) if done is None else _range(done)
        note = value.note if value.owner else "inserted by the quantizer, prepare or convert"
        refused = f"{facts.dtype} was requested, but the converted model does not round here" if unmet and facts else ""
        return AnnotationRow(
            name=value.name,
            module=module,
            op=value.op,
            role=value.role,
            argument=value.argument,
            of=value.of,
            dtype=value.dtype if done is None else done.dtype,
            scheme=facts.scheme
            if done is not None and facts is not None
            else ""
            if params is None
            else _scheme(params),
            axis=-1 if done is None or done.axis is None else done.axis,
            observer="" if facts is None else facts.observer,
            quant_min=low,
            quant_max=high,
            dynamic=done is not None and done.dynamic,
            scale=nan if params is None else params.largest_scale,
            zero_point=nan if params is None else params.single_zero_point,
            shares=shares,
            annotated=own is not None,
            quantized=done is not None,
            site=-1 if value.site is None else value.site.index,
            note="; ".join(filter(None, (note, refused, derived))),
            options="" if facts is None else facts.options,
            group=group,
        )

    def _own_point(self, value: AnnotatedValue) -> Point | None:
        """The point that annotates a rounded value at exactly this place."""
        if self.annotations is None:
            return None
        named, nodes = self.annotations.points_by_name, self.annotations.ground.nodes
        if value.constant:
            found = (point for argument, point in named.constants.get(value.name, ()) if argument == value.argument)
            return next(found, None)
        points = named.values.get(value.of, ())
        if value.role == "output":
            return next((point for point in points if not point[1] or nodes[point[1]].op == OUTPUT), None)
        return next((point for point in points if point[1] and nodes[point[1]].name == value.name), None)

    def _point(self, value: AnnotatedValue, own: Point | None) -> Point | None:
        """The point that says how a value is rounded: its own, or another reader's."""
        if value.site is not None:
            points = self.by_site.get(value.site.index, ())
            return own if own in points else next(iter(points), None)
        if own is not None or self.annotations is None or value.constant:
            return own
        asked = self.annotations.points_by_name.values.get(value.of, ())
        # A value is rounded for all readers if its producer asks for it, else for those that do.
        return next((point for point in asked if value.role == "output" or not point[1]), None)

    def _sharing(self, point: Point | None) -> tuple[str, str, str]:
        """The other values that share its scale, the first of them if that is another one, and what derives it."""
        if point is None or self.annotations is None:
            return "", "", ""
        name_of, own = self.annotations.value_name, self.annotations.value_name(point)
        values = list(dict.fromkeys(map(name_of, self.members[self.annotations.groups[point]])))
        root = root_of(self.annotations.specs, point)
        spec = None if root is None else self.annotations.specs[root]
        sources = few(list(map(name_of, spec.points))) if isinstance(spec, Derives) else ""
        derived = f"its scale is derived from those of {sources}" if sources else ""
        return few([name for name in values if name != own]), values[0] if values[0] != own else "", derived


def _scheme(params: QuantParams) -> str:
    """What a converted graph alone says about the scheme: where scales are integers' zeros, affine looks symmetric."""
    if params.axis is not None:
        return "per_channel"
    if params.slice_axes:
        return "per_slice"
    several = isinstance(params.scale, torch.Tensor) and params.scale.numel() > 1
    return "per_group" if several else "per_tensor" if params.dtype != "float16" else ""


def _range(done: QuantParams | SpecFacts) -> tuple[int, int]:
    """The integer range; the dtype's if the spec leaves it to the observer."""
    if done.quant_min is not None and done.quant_max is not None:
        return done.quant_min, done.quant_max
    dtype = getattr(torch, done.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _WITH_LIMITS:
        return 0, 0
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
