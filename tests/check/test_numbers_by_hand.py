"""Rules on numbers at their limits: of rows, sites and weights that a test makes up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pt2qa._check.products import IntegerProduct
from pt2qa._check.rules import calibration, sites
from pt2qa._simulator.program import Constant, QuantParams
from pt2qa._weights.sums import SumsOfWeights
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def row(name: str = "a", **given: Any) -> Any:
    """The row of a site whose rounding alone leaves 25 dB: a signal of 1 and steps of ``(12 * 10**-2.5)**0.5``."""
    own = {"name": name, "handle": 1, "observed_at": "dq", "zero_point": 0.0, "nonfinite": False}
    own |= {"scale": (12 * 10**-2.5) ** 0.5, "mse": 0.001, "sqnr": 30.0, "rounding_sqnr": 25.0}
    own |= {"saturation": 0.0, "excess_lsb": 0.0, "range_use": 0.5, "ref_min": -1.0, "ref_max": 2.0}
    return SimpleNamespace(**{**own, **given})


class Context(SimpleNamespace):
    """What rules ask for; what is not given is not known."""

    def known(self, what: str) -> Any:
        return getattr(self, what, None)

    def name_of(self, node: Any) -> str:
        return str(node.name)


def of(rule: Rule, *rows: Any, **given: Any) -> list[Found]:
    own = {"layers": SimpleNamespace(rows=rows), "given": "pair", "unshared": frozenset()}
    return list(rule.find(Context(**{**own, **given})))


def test_rows_of_one_value_count_once() -> None:
    """Those of sites with a scale, and without those that pass on another row's values."""
    rows = (
        *(row("a"), row("b"), row("c", handle=2, ref_max=3.0), row("d", ref_min=math.nan)),
        *(row("e", ref_min=math.nan, handle=3), row("f", ref_min=math.nan), row("raw", observed_at="raw")),
        *(row("dynamic", scale=math.nan), row("channels", zero_point=math.nan), row("none", scale=0.0)),
    )
    context: Any = Context(layers=SimpleNamespace(rows=rows))
    names = [each.name for each in sites.site_rows(context)]
    assert names[:2] == ["a", "c"]
    assert {"d", "e"} <= {*names}
    assert not {"b", "raw", "dynamic", "channels", "none"} & {*names}
    assert sites.given_rows(context) == sites.site_rows(context)
    assert sites.given_rows(Context()) == ()  # type: ignore[arg-type]


def test_what_a_clamp_costs() -> None:
    assert sites.clamp_cost(row()) == pytest.approx(0.0, abs=1e-9)
    assert sites.clamp_cost(row(rounding_sqnr=15.0)) == pytest.approx(10.0)
    assert math.isnan(sites.clamp_cost(row(mse=0.0)))
    assert math.isnan(sites.clamp_cost(row(mse=math.inf)))
    assert math.isnan(sites.clamp_cost(row(rounding_sqnr=math.inf)))


def clamped(cost: float, **given: Any) -> Any:
    """A row whose clamping costs so many dB of 25."""
    return row(**{"rounding_sqnr": 25.0 - cost, "saturation": 0.125, "excess_lsb": 7.0, **given})


def test_clamping_is_told_if_it_costs_more_than_a_bit() -> None:
    (found,) = of(sites.saturation, clamped(6.1))
    assert found.why == (
        "12.50 % of its values are clamped (-1..2, up to 7 steps beyond its range), which takes it from 25.0 to 18.9 dB"
    )
    assert found.value == pytest.approx(6.1)
    assert of(sites.saturation, clamped(6.0)) == []
    assert of(sites.saturation, clamped(9.0, saturation=0.0)) == []
    fine = {"scale": row().scale / 10**0.55}  # rounding alone leaves 36 dB
    assert len(of(sites.saturation, clamped(-4.9, **fine))) == 1  # 29.9 dB
    assert of(sites.saturation, clamped(-5.0, **fine)) == []  # 30 dB


