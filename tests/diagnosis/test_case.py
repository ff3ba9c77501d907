"""The measurements of a case, recomputed: ranges, substitutes, noise, which data are which."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pt2qa._diagnosis.case import Case, is_alike, observed_together, weight_axis
from pt2qa._ranks import NoBatchError
from pt2qa._sensitivity.ranges import Observed
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.data import Data
from pt2qa._simulator.program import QuantParams
from pt2qa._trials.treatment import Substitute, Treatment, with_params
from tests.diagnosis import facts
from tests.diagnosis.facts import Changed, case_of, joined, judged_by, seen, with_facts
from tests.flows import quantized_pair


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_noise_is_a_share_of_the_signal() -> None:
    case = joined("xnnpack")
    made = with_facts(case)
    made.known_noises = facts.noises({0: 3.0, (0, "fitted"): 1.0, 8: 1.0, (8, "fitted"): 4.0}, signal=2.0)
    assert [made.noise(0), made.noise(0, "fitted"), made.noise(0, "by channel")] == [1.5, 0.5, 1.5]
    assert made.noise(2) == 0.0
    assert [made.excess(0), made.excess(8), made.excess(2)] == [1.0, 0.0, 0.0]
    assert made.total_noise == 2.0
    assert made.share(made.excess, [0, 8]) == 0.5
    assert made.share(made.noise, [0, 8]) == 1.0
    silent = with_facts(case)
    silent.known_noises = facts.noises({0: 3.0}, signal=0.0)
    assert silent.noise(0) == 3.0
    assert with_facts(case).share(lambda site: 0.0, [0]) == 0.0


def test_sites_are_ranked_up_to_nine_tenths() -> None:
    case = joined("xnnpack")
    noise = {0: 0.2, 2: 0.5, 4: 0.2, 6: 0.1, 8: 0.0}
    made = with_facts(case, noise)
    assert made.ranked([0, 2, 4, 6, 8], made.noise) == [2, 0, 4]  # of equals, the first in the graph first
    assert made.ranked([0, 6, 8], made.noise) == [0, 6]
    assert made.ranked([8], made.noise) == made.ranked([], made.noise) == []
    assert made.ranked([0, 2], lambda site: -1.0) == []
    assert made.ranked([0, 4], lambda site: {0: 9.0, 4: 1.0}[site]) == [0]
    assert made.names([4, 5, 4]) == ("b/linear", "cat")


def test_a_row_is_in_the_words_of_its_cause_or_its_own() -> None:
    made = facts.Hypothesis("bias", "", "", "", Treatment())
    assert made.in_words == "quantization shifts the mean of op outputs"
    assert replace(made, sentence="own").in_words == "own"


def test_ranges_are_those_of_the_float_model() -> None:
    """Recomputed from the modules, by batch and by channel; each fold of the data is fitted to the other one."""
    case = joined("xnnpack")
    made = Case(case.pair, case.judge, case.data, case.now)
    program: Any = case.pair.reference
    before = case.judge.forwards
    inputs = case.data.batches
    outputs = [program(batch) for batch in inputs]
    assert case.judge.forwards == before
    order = [0, 2, 1, 3]  # the even batches are one fold, the odd ones the other
    ranges = made.ranges
    assert case.judge.forwards == before + 4
    assert set(ranges) == {0, 2, 4, 5, 6, 8}
    for site, values in ((0, inputs), (8, outputs)):
        assert ranges[site].lowest == pytest.approx([float(values[at].min()) for at in order], rel=1e-5)
        assert ranges[site].highest == pytest.approx([float(values[at].max()) for at in order], rel=1e-5)
        channels = ranges[site].channels
        assert channels is not None
        whole = torch.cat(list(values))
        torch.testing.assert_close(channels[0], whole.amin(0))
        torch.testing.assert_close(channels[1], whole.amax(0))
    assert made.ranges is ranges
    whole, without_even, without_odd = made.seen_for(0)
    assert whole is ranges[0]
    assert len(without_even.lowest) == len(without_odd.lowest) == 2
    assert without_even.highest == [float(inputs[at].max()) for at in (1, 3)]
    assert without_odd.highest == [float(inputs[at].max()) for at in (0, 2)]


def test_data_apart_are_seen_whole_and_with_each_fold() -> None:
    case = joined("xnnpack")
    assert not case.is_judged_apart
    others = list(torch.rand(3, 8, 8))
    apart = case_of(case.pair, case.data.batches, others)
    assert apart.is_judged_apart
    before = apart.judge.forwards
    own = [float(batch.max()) for batch in case.data.batches]
    more = [float(batch.max()) for batch in others]
    assert apart.ranges[0].highest == own
    assert apart.judge.forwards == before + 4
    whole, without_even, without_odd = apart.seen_for(0)
    assert whole.highest == own
    assert without_even.highest == [*own, more[1]]
    assert without_odd.highest == [*own, more[0], more[2]]
    assert apart.judge.forwards == before + 7
    for count, folds in ((1, 0), (2, 2)):  # one batch has no folds
        assert len(case_of(case.pair, case.data.batches[:count]).seen_for(0)) == 1 + folds
    one = case_of(case.pair, case.data.batches[:1])
    assert one.ranges[0].highest == own[:1]


def test_which_data_calibrated_the_pair() -> None:
    case = joined("xnnpack")
    batches = case.data.batches
    others = list(torch.rand(2, 8, 8))

    def facts_of(own: Any, evaluation: Any = None, calibration: Any = batches) -> tuple[bool, bool, bool]:
        made = case_of(case.pair, own, evaluation)
        recipe = made.judge.recipe
        assert recipe is not None
        data = None if calibration is None else Data("calibration", calibration)
        changed = judged_by(made, pair=replace(case.pair, recipe=replace(recipe, data=data)))
        return changed.is_calibrated_on_others, changed.is_judged_on_calibration, bool(changed.seen)

    assert facts_of(batches) == (False, True, False)
    assert facts_of(batches[:2]) == (True, True, True)
    assert facts_of([*batches, *others]) == (True, False, True)
    assert facts_of(others, batches[:1]) == (True, True, True)
    assert facts_of(batches, others) == (False, False, False)
    assert facts_of([*batches, torch.zeros(0, 8)]) == (False, True, False)  # an empty batch is none
    assert facts_of(batches, calibration=None) == (False, False, False)
    foreign = judged_by(case, pair=replace(case.pair, recipe=None))
    assert (foreign.is_calibrated_on_others, foreign.is_judged_on_calibration, foreign.seen) == (False, False, {})
    assert foreign.options == {}
    assert foreign.annotations is None
    assert foreign.fusions == ()
    assert case.options["per_channel"] is True
    treated = Case(case.pair, case.judge, Data("batches", others), case.now, Treatment(data=Data("x", others)))
    assert treated.seen == {}


def test_what_calibration_saw_is_in_its_batches() -> None:
    case = joined("xnnpack")
    made = Case(case.pair, case.judge, Data("batches", [torch.randn(4, 8)]), case.now)
    before = case.judge.forwards
    assert made.seen[0].highest == [float(batch.max()) for batch in case.data.batches]
    assert case.judge.forwards == before + 4


def test_the_first_batch_has_samples() -> None:
    case = joined("xnnpack")
    batch = torch.randn(3, 8)
    made = Case(case.pair, case.judge, Data("batches", [torch.zeros(0, 8), batch]), case.now)
    assert torch.equal(case.pair.values(made.first)[0], batch)
    with pytest.raises(NoBatchError, match="no batch with samples to diagnose"):
        Case(case.pair, case.judge, Data("batches", [torch.zeros(0, 8)]), case.now).first  # noqa: B018


def test_the_ranges_of_the_data_in_place_of_those_of_sites() -> None:
    """The scale covers zero and all values, by hand; without each fold, those of the other batches."""
    case = joined("xnnpack")
    own = {index: seen((-1.0, 3.0), (-2.0, 2.0)) for index in (0, 2, 4, 5, 6, 8)}
    own[4] = seen((0.5, 1.0))
    own[8] = Observed()
    made = with_facts(case, ranges=own, _folds=({0: seen((-1.0, 3.0))}, {0: seen((-2.0, 2.0))}))
    made._folds = tuple({**own, **fold} for fold in made._folds)  # type: ignore[misc]
    assert set(made.fitted) == {0, 2, 4, 5, 6}  # of the last nothing was seen
    params = made.fitted[0].params
    assert params is not None
    assert (params.quant_min, params.quant_max, params.axis) == (-128, 127, None)
    assert params.scale == pytest.approx(5 / 255)
    assert limits(params) == pytest.approx((-2.0, 3.0), abs=5 / 255)
    value = torch.linspace(-4, 4, 33)
    steps = [(ends[1] - ends[0]) / 255 for ends in ((-2.0, 3.0), (-2.0, 2.0), (-1.0, 3.0))]
    for rounded, step, ends in zip(
        (made.fitted[0].value, *made.fitted[0].apart), steps, ((-2, 3), (-2, 2), (-1, 3)), strict=True
    ):
        torch.testing.assert_close(rounded(value.clone()), value.clamp(*ends), atol=1.01 * step, rtol=0)
        assert float(rounded(value.clone()).max()) == pytest.approx(ends[1], abs=step)
        assert float(rounded(value.clone()).min()) == pytest.approx(ends[0], abs=step)
    positive = made.fitted[4].params
    assert positive is not None
    assert positive.scale == pytest.approx(1 / 255)


def test_a_range_for_each_channel() -> None:
    case = joined("xnnpack")
    own = {index: seen((-1.0, 3.0)) for index in (0, 2, 4, 5, 6, 8)}
    own[0] = seen((-1.0, 3.0), channels=([-1.0, 0.0, -0.5], [0.5, 3.0, 0.0]))
    made = with_facts(case, ranges=own, _folds=())
    assert set(made.by_channel) == set(made.fitted)
    assert made.by_channel[2] is made.fitted[2]
    params = made.by_channel[0].params
    assert params is not None
    assert params.axis == 1
    torch.testing.assert_close(
        torch.as_tensor(params.scale).float(), torch.tensor([1.5, 3.0, 0.5]) / 255, rtol=1e-4, atol=0
    )


def test_weights_in_place_are_int8_by_output_channel() -> None:
    case = joined("xnnpack")
    assert set(case.fitted_weights) == {1, 3, 7}
    weight = case.constants[3].reference.detach()
    params = case.fitted_weights[3].params
    assert params is not None
    assert (params.quant_min, params.quant_max, params.axis) == (-127, 127, 0)
    scale = torch.as_tensor(params.scale)
    torch.testing.assert_close(scale.float(), weight.abs().amax(1) / 127, rtol=1e-5, atol=0)
    rounded = case.fitted_weights[3].value(weight.clone())
    torch.testing.assert_close(rounded, (weight / scale[:, None]).round() * scale[:, None], check_dtype=False)
    other: Any = Changed(case.constants[3], quantized=torch.ones(16, 16))
    of_float = with_facts(case, constants={**case.constants, 3: other}).fitted_weights[3].params
    assert of_float is not None
    assert torch.equal(torch.as_tensor(of_float.scale), scale)
    wide = facts.with_params(case, {3: {"dtype": "int16"}, 1: {"dtype": "uint8"}})
    assert set(wide.fitted_weights) == {1, 7}
    plain = joined("plain")
    assert set(plain.fitted_weights) == {1, 5, 9}  # no biases
    assert plain.constant(plain.pair.sites[0]) is None
    integers: Any = Changed(case.constants[3], reference=torch.zeros(2, 2, dtype=torch.int8))
    assert with_facts(case, constants={3: integers}).constant(case.pair.sites[3]) is None
    number: Any = Changed(case.constants[3], reference=1.0)
    assert with_facts(case, constants={3: number}).constant(case.pair.sites[3]) is None


def test_sites_whose_parameters_are_fixed() -> None:
    case = joined("xnnpack")
    assert [site.index for site in case.static_sites] == [0, 2, 4, 5, 6, 8]
    changed = {0: {"dynamic": True}, 2: {"scale": None}, 4: {"dtype": "int16"}, 8: {"dtype": "uint8"}}
    assert [site.index for site in facts.with_params(case, changed).static_sites] == [5, 6, 8]


@pytest.mark.parametrize(("width", "outliers"), [(0.99, True), (1.01, False)])
def test_channels_may_be_outliers_where_half_are_far_smaller(width: float, outliers: bool) -> None:
    """The square root of a tenth of the range: that of the values, or of the site where it is wider."""
    case = joined("xnnpack")
    part = 0.1**0.5 * width
    own = facts.with_params(case, {8: {"scale": 4.0 / 255}})
    for ends in ((-3.0, 2.0), (-0.5, 0.5)):  # a range of 5, and the site's own of 4
        size = part * max(ends[1] - ends[0], 4.0)
        for low, high in ((-size / 2, size / 2), (0.1, size), (-size, -0.1)):
            channels = ([ends[0], low, low], [ends[1], high, high])
            made = with_facts(
                own,
                ranges={8: seen(ends, channels=channels)},
                by_channel={8: Substitute(torch.neg)},
                needless=(),
            )
            site = made.pair.sites[8]
            assert made._may_have_outliers(site) == outliers
            assert not made._may_have_outliers(made.pair.sites[0])
            made.needless = (8,)
            assert not made._may_have_outliers(site)
            made.needless, made.by_channel = (), {}
            assert not made._may_have_outliers(site)
    no_channels = with_facts(own, ranges={8: seen((-1.0, 1.0))}, by_channel={8: 1}, needless=())
    assert not no_channels._may_have_outliers(own.pair.sites[8])


class Clips(nn.Module):
    """Each linear is read by an activation; that of the second by another op, too, and that of the third is no clip."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = (linear(x) for linear in self.linears)
        return one.relu() + two.relu() + two + three.tanh() + four.clamp(-1.0, 1.0)


