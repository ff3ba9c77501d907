"""The noise of every change of every site alone, against copies of the graph with that site changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._diagnosis import projected
from pt2qa._sensitivity import projection
from pt2qa._sensitivity.roundings import Variant, clamping, own_rounding, rounding
from pt2qa._simulator.data import Data
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.errors import BatchError, SelectionError, SimulationError
from tests import models
from tests.diagnosis.switched import clamped, noise, with_function
from tests.flows import quantized_pair
from tests.sensitivity.brute_force import quantized_at


class Small(nn.Module):
    """A convolution, a relu6 and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.relu6(self.conv(x)).mean((2, 3)))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))


BATCHES: dict[Callable[[], nn.Module], list[tuple[Tensor]]] = {
    linear: [(3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)],
    Small: [(3 * torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)],
}


@functools.cache
def pair_of(model: Callable[[], nn.Module], quantizer: str) -> pt2qa.QuantizedPair:
    """Calibrated on a third of the range that the batches have."""
    torch.manual_seed(0)
    narrow = tuple(value / 3 for value in BATCHES[model][0])
    return quantized_pair(model(), narrow, quantizer)


def split(pair: pt2qa.QuantizedPair) -> Callable[[Site], Mapping[str, Variant]]:
    def variants(site: Site) -> Mapping[str, Variant]:
        own, clamp = own_rounding(pair.simulator, site), clamping(site.params)
        return {"whole": Variant(own), "rounding": Variant(own, start=clamp), "clamping": Variant(clamp)}

    return variants


def site_noises(pair: pt2qa.QuantizedPair, batches: Any, variants: Any, **options: Any) -> projected.SiteNoises:
    return projected.site_noises(pair, Data("batches", batches), variants, **options)


def truth(pair: pt2qa.QuantizedPair, batches: Any) -> dict[tuple[int, str], float]:
    """The same from copies of the graph."""
    found = {}
    reference = pair.reference
    for site in pair.sites:
        whole = quantized_at(pair, [site.index])
        clamp = with_function(pair, site, functools.partial(clamped, site.params))
        found[site.index, "whole"] = noise(pair, batches, whole, reference)
        found[site.index, "rounding"] = noise(pair, batches, whole, clamp)
        found[site.index, "clamping"] = noise(pair, batches, clamp, reference)
    return found


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic", "xnnpack:per_channel=False"])
@pytest.mark.parametrize("model", [linear, Small])
def test_exact_runs_are_copies_of_the_graph(model: Callable[[], nn.Module], quantizer: str) -> None:
    pair, batches = pair_of(model, quantizer), BATCHES[model]
    found = site_noises(pair, batches, split(pair), method="exact")
    assert found.method == "exact"
    assert found.noise == pytest.approx(truth(pair, batches), rel=1e-3, abs=1e-9 * found.signal)
    assert found.measured == pytest.approx(noise(pair, batches, pair.quantized, pair.reference), rel=1e-4)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic", "xnnpack:per_channel=False"])
def test_a_linear_net_is_projected_without_error(quantizer: str) -> None:
    # As many vectors as outputs leave nothing to chance.
    pair, batches = pair_of(linear, quantizer), BATCHES[linear]
    found = site_noises(pair, batches, split(pair), method="projection", projections=8)
    assert found.method == "projection"
    assert found.noise == pytest.approx(truth(pair, batches), rel=1e-3, abs=1e-9 * found.signal)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic"])
def test_followed_through_relu6_it_is_exact_too(quantizer: str) -> None:
    pair, batches = pair_of(Small, quantizer), BATCHES[Small]
    found = site_noises(pair, batches, split(pair), method="projection", projections=4)
    assert found.noise == pytest.approx(truth(pair, batches), rel=2e-3, abs=1e-8 * found.signal)


def test_the_only_variant_is_what_sensitivity_has() -> None:
    pair, batches = pair_of(Small, "xnnpack"), BATCHES[Small]

    def own(site: Site) -> Mapping[str, Variant]:
        return {"quantized": Variant(own_rounding(pair.simulator, site))}

    found = site_noises(pair, batches, own, method="projection")
    report = pt2qa.sensitivity(pair, batches, method="projection", projections=4, progress=False)
    assert found.noise == {(row.site, "quantized"): row.noise for row in report.rows}
    assert (found.signal, found.measured) == (report.signal, report.noise)


@pytest.mark.parametrize("method", ["exact", "projection"])
def test_sites_without_variants_cost_nothing_and_other_changes_are_free(method: Any) -> None:
    pair, batches = pair_of(linear, "xnnpack"), BATCHES[linear]
    weight = next(site for site in pair.sites if site.kind == "weight")

    def variants(site: Site) -> Mapping[str, Variant]:
        zero = Variant(torch.zeros_like)
        return {"removed": zero, "kept": Variant(lambda value: value)} if site is weight else {}

    found = site_noises(pair, batches, variants, method=method, projections=8)
    removed = with_function(pair, weight, torch.zeros_like)
    expected = noise(pair, batches, removed, pair.reference)
    assert found.noise == pytest.approx({(weight.index, "removed"): expected, (weight.index, "kept"): 0.0}, rel=1e-3)