def test_outliers_are_told_where_rounding_leaves_less_than_20_db() -> None:
    coarse = {"scale": row().scale * 10**0.255, "rounding_sqnr": 19.9}
    (found,) = of(sites.range_outliers, row(range_use=0.45, **coarse))
    steps = (10**1.99 / 12) ** 0.5
    assert found.why == (
        f"the data spans 45.00 % of its range, and its root mean square is {steps:.1f} steps: rounding leaves 19.9 dB"
    )
    assert found.value == -19.9
    assert of(sites.range_outliers, row(range_use=0.44, **coarse)) == []
    assert of(sites.range_outliers, row(scale=row().scale * 10**0.25, rounding_sqnr=20.0)) == []
    assert of(sites.range_outliers, clamped(6.1)) == []  # the rule saturation's
    assert len(of(sites.range_outliers, clamped(6.0, saturation=0.0))) == 1
    unknown = row(rounding_sqnr=19.0, mse=math.inf)
    assert len(of(sites.range_outliers, unknown)) == 1


def test_a_range_is_told_where_more_than_a_bit_is_unused() -> None:
    (found,) = of(sites.unused_range, row(range_use=0.25, rounding_sqnr=29.9))
    assert (found.why, found.value) == (
        *("the data spans 25.00 % of its range, which costs 2.0 bits and leaves 29.9 dB", 2.0),
    )
    assert len(of(sites.unused_range, row(range_use=0.44))) == 1
    for other in ({"range_use": 0.45}, {"range_use": 0.0}, {"range_use": 0.25, "rounding_sqnr": 30.0}):
        assert of(sites.unused_range, row(**other)) == []


def params(**given: Any) -> QuantParams:
    return QuantParams(**{"dtype": "int8", "scale": 0.5, "zero_point": 3, "quant_min": -128, "quant_max": 127, **given})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ()),
        ({"scale": 0.5 * (1 + 9e-7)}, ()),
        ({"scale": 0.5 * (1 + 2e-6)}, ("scale",)),
        ({"scale": torch.tensor([0.5, 0.5])}, ("scale",)),
        ({"scale": torch.tensor(0.5)}, ()),
        ({"scale": None}, ("scale",)),
        ({"zero_point": 4}, ("zero_point",)),
        ({"axis": 0}, ("axis",)),
        ({"dtype": "uint8", "quant_min": 0, "quant_max": 255}, ("dtype", "quant_min", "quant_max")),
    ],
)
def test_parameters_differ_by_name(change: dict[str, Any], names: tuple[str, ...]) -> None:
    assert sites._differing(params(), params(**change)) == sites._differing(params(**change), params()) == names


def product(
    weight: Tensor, scale: Any, *, name: str = "fc", axis: int | None = None, bias: Any = None, **given: Any
) -> IntegerProduct:
    """A linear whose weight is rounded to steps of a scale, or of one for each row."""
    steps = torch.as_tensor(scale).float()
    quantized = (weight / (steps[:, None] if steps.dim() else steps)).round() * (
        steps[:, None] if steps.dim() else steps
    )
    own = QuantParams("int8", scale, 0, -127, 127, axis)
    constant = Constant(1, weight, quantized)
    made = {"bias": None if bias is None else Constant(2, bias, bias), "bias_params": None, "input_params": None}
    made |= {"output_scale": math.nan, **given}
    return IntegerProduct(name, constant, own, 0, sums=SumsOfWeights(), **made)  # type: ignore[arg-type]


def test_the_numbers_of_a_product() -> None:
    weight = torch.tensor([[1.0, -3.0], [0.0, 0.2], [0.0, 0.0]])
    made = product(weight, torch.tensor([0.5, 0.5, 0.25]), axis=0)
    assert made.weights.tolist() == weight.tolist()
    assert made.scales.tolist() == [0.5, 0.5, 0.25]
    assert made.integers.tolist() == [[2, -6], [0, 0], [0, 0]]
    torch.testing.assert_close(made.largest, torch.tensor([3.0, 0.2, 0.0], dtype=torch.float64))
    assert made.zero.tolist() == [False, True, True]
    assert made.visible.tolist() == [True] * 3
    assert product(weight, 0.5).scales.tolist() == [0.5] * 3


