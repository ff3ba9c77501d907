"""Roundings, clamps and their combinations, against NumPy and torch's own fake quantization."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pt2qa._sensitivity.roundings import (
    EPSILON,
    HALF,
    InSeries,
    Variant,
    changes,
    clamping,
    fitted,
    fitted_by_channel,
    fitted_weight,
    own_rounding,
    readers_of,
    rounding,
    with_readers,
    with_roundings,
)
from pt2qa._simulator.program import QuantParams
from pt2qa._simulator.simulator import Simulator
from tests.flows import residual_pair
from tests.models import images

STEPS = torch.tensor([[-9.0, -4.502, -4.4, 0.3, 3.4, 3.502, 9.0], [-3.0, -2.0, -1.6, 0.5, 1.5, 2.6, 3.0]])
"""In steps of a scale: both rows reach beyond a range of -4 to 3, the first one just beyond half a step, too."""


def clamped(steps: np.ndarray[Any, Any], low: Any, high: Any) -> np.ndarray[Any, Any]:
    """In steps: the end of the range for all that is more than half a step outside."""
    return np.where(steps > high + 0.5 + 0.001, high, np.where(steps < low - 0.5 - 0.001, low, steps))


@pytest.mark.parametrize("zero_point", [0, 1, -2])
def test_a_clamp_moves_what_is_more_than_half_a_step_outside_and_nothing_else(zero_point: int) -> None:
    params = QuantParams("int8", 0.5, zero_point, -4 + zero_point, 3 + zero_point)
    clamp = clamping(params)
    for steps in (STEPS, STEPS.clamp(max=3.0), STEPS.clamp(min=-4.0)):
        expected = clamped(steps.numpy(), -4, 3) * 0.5
        assert clamp(steps * 0.5).tolist() == pytest.approx(expected)
    inside, empty = torch.tensor([-4.5, 3.5]) * 0.5, torch.empty(0, 3)
    assert clamp(inside) is inside
    assert clamp(empty).shape == (0, 3)


def test_a_clamp_by_channel_has_each_channels_own_range() -> None:
    scale, zero_point = torch.tensor([0.5, 2.0], dtype=torch.float64), torch.tensor([0, 1])
    params = QuantParams("int8", scale, zero_point, -4, 3, axis=0)
    value = STEPS * scale.float()[:, None]
    clamp = clamping(params)
    expected = clamped(STEPS.numpy(), np.array([[-4], [-5]]), np.array([[3], [2]])) * scale.numpy()[:, None]
    assert clamp(value).dtype == torch.float32
    assert clamp(value).tolist() == pytest.approx(expected)
    one_end = value.clamp(max=1.0)
    assert clamp(one_end).tolist() == pytest.approx(np.where(value.numpy() > 1, 1.0, expected))
    assert clamp(-one_end).tolist() != (-one_end).tolist()
    inside = value.clamp(-1.0, 1.0)
    assert clamp(inside) is inside


def test_half_a_step_has_some_room_for_the_error_of_floats() -> None:
    largest = 12.7
    scale = largest / 127.5
    assert HALF > 0.5
    value = torch.tensor([largest, -largest])
    assert clamping(QuantParams("int8", scale, 0, -128, 127))(value) is value


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_rounding_equals_fake_quantization(axis: int | None) -> None:
    value = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    if axis is None:
        params = QuantParams("int8", 0.05, 3, -16, 15)
        expected = torch.fake_quantize_per_tensor_affine(value, 0.05, 3, -16, 15)
    else:
        scale = torch.linspace(0.03, 0.2, value.shape[axis])
        zero_point = torch.arange(value.shape[axis], dtype=torch.int32) - 1
        params = QuantParams("int8", scale, zero_point, -16, 15, axis)
        expected = torch.fake_quantize_per_channel_affine(value, scale, zero_point, axis, -16, 15)
    quantize = rounding(params)
    before = value.clone()
    torch.testing.assert_close(quantize(value), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(value, before)
    assert not torch.signbit(quantize(torch.full((3, 4), -1e-6))).any()
    memory = torch.empty_like(value)
    assert quantize(value, out=memory).data_ptr() == memory.data_ptr()
    assert quantize(value, out=value).data_ptr() == value.data_ptr()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    shared = torch.tensor([[0.7], [0.1], [-0.2]]).expand(3, 4)
    assert quantize(shared, out=shared).tolist() == quantize(shared.clone()).tolist()


def test_a_whole_tensor_of_integers_without_an_exact_kernel_is_rounded_all_the_same() -> None:
    limits = -(2**31), 2**31 - 1
    found = rounding(QuantParams("int32", 1e-3, 0, *limits))(torch.tensor([0.12345, -0.0004, 3e9]))
    assert found.tolist() == pytest.approx([0.123, 0.0, limits[1] * 1e-3], rel=1e-6)


def test_a_variant_has_one_rounding_or_two() -> None:
    assert Variant(torch.round).both == (torch.round,)
    assert Variant(torch.round, torch.floor).both == (torch.round, torch.floor)


def test_what_comes_to_the_same_is_computed_once_and_given_together() -> None:
    called: list[str] = []

    def named(name: str, function: Any) -> Any:
        def apply(value: Tensor) -> Tensor:
            called.append(name)
            return function(value)

        return apply

    as_it_is, up, half = named("same", lambda x: x), named("up", lambda x: x + 1), named("half", lambda x: x / 2)
    still, both, nothing = InSeries(up, as_it_is), InSeries(up, half), InSeries(as_it_is, as_it_is)
    value = torch.tensor([2.0, 4.0])
    found = [
        (own, result.tolist(), result is value) for own, result in changes(value, [as_it_is, up, still, both, nothing])
    ]
    assert found == [
        ([both], [1.5, 2.5], False),
        ([up, still], [3.0, 5.0], False),
        ([as_it_is, nothing], [2.0, 4.0], True),
    ]
    assert sorted(called) == ["half", "same", "same", "same", "up"]
    assert both(value).tolist() == [1.5, 2.5]
    # Roundings that are only the first of others are no results of their own.
    assert [own for own, _ in changes(value, [both])] == [[both]]
    assert list(changes(value, [])) == []


def test_ranges_are_fitted_to_hold_zero_and_no_scale_is_zero() -> None:
    for lowest, highest in ((-1.0, 3.0), (1.0, 3.0), (-3.0, -1.0)):
        low, high = min(lowest, 0.0), max(highest, 0.0)
        params = fitted(lowest, highest, -128, 127)
        assert params.scale == pytest.approx((high - low) / 255)
        assert params.zero_point == round(-128 - low / ((high - low) / 255))
    params = fitted_by_channel(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.0]), 1, 0, 255)
    assert isinstance(params.scale, Tensor)
    assert params.scale.tolist() == pytest.approx([EPSILON, 1 / 255])
    assert isinstance(params.zero_point, Tensor)
    assert params.zero_point.tolist() == [0, 255]
    assert (params.quant_min, params.quant_max, params.axis) == (0, 255, 1)


def test_a_weight_of_one_axis_and_one_of_zeros_are_fitted() -> None:
    params = fitted_weight(torch.tensor([-2.0, 0.0, 1.0]), 0)
    assert isinstance(params.scale, Tensor)
    assert params.scale.tolist() == pytest.approx([2 / 127])
    assert fitted_weight(torch.zeros(2, 2), None).scale == EPSILON


# -- programs that round otherwise -------------------------------------------------------------------------------------


def test_a_program_rounds_at_some_sites_as_it_is_told() -> None:
    pair = residual_pair()
    values = pair.values(images())
    nothing: dict[int, Any] = {site.index: lambda value, out=None: value for site in pair.sites}
    reference = pair.simulator.run(values, on=False)[0]
    assert torch.equal(Simulator(with_roundings(pair.program, nothing)).run(values, on=True)[0], reference)
    own = pair.simulator.run(values, on=True)[0]
    assert torch.equal(Simulator(with_roundings(pair.program, {})).run(values, on=True)[0], own)
    for site in pair.sites:
        # All sites but one leave the value as it is; that one rounds as it does.
        others = {index: same for index, same in nothing.items() if index != site.index}
        alone = Simulator(with_roundings(pair.program, others)).run(values, on=True)[0]
        assert torch.equal(alone, pair.simulator.run(values, on={site.index})[0]), site.name
    for name in ("relu/relu", "fc/linear"):
        sites = [site for site in pair.sites if site.name == name]
        rounded = {site.index: own_rounding(pair.simulator, site) for site in sites}
        assert all(rounded[site.index] == own_rounding(pair.simulator, site) for site in sites)
    seen: dict[int, Tensor] = {}
    pair.simulator.run(values, on=True, visit=lambda step, value: seen.update({step.out: value.clone()}))
    for site in pair.sites:
        function = own_rounding(pair.simulator, site)
        if site.kind == "activation":
            value = seen.get(site.source, values[0])
            assert torch.equal(function(value), seen[site.result])
        else:
            (constant,) = [each for each in pair.program.constants if each.site == site.index]
            assert torch.equal(function(constant.reference), constant.quantized)


def test_readers_are_ops_further_sites_and_the_output() -> None:
    pair = residual_pair()
    slots = {step.name: step.out for step in pair.program.steps if step.site is None}
    last = pair.program.outputs[0].number
    assert readers_of(pair.program, last) >= {"output"}
    assert readers_of(pair.program, slots["conv1/conv2d"]) == {"relu/relu"}
    site = next(site for site in pair.sites if site.name == "relu/relu")
    assert readers_of(pair.program, site.result) == {"conv2/conv2d", "add"}


def test_only_the_named_readers_have_the_rounded_value() -> None:
    pair = residual_pair()
    values = pair.values(images())
    relu = next(site for site in pair.sites if site.name == "relu/relu")
    every = readers_of(pair.program, relu.result)

    def noise(readers: set[str]) -> float:
        program = with_readers(pair.program, {relu.index: readers})
        outputs = Simulator(program).run(values, on={relu.index})[0].double()
        return float((outputs - pair.simulator.run(values, on=False)[0].double()).square().sum())

    alone = pair.simulator.run(values, on={relu.index})[0].double()
    whole = float((alone - pair.simulator.run(values, on=False)[0].double()).square().sum())
    assert noise(set(every)) == whole > 0
    assert noise(set()) == 0.0
    apart = [noise({reader}) for reader in sorted(every)]
    assert all(0 < each != whole for each in apart)
    assert not math.isclose(*apart)
    rewired = with_readers(pair.program, {relu.index: every})
    assert [(step.reads, step.releases) for step in rewired.steps] == [
        (step.reads, step.releases) for step in pair.program.steps
    ]
