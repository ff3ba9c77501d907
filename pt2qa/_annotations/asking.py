"""What a quantizer asks for at a place, held against what the converted model does there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pt2qa._annotations.places import Place
from pt2qa._report.prose import few
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.points import Derives, Point, SpecFacts
from pt2qa.overrides.sharing import root_of


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of the value at a place; fields as in :class:`pt2qa._annotations.rows.AnnotationRow`."""

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


_WITH_LIMITS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
"""The integer types of quantized values whose limits torch knows."""


class Asking:
    """Answers for the places of one model.

    Args:
        annotations: what the quantizer asks for; None where it is not known.
        sites: of the converted model; None before conversion.
    """

    def __init__(self, annotations: Annotations | None, sites: Sequence[Site] | None) -> None:
        self.annotations = annotations
        self.converted = sites is not None
        self.by_site = {} if annotations is None or sites is None else annotations.asking(sites)
        self.members: dict[Point, list[Point]] = defaultdict(list)
        for point, first in (annotations.groups if annotations is not None else {}).items():
            self.members[first].append(point)

    def about(self, place: Place) -> Answer:
        """What is asked for at a place, and what is done."""
        own = self._own(place)
        by = self._answering(place, own)
        if place.site is not None:
            return self._converted(place.site.params, own, by)
        if own is not None and self.converted:
            return self._unmet(place, own)
        return Answer(place.dtype) if by is None else self._predicted(own, by)

    def _own(self, place: Place) -> Point | None:
        """The point that asks for a rounded value at this very place."""
        if self.annotations is None:
            return None
        asked, nodes = self.annotations.asked, self.annotations.ground.nodes
        if place.constant:
            found = (point for argument, point in asked.constants.get(place.name, ()) if argument == place.argument)
            return next(found, None)
        reader = "" if place.role == "output" else place.name
        points = asked.values.get(place.of, ())
        found = (point for point in points if (nodes[point[1]].name if point[1] else "") == reader)
        return next(found, None)

    def _answering(self, place: Place, own: Point | None) -> Point | None:
        """The point that says how the value at a place is rounded: its own, or that of another who reads it."""
        if place.site is not None:
            points = self.by_site.get(place.site.index, ())
            return own if own in points else next(iter(points), None)
        if own is not None or self.annotations is None or place.constant:
            return own
        points = self.annotations.asked.values.get(place.of, ())
        # A value is rounded for everybody where its own op asks for it, else for those who do.
        fits = (point for point in points if place.role == "output" or not point[1])
        return next(fits, None)

    def _converted(self, params: QuantParams, own: Point | None, by: Point | None) -> Answer:
        facts = self._facts(by) if by is not None else None
        return Answer(
            dtype=params.dtype,
            annotated=own is not None,
            quantized=True,
            scheme=facts.scheme if facts is not None else _scheme(params),
            axis=-1 if params.axis is None else params.axis,
            observer=facts.observer if facts is not None else "",
            quant_min=params.quant_min,
            quant_max=params.quant_max,
            dynamic=params.dynamic,
            shares=self._shares(by),
            note=self._derived(by),
        )

    def _predicted(self, own: Point | None, by: Point) -> Answer:
        facts = self._facts(by)
        lowest, highest = _range(facts)
        return Answer(
            dtype=facts.dtype,
            annotated=own is not None,
            quantized=True,
            scheme=facts.scheme,
            axis=facts.axis,
            observer=facts.observer,
            quant_min=lowest,
            quant_max=highest,
            dynamic=facts.dynamic,
            shares=self._shares(by),
            note=self._derived(by),
        )

    def _unmet(self, place: Place, own: Point) -> Answer:
        facts = self._facts(own)
        note = f"{facts.dtype} is asked for, and the converted model does not round here"
        return Answer(place.dtype, annotated=True, observer=facts.observer, note=note)

    def _facts(self, point: Point) -> SpecFacts:
        assert self.annotations is not None
        return self.annotations.facts(point)

    def _shares(self, point: Point | None) -> str:
        """The other values whose scale is the same one."""
        if point is None or self.annotations is None:
            return ""
        own = self.annotations.value_name(point)
        values = map(self.annotations.value_name, self.members[self.annotations.groups[point]])
        return few([name for name in dict.fromkeys(values) if name != own])

    def _derived(self, point: Point | None) -> str:
        if point is None or self.annotations is None:
            return ""
        root = root_of(self.annotations.specs, point)
        spec = self.annotations.specs[root] if root is not None else None
        if not isinstance(spec, Derives):
            return ""
        return f"its scale is derived from those of {few([self.annotations.value_name(each) for each in spec.points])}"


def _scheme(params: QuantParams) -> str:
    """What a converted graph alone says of the scheme: where scales are integers' zeros, affine looks symmetric."""
    if params.axis is not None:
        return "per_channel"
    several = isinstance(params.scale, torch.Tensor) and params.scale.numel() > 1
    return "per_group" if several else "per_tensor" if params.dtype != "float16" else ""


def _range(facts: SpecFacts) -> tuple[int, int]:
    """The integer range; that of the dtype where the spec leaves it to the observer."""
    if facts.quant_min is not None and facts.quant_max is not None:
        return facts.quant_min, facts.quant_max
    dtype = getattr(torch, facts.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _WITH_LIMITS:
        return 0, 0
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