def test_a_channel_is_visible_if_all_its_weights_together_reach_half_a_step() -> None:
    """The input reaches 2: half a step of 1 needs weights of 0.25 together."""
    given = {"input_params": params(scale=0.125, zero_point=111, quant_max=127), "output_scale": 1.0}
    low, high = (-128 - 111) * 0.125, (127 - 111) * 0.125
    reach = max(-low, high)
    needed = 0.5 / reach
    weight = torch.tensor([[0.6, 0.0], [0.6, 0.39], [0.6, 0.41], [1.01, 0.0], [-0.6, -0.41]]) * needed
    made = product(weight, 1e-4, **given)
    assert made.visible.tolist() == [False, False, True, True, True]
    assert product(weight, 1e-4, output_scale=1.0).visible.all()
    assert product(weight, 1e-4, input_params=given["input_params"]).visible.all()


def checked(rule: Rule, *products: IntegerProduct, **given: Any) -> list[Found]:
    weights = [
        SimpleNamespace(
            name=each.name,
            attr="weight",
            quantized=True,
            dead_channels=int(each.zero.sum()),
            shape=tuple(each.weight.reference.shape),
            scale=float(each.scales.max()),
            axis=-1,
            worst_channel_sqnr=19.9,
        )
        for each in products
    ]
    own = {"integer_products": products, "weights": weights, "given": "pair", "pair": SimpleNamespace(sites=[])}
    return list(rule.find(Context(**{**own, **given})))


def ramp(*sizes: float) -> Tensor:
    """Rows of which the largest value is this."""
    return torch.tensor(sizes)[:, None] * torch.tensor([[1.0, -0.5, 0.25]])


def test_channels_of_a_sixteenth_of_the_range_are_counted() -> None:
    sizes = [16.0] * 8 + [1.0, 0.8]
    (found,) = checked(sites.channel_range, product(ramp(*sizes), 0.125))
    assert found.why == "2 of 10 channels have less than 1/16 of the weight's range, the smallest 1/20"
    assert found.value == pytest.approx(0.2)
    assert checked(sites.channel_range, product(ramp(*sizes[:-1], 16.0), 0.125)) == []  # a tenth
    assert checked(sites.channel_range, product(ramp(*[16.0] * 8, 1.01, 1.01), 0.125)) == []
    assert checked(sites.channel_range, product(ramp(*[16.0] * 8, 0.01, 0.01), 0.125)) == []  # dead
    good = [SimpleNamespace(name="fc", attr="weight", worst_channel_sqnr=20.0)]
    assert checked(sites.channel_range, product(ramp(*sizes), 0.125), weights=good) == []
    with pytest.raises(DoesNotApplyError, match="to models without weights that have one scale for the whole"):
        checked(sites.channel_range, product(ramp(1.0), torch.tensor([0.125]), axis=0))


def test_dead_channels_are_those_of_the_product_or_of_the_row() -> None:
    made = product(ramp(16.0, 0.05, 0.0), 0.125)
    (found,) = checked(sites.dead_channel, made)
    assert found.why == "1 of 3 channels of its weight are zero: none of their values reaches half a step of 0.125"
    assert found.fix == sites._ONE_SCALE_FIX
    assert found.value == pytest.approx(1 / 3)
    assert checked(sites.dead_channel, product(ramp(16.0, 0.0), 0.125)) == []  # zero in float
    own = {"name": "lstm", "attr": "weight_ih", "quantized": True, "dead_channels": 3, "scale": 0.25, "axis": 1}
    rows = [SimpleNamespace(shape=(5, 4), **own), SimpleNamespace(shape=(5, 4), **{**own, "dead_channels": 0})]
    (alone,) = checked(sites.dead_channel, weights=rows)
    assert alone.name == "lstm"
    assert alone.why == "3 of 4 channels of its weight_ih are zero: none of their values reaches half a step of 0.25"
    assert alone.fix.startswith("the scale is the smallest that the weight observer gives")
    assert alone.value == 0.75
    (whole,) = checked(sites.dead_channel, weights=[SimpleNamespace(shape=(5, 4), **{**own, "axis": -1})])
    assert "3 of 5 channels" in whole.why
    with pytest.raises(DoesNotApplyError, match="to models without quantized weights"):
        checked(sites.dead_channel, weights=[SimpleNamespace(quantized=False)])