def test_where_there_is_no_gradient_the_model_runs_for_each_change() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 16),)
    pair = quantized_pair(models.Linears(), batch)
    step = next(step for step in pair.program.steps if step.op == "relu")
    step.function, step.in_place = lambda x: torch.from_numpy(x.numpy().clip(0)), None

    def many(site: Site) -> Mapping[str, Variant]:
        return {**split(pair)(site), **shifted(site)}

    found = site_noises(pair, [batch], many)
    assert found.method == "exact"
    assert "each site took model runs of its own" in " ".join(found.notes)
    expected = truth(pair, [batch])
    assert {key: found.noise[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    with pytest.raises(SimulationError, match="has no gradient here"):
        site_noises(pair, [batch], split(pair), method="projection")


def test_few_changes_are_run_and_many_are_projected_as_often_as_needed() -> None:
    pair = pair_of(Small, "xnnpack")
    assert site_noises(pair, BATCHES[Small], lambda site: {}).method == "exact"
    many = site_noises(pair, BATCHES[Small][:1], shifted, projections=None)
    assert (many.method, many.projections) == ("projection", 4)
    torch.manual_seed(0)
    batch = (torch.randn(1, 64),)
    wide = quantized_pair(nn.Linear(64, 64), batch)
    # One sample with 64 outputs: four vectors leave a large error.
    assert site_noises(wide, [batch], shifted, projections=None).projections == 8


def shifted(site: Site) -> Mapping[str, Variant]:
    """Twenty changes."""
    return {str(number): Variant(lambda value, by=number / 100: value * (1 + by)) for number in range(1, 21)}  # type: ignore[misc]


def test_what_does_not_count_is_set_apart() -> None:
    pair = pair_of(linear, "xnnpack")
    broken = BATCHES[linear][0][0].clone()
    broken[3, 0] = torch.nan
    found = site_noises(pair, [(broken,), *BATCHES[linear]], split(pair), projections=8)
    assert [(each.batch, each.side) for each in found.set_apart] == [(0, "batch")]
    assert (found.batches, found.samples) == (2, 16)
    with pytest.raises(BatchError, match="no batch can be measured"):
        site_noises(pair, [(broken,)], split(pair))
    with pytest.raises(SelectionError, match="projections is 0"):
        site_noises(pair, BATCHES[linear], split(pair), projections=0)


def test_ready_made_roundings_are_those_of_the_converted_ops() -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(6, 5)
    ops = torch.ops.quantized_decomposed
    one = QuantParams("int8", scale=0.03125, zero_point=-7, quant_min=-128, quant_max=127)
    scales, zero_points = torch.rand(5) / 20 + 0.01, torch.randint(-9, 9, (5,))
    each = QuantParams("int8", scales, zero_points, quant_min=-128, quant_max=127, axis=1)
    integers = ops.quantize_per_tensor(x, 0.03125, -7, -128, 127, torch.int8)
    assert torch.equal(rounding(one)(x), ops.dequantize_per_tensor(integers, 0.03125, -7, -128, 127, torch.int8))
    integers = ops.quantize_per_channel(x, scales, zero_points, 1, -128, 127, torch.int8)
    assert torch.equal(
        rounding(each)(x), ops.dequantize_per_channel(integers, scales, zero_points, 1, -128, 127, torch.int8)
    )
    for params in (one, each):
        clamp = clamping(params)
        torch.testing.assert_close(clamp(x), clamped(params, x))
        # Rounding what is clamped is rounding, and adds nothing where the clamp acted.
        assert torch.equal(rounding(params)(clamp(x)), rounding(params)(x))
        moved = clamp(x) != x
        assert moved.any()
        assert torch.equal(rounding(params)(x)[moved], clamp(x)[moved])
        small = x / 100
        assert clamp(small) is small


@pytest.mark.parametrize("method", ["exact", "projection"])
@pytest.mark.parametrize(("sizes", "measured"), [((8, 4, 4), 8), ((4, 4, 4, 4), 8), ((2, 2), 4), ((9, 1), 9)])
def test_sampled_variants_are_measured_on_the_first_samples(
    monkeypatch: pytest.MonkeyPatch, method: Any, sizes: tuple[int, ...], measured: int
) -> None:
    monkeypatch.setattr(projection, "left_to_chance", lambda *args, apart: 1.0)  # else such small outputs leave none
    own = BATCHES[linear]
    torch.manual_seed(0)
    narrow = (own[0][0] / 3,)
    pair = quantized_pair(linear(), narrow, "xnnpack", dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    batches = [(part,) for part in torch.cat([own[0][0], own[1][0]])[: sum(sizes)].split(list(sizes))]
    options = {"method": method, "projections": 8}
    found = site_noises(pair, batches, split(pair), sampled=["clamping"], **options)
    whole = site_noises(pair, batches, split(pair), **options)
    first = site_noises(pair, [(torch.cat([part for (part,) in batches])[:measured],)], split(pair), **options)
    assert found.noise.keys() == whole.noise.keys()
    for key in found.noise:
        other, factor = (first, sum(sizes) / measured) if key[1] == "clamping" else (whole, 1.0)
        assert found.noise[key] == pytest.approx(other.noise[key] * factor, rel=1e-4, abs=1e-9 * found.signal)
        assert found.variance[key] == pytest.approx(other.variance[key] * factor**2, rel=1e-3, abs=0.0)


def test_how_often_is_a_matter_of_the_relative_error() -> None:
    torch.manual_seed(0)
    net, batch = nn.Linear(64, 64, bias=False), (torch.randn(256, 64),)
    net.weight.data *= 2**-10
    assert site_noises(quantized_pair(net, batch), [batch], shifted, projections=None).projections == 4