@pytest.mark.parametrize(("ops", "needless"), [(("linear", "relu", "clamp"), (0, 3)), (("linear", "relu"), (0,))])
def test_what_an_activation_clips_is_rounded_needlessly(ops: tuple[str, ...], needless: tuple[int, ...]) -> None:
    x = torch.randn(4, 4)
    quantizer = facts.PlainQuantizer(ops, inputs=facts.EXACT, outputs=facts.EXACT)
    case = case_of(quantized_pair(Clips(), x, quantizer), [x])
    assert [case.pair.sites[index].name for index in case.needless] == [f"linears.{at}/linear" for at in needless]


def test_substitutes_are_played_at_their_places() -> None:
    case = joined("xnnpack")
    own = {index: Substitute(torch.neg) for index in (0, 8)}
    assert case.played(own) == Treatment(played=((case.places[0], own[0]), (case.places[8], own[8])))
    assert case.played(own, [8, 2]) == Treatment(played=((case.places[8], own[8]),))


def test_ranges_are_put_together_batch_by_batch() -> None:
    one, two = (seen((-1.0, 1.0), channels=([-1.0], [high])) for high in (1.0, 2.0))
    whole = observed_together([one, two])
    assert (whole.lowest, whole.highest) == ([-1.0, -1.0], [1.0, 1.0])
    assert whole.channels is not None
    assert whole.channels[1].tolist() == [2.0]
    assert one.lowest == [-1.0]  # the parts stay as they are


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({}, True),
        ({"scale": 0.1009}, True),  # by less than a hundredth
        ({"scale": 0.1011}, False),
        ({"zero_point": 101}, True),
        ({"zero_point": 102}, False),
        ({"quant_min": -127}, True),  # one step
        ({"quant_min": -126}, False),
        ({"quant_max": 126}, True),
        ({"quant_max": 125}, False),
        ({"axis": 0}, False),
        ({"scale": None}, False),
        ({"zero_point": None}, False),
        ({"scale": torch.tensor([0.1]), "zero_point": torch.tensor([100])}, False),
    ],
)
def test_parameters_are_alike_but_for_a_step_at_the_ends(change: dict[str, Any], alike: bool) -> None:
    base = QuantParams("int8", 0.1, 100, -128, 127)
    own: Any = Changed(None, params=replace(base, **change))
    other = Changed(None, params=base)
    if not isinstance(change.get("scale"), Tensor):
        assert is_alike(own, with_params(base)) == alike
    if change.get("scale", 0) is not None and change.get("zero_point", 0) is not None and "axis" not in change:
        assert is_alike(other, Substitute(torch.neg, own.params)) == alike  # type: ignore[arg-type]
    assert not is_alike(own, Substitute(torch.neg))