def test_biases_are_counted_in_steps_of_the_sum() -> None:
    most = 2.0**31
    bias = torch.tensor([1.01 * most, 0.99 * most, -2.0 * most]) * 0.25
    given = {"bias": bias, "input_params": params(scale=0.5)}
    made = product(ramp(1.0, 1.0, 1.0), 0.5, **given)
    (found,) = checked(sites.bias_overflow, made)
    assert found.why == (
        f"2 of 3 channels have a bias of up to {2 * most:.2g} steps of 0.25, if the kernel stores it as int32"
    )
    assert (found.severity, found.value) == (None, pytest.approx(2 * most))
    (stored,) = checked(sites.bias_overflow, made, plugin=SimpleNamespace(int32_bias=True))
    assert stored.severity == "error"
    assert stored.why.endswith("steps of 0.25")
    with pytest.raises(DoesNotApplyError, match="to kernels that add the bias in float"):
        checked(sites.bias_overflow, made, plugin=SimpleNamespace(int32_bias=False))
    with pytest.raises(DoesNotApplyError, match="to models without biases of quantized weights"):
        checked(sites.bias_overflow, product(ramp(1.0), 0.5))
    own = product(ramp(1.0, 1.0, 1.0), 0.5, bias=bias, bias_params=params(dtype="int32", scale=0.25))
    assert [each.severity for each in checked(sites.bias_overflow, own)] == ["error"]
    coarse = product(ramp(1.0, 1.0, 1.0), 0.5, bias=bias, bias_params=params(dtype="int32", scale=1.0))
    assert checked(sites.bias_overflow, coarse) == []
    assert checked(sites.bias_overflow, product(ramp(1.0, 1.0, 1.0), 0.5, bias=bias)) == []  # steps are not known
    by_channel = product(ramp(1.0, 1.0, 1.0), torch.tensor([0.5, 0.5, 2.0]), axis=0, **given)
    (one,) = checked(sites.bias_overflow, by_channel)
    assert one.why.startswith("1 of 3 channels")
    assert "steps of 0.25," in one.why
    narrow = product(ramp(1.0, 1.0, 1.0), 0.5, bias=bias, bias_params=params(dtype="int8", scale=0.25))
    assert checked(sites.bias_overflow, narrow) == []


@pytest.mark.parametrize("value", [-1e4, -math.inf, math.inf, math.nan])
def test_masks_are_large_negative_or_no_number(value: float) -> None:
    assert calibration.is_mask(value)
    assert not calibration.is_mask(-9999.0)
    assert not calibration.is_mask(3e38)


def mask(value: float) -> Any:
    return calibration.Mask(value, SimpleNamespace(name="full"))  # type: ignore[arg-type]


def test_the_larger_mask_is_worse_and_an_infinite_one_is_worst() -> None:
    assert [mask(value).severity for value in (-1e4, -math.inf, math.nan)] == [1e4, math.inf, math.inf]


@pytest.mark.parametrize(
    ("value", "low", "high", "why"),
    [
        (None, -1.0, 1.0, ""),
        (None, -9.9e8, 1.0, ""),
        (None, -1e9, 1.0, "one step is 0.5: every other value becomes 0"),
        (None, 0.0, 1e9, "one step is 0.5: every other value becomes 0"),
        (-1e4, -5000.0, 1.0, "one step is 0.5, for -1e+04 from full: every other value becomes 0"),
        (-1e4, -1.0, 5000.0, "one step is 0.5, for -1e+04 from full: every other value becomes 0"),
        (-1e4, -4999.0, 1.0, ""),
        (-math.inf, -1.0, 1.0, "-inf from full reaches it, which integers cannot represent"),
    ],
)
def test_a_range_is_useless_if_a_mask_takes_it(value: float | None, low: float, high: float, why: str) -> None:
    found = calibration._out_of_scale(Context(), None if value is None else mask(value), low, high, 0.5)  # type: ignore[arg-type]
    assert found == why


