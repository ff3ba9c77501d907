"""Cases whose measurements a test gives: what hypotheses make of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from pt2qa import QuantizedPair
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.projected import SiteNoises
from pt2qa._sensitivity.ranges import Observed
from pt2qa._simulator.data import Data
from pt2qa._trials.judge import Judge
from pt2qa._trials.treatment import Treatment
from tests.check.plain_quantizer import AFFINE, EXACT, PlainQuantizer
from tests.flows import quantized_pair


def case_of(pair: QuantizedPair, batches: Any, evaluation: Any = None) -> Case:
    data = Data("batches", batches)
    judge = Judge(pair, data if evaluation is None else Data("evaluation", evaluation), None, "diagnose")
    return Case(pair, judge, data, judge.outcome(Treatment()))


def noises(noise: Mapping[Any, float], signal: float = 1.0, measured: float = 1.0) -> SiteNoises:
    """The noise by site, or by site and variant."""
    found = {key if isinstance(key, tuple) else (key, "quantized"): each for key, each in noise.items()}
    given = {"noise": found, "variance": dict.fromkeys(found, 0.0), "signal": signal, "measured": measured}
    empty = {"outputs": (), "notes": (), "set_apart": (), "input_ranges": (), "settings": {}, "flops": {}}
    return SiteNoises(**given, **empty, method="exact", projections=0, batches=1, samples=1)  # type: ignore[arg-type]


def with_facts(case: Case, noise: Mapping[Any, float] | None = None, **facts: Any) -> Case:
    """The same case as if this had been measured, with a quarter as signal: shares of the noise are not the noise."""
    made = Case(case.pair, case.judge, case.data, case.now)
    made.known_noises = noises(noise or {}, signal=0.25)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def judged_by(case: Case, **given: Any) -> Case:
    """The same case with another judge in these respects."""
    judge = copy.copy(case.judge)
    for name, value in given.items():
        judge.__dict__[name] = value
    return Case(case.pair, judge, case.data, case.now)


def seen(*ends: tuple[float, float], channels: tuple[list[float], list[float]] | None = None) -> Observed:
    """Ranges by batch, and by channel."""
    tensors = None if channels is None else tuple(map(torch.tensor, channels))
    lowest, highest = (list(each) for each in zip(*ends, strict=True))
    return Observed(lowest, highest, None if tensors is None else 1, tensors)  # type: ignore[arg-type]


def said(found: Hypothesis, *names: str) -> dict[str, Any]:
    """Its fields but the treatment and those that are as by default."""
    defaults = {each.name: each.default for each in fields(Hypothesis)}
    values = {name: getattr(found, name) for name in defaults}
    own = {name: each for name, each in values.items() if name in names or each != defaults[name]}
    return {name: each for name, each in own.items() if name not in ("treatment", "preview")}


def played(found: Treatment, value: Tensor) -> dict[Any, list[float]]:
    """What the substitutes of a treatment make of a value, by place."""
    return {place: each.value(value.clone()).tolist() for place, each in found.played}


class Joined(nn.Module):
    """Two linears whose results are put together, and one that reads a part of that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(torch.cat([x, self.b(x)], -1)[:, :16])


@functools.cache
def joined(quantizer: str) -> Case:
    """A case of it; ``plain`` rounds each linear's input, weight, bias and output, and the relu's."""
    torch.manual_seed(0)
    batches = list(torch.randn(4, 8, 8))
    options = {"inputs": AFFINE, "outputs": EXACT, "int32_bias": True}
    own = PlainQuantizer(("linear", "relu"), **options) if quantizer == "plain" else quantizer  # type: ignore[arg-type]
    shapes = {"x": {0: torch.export.Dim.AUTO}}
    return case_of(quantized_pair(Joined(), batches[0], own, batches=batches, dynamic_shapes=shapes), batches)


class Changed:
    """A pair with other attributes."""

    def __init__(self, pair: Any, **own: Any) -> None:
        self.__dict__.update(own)
        self._pair = pair

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


def with_params(case: Case, params: Mapping[int, Mapping[str, Any]]) -> Case:
    """The same case where some sites round in another way."""
    sites = tuple(replace(site, params=replace(site.params, **params.get(site.index, {}))) for site in case.pair.sites)
    return Case(Changed(case.pair, sites=sites), case.judge, case.data, case.now)  # type: ignore[arg-type]