@pytest.mark.parametrize(
    ("op", "dims", "axis"),
    [("linear", 2, 0), ("conv2d", 4, 0), ("conv_transpose2d", 4, 1), ("linear", 1, None), ("linear", 0, None)],
)
def test_the_axis_of_output_channels(op: str, dims: int, axis: int | None) -> None:
    constant: Any = Changed(None, op=op, reference=torch.zeros((2,) * dims))
    assert weight_axis(constant) == axis
    assert weight_axis(Changed(None, op=op, reference=2.0)) is None  # type: ignore[arg-type]


def test_variants_are_what_is_played_and_the_mechanisms() -> None:
    """What is fitted only where it differs and was measured to help."""
    case = joined("xnnpack")
    far = {index: with_params(replace(case.pair.sites[index].params, scale=9.0)) for index in (0, 2)}
    near = {8: with_params(case.pair.sites[8].params)}
    made = with_facts(case, fitted={**far, **near}, fitted_weights={}, by_channel=far, ranges={}, needless=())
    mechanisms = ["activation rounding", "activation clamping"]

    def names(index: int) -> list[str]:
        return list(made._variants(case.pair.sites[index]))

    assert names(0) == ["quantized", *mechanisms]
    made.instead = frozenset({"fitted"})
    assert names(0) == ["quantized", "fitted", *mechanisms]
    assert names(8) == names(4) == ["quantized", *mechanisms]
    assert names(1) == ["quantized", "weight rounding", "weight clamping"]
    channels = ([-9.0, 0.0, 0.0], [9.0, 0.1, 0.1])
    made.ranges = {0: seen((-9.0, 9.0), channels=channels)}
    assert names(0) == ["quantized", "fitted", *mechanisms]
    made.instead = frozenset({"fitted", "by channel"})
    assert names(0) == ["quantized", "fitted", "by channel", *mechanisms]
    made.instead = frozenset({"by channel"})
    assert names(0) == ["quantized", "by channel", *mechanisms]
    value = torch.tensor([20.0])
    assert made._variants(case.pair.sites[0])["by channel"].end(value.clone()).tolist() == [18.0]
    treated = Case(case.pair, case.judge, case.data, case.now, Treatment(as_deployed=True))
    assert list(treated._variants(case.pair.sites[0])) == ["quantized"]