def site(name: str, index: int, **given: Any) -> Any:
    kind = given.pop("kind", "activation")
    return SimpleNamespace(name=name, kind=kind, op="relu", handle=index, source=index, params=params(**given))


def made_elsewhere(*sites: Any, rows: Any = (), **given: Any) -> list[Found]:
    pair = SimpleNamespace(recipe=None, sites=sites)
    own = {"given": "pair", "pair": pair, "layers": SimpleNamespace(rows=rows)}
    return list(calibration.never_calibrated.find(Context(**{**own, **given})))


def test_scales_of_one_are_those_of_observers_without_values() -> None:
    one, other = site("a", 0, scale=1.0, zero_point=0), site("b", 1)
    assert [(found.name, found.severity) for found in made_elsewhere(one, other)] == [("a", "warning")]
    assert made_elsewhere(site("a", 0, scale=1.0), other) == []  # its zero point is another
    assert made_elsewhere(site("a", 0, zero_point=0), other) == []
    assert made_elsewhere(one, other, rows=[row("a", range_use=0.51)]) == []
    assert len(made_elsewhere(one, other, rows=[row("a", range_use=0.5)])) == 1
    both = made_elsewhere(one, site("b", 1, scale=1.0, zero_point=0))
    assert [(found.name, found.why) for found in both] == [
        ("", "all 2 activations have the scale 1.0 and the zero point 0: nothing was calibrated")
    ]
    with pytest.raises(DoesNotApplyError, match="to models in which each batch sets the scales"):
        made_elsewhere(site("a", 0, kind="weight"), site("b", 1, scale=None))
    own = SimpleNamespace(recipe="pt2qa.quantize", sites=(one, one))
    assert made_elsewhere(pair=own) == []


def degenerate(*sites: Any, products: Any = ()) -> list[Found]:
    context: Any = Context(given="pair", pair=SimpleNamespace(sites=sites), integer_products=products)
    return list(calibration.degenerate_scale.find(context))


@pytest.mark.parametrize("floor", [2.0**-12, torch.finfo(torch.float32).eps])
def test_the_smallest_scale_of_an_observer_is_told(floor: float) -> None:
    (found,) = degenerate(site("a", 0, scale=floor))
    assert found.why == (
        f"its scale {floor:.3g} is the smallest that an observer gives: calibration saw zeros, or values in less than "
        f"the {255 * floor:.2g} that it spans"
    )
    assert degenerate(site("a", 0, scale=floor, kind="weight"), site("b", 1), site("c", 2, scale=None)) == []
    assert len(degenerate(site("a", 0, scale=floor * (1 + 9e-7)))) == 1
    assert degenerate(site("a", 0, scale=floor * (1 - 2e-6)), site("a", 0, scale=floor * (1 + 2e-6))) == []
    assert degenerate(site("a", 0, scale=torch.tensor([floor, 0.5]))) == []


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_not_positive_is_an_error(scale: float) -> None:
    for kind in ("activation", "weight"):
        (found,) = degenerate(site("a", 0, scale=torch.tensor([0.5, scale]), kind=kind))
        assert (found.severity, found.why) == ("error", f"the scale of its {kind} is {scale}")
        assert found.fix.startswith("look for infinite or NaN values")


