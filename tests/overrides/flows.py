"""Captures, pairs and annotations of the small nets, each made once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._simulator.program import Site
from pt2qa.overrides import Annotations, annotations_of
from tests.overrides.nets import NETS


@functools.cache
def captured(net: str) -> tuple[pt2qa.Capture, tuple[Tensor, ...]]:
    """The capture and the one batch that calibrates it."""
    model, batch = NETS[net]()
    return pt2qa.capture(model, batch), batch


@functools.cache
def plain(net: str, quantizer: str, *, qat: bool = False) -> pt2qa.QuantizedPair:
    """The pair without overrides."""
    return edited(net, quantizer, qat=qat)


@functools.cache
def annotated(net: str, quantizer: str, *, qat: bool = False) -> Annotations:
    """What the quantizer annotates without overrides."""
    return annotations_of(captured(net)[0], quantizer, qat=qat)


def edited(net: str, quantizer: Any, *edits: Edit, qat: bool = False) -> pt2qa.QuantizedPair:
    """The pair with overrides."""
    capture, batch = captured(net)
    overrides = OverridePlan(edits) if edits else None
    return pt2qa.quantize(capture, quantizer, [batch], overrides=overrides, qat=qat, progress=False)


def places(sites: Iterable[Site]) -> Counter[tuple[str, str]]:
    """How many sites of a kind each op has."""
    return Counter((site.kind, site.name) for site in sites)


def check_prediction(annotations: Annotations, before: pt2qa.QuantizedPair, after: pt2qa.QuantizedPair) -> None:
    """The sites of a new pair are those of the old one that its annotation says will stay."""
    on = annotations.sites_on(before.sites)
    assert places(before.sites[index] for index in on) == places(after.sites)
