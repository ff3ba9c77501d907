"""What a quantizer annotates at a value, compared with what the converted model does there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pt2qa._annotations.values import AnnotatedValue
from pt2qa._report.prose import few
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.points import OUTPUT, Derives, Point, SpecFacts
from pt2qa.overrides.sharing import root_of


@dataclass(frozen=True)
class ResolvedSpec:
    """What becomes of a value; fields as in :class:`pt2qa._annotations.rows.AnnotationRow`."""

    dtype: str
    annotated: bool = False
    quantized: bool = False
    scheme: str = ""
    axis: int = -1
    observer: str = ""
    quant_min: int = 0
    quant_max: int = 0
    dynamic: bool = False
    shares: str = ""
    note: str = ""
    options: str = ""
    group: str = ""


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

    def resolve(self, value: AnnotatedValue) -> ResolvedSpec:
        """What is annotated at a value, and what is done."""
        own = self._own_point(value)
        if value.site is None and own is not None and self.converted:
            unmet = self._facts(own)
            note = f"{unmet.dtype} is asked for, and the converted model does not round here"
            return ResolvedSpec(value.dtype, annotated=True, observer=unmet.observer, note=note, options=unmet.options)
        point = self._point(value, own)
        facts = None if point is None else self._facts(point)
        params = None if value.site is None else value.site.params
        done: QuantParams | SpecFacts
        if params is not None:
            done, limits = params, (params.quant_min, params.quant_max)
            scheme = _scheme(params) if facts is None else facts.scheme
        elif facts is not None:
            done, limits, scheme = facts, _range(facts), facts.scheme
        else:
            return ResolvedSpec(value.dtype)
        return ResolvedSpec(
            dtype=done.dtype,
            annotated=own is not None,
            quantized=True,
            scheme=scheme,
            axis=-1 if done.axis is None else done.axis,
            observer="" if facts is None else facts.observer,
            quant_min=limits[0],
            quant_max=limits[1],
            dynamic=done.dynamic,
            shares=self._shares(point),
            note=self._derived(point),
            options="" if facts is None else facts.options,
            group=self._group(point),
        )

    def _own_point(self, value: AnnotatedValue) -> Point | None:
        """The point that annotates a rounded value at exactly this place."""
        if self.annotations is None:
            return None
        (values, constants), nodes = self.annotations.points_by_name, self.annotations.graph.nodes
        if value.constant:
            found = (point for argument, point in constants.get(value.name, ()) if argument == value.argument)
            return next(found, None)
        points = values.get(value.of, ())
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
        asked = self.annotations.points_by_name[0].get(value.of, ())
        # A value is rounded for all readers if its producer asks for it, else for those that do.
        return next((point for point in asked if value.role == "output" or not point[1]), None)

    def _facts(self, point: Point) -> SpecFacts:
        assert self.annotations is not None
        return self.annotations.facts(point)

    def _shares(self, point: Point | None) -> str:
        """The other values that share its scale."""
        if point is None or self.annotations is None:
            return ""
        own = self.annotations.value_name(point)
        values = map(self.annotations.value_name, self.members[self.annotations.groups[point]])
        return few([name for name in dict.fromkeys(values) if name != own])

    def _group(self, point: Point | None) -> str:
        """The first of the values that have its scale; empty if that is the value itself."""
        if point is None or self.annotations is None:
            return ""
        first = self.annotations.value_name(self.members[self.annotations.groups[point]][0])
        return "" if first == self.annotations.value_name(point) else first

    def _derived(self, point: Point | None) -> str:
        if point is None or self.annotations is None:
            return ""
        root = root_of(self.annotations.specs, point)
        if root is None or not isinstance(spec := self.annotations.specs[root], Derives):
            return ""
        return f"its scale is derived from those of {few([self.annotations.value_name(each) for each in spec.points])}"


def _scheme(params: QuantParams) -> str:
    """What a converted graph alone says about the scheme: where scales are integers' zeros, affine looks symmetric."""
    if params.axis is not None:
        return "per_channel"
    if params.slice_axes:
        return "per_slice"
    several = isinstance(params.scale, torch.Tensor) and params.scale.numel() > 1
    return "per_group" if several else "per_tensor" if params.dtype != "float16" else ""


def _range(facts: SpecFacts) -> tuple[int, int]:
    """The integer range; the dtype's if the spec leaves it to the observer."""
    if facts.quant_min is not None and facts.quant_max is not None:
        return facts.quant_min, facts.quant_max
    dtype = getattr(torch, facts.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _WITH_LIMITS:
        return 0, 0
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