def test_channels_that_an_eps_holds_are_counted() -> None:
    """Of ten: those with less than 8 steps on each side, for which the scale need not be so large."""
    step = 0.125
    held = 7.9 * step
    fits = 127 * step
    scales = torch.full((10,), step)

    def found(*sizes: float, **given: Any) -> list[Found]:
        return degenerate(products=[product(ramp(*sizes), scales[: len(sizes)], axis=0, **given)])

    (two,) = found(*[fits] * 8, held, held)
    assert two.why == (
        "2 of 10 channels of its weight have the smallest scale that the observer gives, 0.125, and fewer than 8 "
        "steps on each side"
    )
    assert two.value == pytest.approx(0.2)
    assert "give the weight observer a smaller eps" in two.fix
    assert found(*[fits] * 9, held) == []  # a tenth
    assert found(*[fits] * 8, 8.1 * step, 8.1 * step) == []
    assert found(*[fits] * 8, 0.4 * step, 0.4 * step) == []  # zero when rounded
    (zeros,) = found(*[fits] * 8, 0.0, 0.0)
    assert (zeros.why, zeros.severity) == ("2 of 10 channels of its weight are zero in float", "note")
    (single,) = degenerate(products=[product(ramp(0.0), torch.tensor([step]), axis=0)])
    assert single.why == "its weight is zero"
    assert degenerate(products=[product(ramp(*[fits] * 8, held, held), step)]) == []  # one scale
    hidden = {"input_params": params(scale=1e-9), "output_scale": 1.0}
    assert found(*[fits] * 8, held, held, **hidden) == []
    # What a channel of -127..127 uses: the largest value is 127 steps; below 126 / 1.01 it is held by the eps.
    few = QuantParams("int8", scales, 0, -7, 7, 0)
    made = product(ramp(*[6.95 * step] * 8, 7.0 * step, 7.0 * step), scales, axis=0)
    object.__setattr__(made, "weight_params", few)
    assert degenerate(products=[made]) == []
    low = product(ramp(*[6.95 * step] * 8, 6.9 * step, 6.9 * step), scales, axis=0)
    object.__setattr__(low, "weight_params", few)
    assert [each.value for each in degenerate(products=[low])] == [pytest.approx(0.2)]