def test_the_noise_of_another_pair_is_its_own() -> None:
    """Of the pair after edits, say, which the judge has not run."""
    case = joined("xnnpack")
    coarse = joined("x86")
    own = Case(coarse.pair, case.judge, case.data, case.now)
    batches = torch.cat(list(case.data.batches))
    noise = (coarse.pair.reference(batches) - coarse.pair.quantized(batches)).double().square().sum()
    assert own.noises.measured == pytest.approx(float(noise), rel=1e-3)


def test_costs_are_counted_in_one_run_unless_they_are_known() -> None:
    case = joined("xnnpack")
    before = case.judge.forwards
    made = Case(case.pair, case.judge, case.data, case.now)
    assert made.budget is None
    macs = {"a/linear": 2 / 7, "b/linear": 4 / 7, "c/linear": 1 / 7}
    assert {op: share for op, share in made.costs.macs.items() if share} == pytest.approx(macs)
    assert case.judge.forwards == before + 1
    known = with_facts(case)
    (step,) = (step.index for step in case.pair.program.steps if step.name == "c/linear" and step.site is None)
    known.known_noises = replace(facts.noises({}), flops={step: 8})
    assert {op: share for op, share in known.costs.macs.items() if share} == {"c/linear": 1.0}
    assert case.judge.forwards == before + 1


def test_a_fault_is_looked_for_where_outputs_have_no_number() -> None:
    case = joined("xnnpack")
    assert case.fault is None
    nan = torch.full((8, 8), math.nan)
    made = Case(case.pair, case.judge, Data("batches", [case.data.batches[0], nan]), case.now)
    made.now = replace(case.now, outputs=(("output", math.nan),))
    fault = made.fault
    assert fault is not None
    assert (fault.batch, fault.side) == (1, "batch")