def nonfinite(*sites: Any, rows: Any = (), constants: Any = (), masks: Any = None) -> list[Found]:
    program = SimpleNamespace(constants=constants)
    pair = SimpleNamespace(sites=sites, program=program, reference="graph")
    context: Any = Context(given="pair", pair=pair, layers=SimpleNamespace(rows=rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "masks_in", lambda graph: _Nodes(masks or {}))
        patch.setattr(calibration, "handle_of", lambda node: node.handle)
        return list(calibration.nonfinite_observed.find(context))


class _Nodes:
    """Nodes with handles and what masks they hold."""

    def __init__(self, masks: dict[int, Any]) -> None:
        self.masks = masks

    def items(self) -> list[Any]:
        return [(SimpleNamespace(op="call_function", handle=key), each) for key, each in self.masks.items()]


def test_masks_at_sites_are_told_by_what_becomes_of_them() -> None:
    low, high = -131 * 0.5, 124 * 0.5
    one = site("a", 0)
    assert nonfinite(one) == []
    for value, becomes in (
        (-math.inf, f": it becomes {low:.3g}"),
        (math.inf, f": it becomes {high:.3g}"),
        (math.nan, ""),
    ):
        (found,) = nonfinite(one, masks={0: mask(value)})
        assert found.why == f"{value:.3g} from full reaches it, which integers cannot represent{becomes}"
        assert (found.value, found.severity) == (math.inf, None)
    (taken,) = nonfinite(site("a", 0, scale=100.0), masks={0: mask(-2e4)})
    assert taken.why == "one step is 100, for -2e+04 from full: every other value becomes 0"
    assert taken.value == 13100.0
    (clamped,) = nonfinite(one, masks={0: mask(-2e4)})
    assert (clamped.why, clamped.severity, clamped.value) == (
        *(f"-2e+04 from full is clamped to {low:.3g}", "warning", 0.0),
    )
    assert nonfinite(one, masks={1: mask(-2e4)}) == []
    weight, dynamic = site("w", 0, kind="weight"), site("d", 0, scale=None)
    assert nonfinite(weight, dynamic, masks={0: mask(-math.inf)}) == []


def test_values_that_are_no_numbers_are_told_at_sites() -> None:
    one = site("a", 0)
    (found,) = nonfinite(one, rows=[row("a", nonfinite=True)])
    assert (found.why, found.value) == ("infinite or NaN values reach it, which integers cannot represent", math.inf)
    assert found.fix == "look for NaN and infinity in the weights and in the data"
    constant = Constant(0, torch.tensor([0.0, math.inf]), torch.zeros(2), attribute="bias_of")
    (stored,) = nonfinite(one, constants=[constant], masks={0: mask(-2e4)})
    assert stored.name == "bias_of"
    fine = Constant(0, torch.zeros(2), torch.zeros(2), attribute="bias_of")
    assert nonfinite(one, constants=[fine], masks={0: mask(-2e4)}, rows=[row("a", nonfinite=True)]) == []


def test_masks_are_followed_from_where_they_are_put_in() -> None:
    """Through ops that pass values on, the largest one; other numbers, and ops that compute, are left out."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    root.mask, root.small = torch.nn.Buffer(torch.tensor([0.0, -1e5])), torch.nn.Buffer(torch.tensor([0.0, -9.0]))
    root.empty, root.whole = torch.nn.Buffer(torch.tensor([])), torch.nn.Buffer(torch.tensor([-(10**6)]))
    x, stored, small = graph.placeholder("x"), graph.get_attr("mask"), graph.get_attr("small")
    empty, whole = graph.get_attr("empty"), graph.get_attr("whole")
    filled = graph.call_function(aten.masked_fill.Scalar, (x, x, -2e4))
    keyword = graph.call_function(aten.full.default, ([2], -1e6), {"pin_memory": True})
    few = graph.call_function(aten.masked_fill.Scalar, (x, x, -30.0))
    added = graph.call_function(aten.add.Tensor, (filled, stored))
    large = graph.call_function(aten.add.Tensor, (x, -1e9))  # what is added is no fill
    computed = graph.call_function(aten.softmax.int, (added, -1))
    moved = graph.call_function(aten.view.default, (added, [2]))
    observer = graph.call_module("small", (moved,))
    graph.output((computed, observer, keyword, few, small, empty, whole, large))
    found = calibration.masks_in(torch.fx.GraphModule(root, graph))
    expected = {filled: (-2e4, filled), keyword: (-1e6, keyword), stored: (-1e5, stored)}
    expected |= dict.fromkeys((added, moved, observer), (-1e5, stored))
    assert {node: (pytest.approx(value), origin) for node, (value, origin) in expected.items()} == {
        node: (mask.value, mask.origin) for node, mask in found.items()
    }


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [(-1.0, 2.0, 1), (math.inf, -math.inf, 0), (-math.inf, math.inf, 1), (math.inf, 2.0, 1), (-1.0, -math.inf, 1)],
)
def test_observers_that_saw_nothing_hold_infinities(low: float, high: float, kept: int) -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    observer = SimpleNamespace(min_val=torch.tensor(low), max_val=torch.tensor(high), quant_min=-100, quant_max=99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "range_keeper", lambda module: observer)
        patch.setattr(calibration, "find_observers", lambda prepared: {"o": graph.call_module("o", (node,))})
        prepared: Any = SimpleNamespace(named_modules=lambda remove_duplicate: [("o", observer)])
        (found,) = calibration.observed(prepared)
        assert (found.source, found.integers, len(found.low), len(found.high)) == (node, 200, kept, kept)
        assert found.low.tolist() + found.high.tolist() == [low, high] * kept
        observer.min_val, observer.max_val = torch.tensor([low, -1.0]), torch.tensor([high, 1.0])
        assert len(calibration.observed(prepared)[0].low) == 2  # a channel saw a value
        del observer.quant_min, observer.quant_max
        assert calibration.observed(prepared)[0].integers == 256
        observer.is_dynamic = True
        assert calibration.observed(prepared) == ()
