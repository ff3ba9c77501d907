"""What is told of single sites: masks, smallest scales, unused integers, ranges that do not fit, outlier channels.

The sites of ``joined("xnnpack")`` are the input (0), a relu (2), a linear (4), their concatenation (5) and a slice of
it (6), the output (8), and three weights (1, 3, 7); those from 2 to 5 share a scale.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pt2qa._diagnosis.case import Case
from pt2qa._diagnosis.hypotheses import sites
from pt2qa._simulator.accumulate import limits
from pt2qa._trials.treatment import Substitute, Treatment, with_params
from pt2qa.overrides.plan import Edit
from tests.diagnosis import facts
from tests.diagnosis.facts import Changed, joined, played, said, seen, with_facts

MACS = {"a/linear": 2 / 7, "b/linear": 4 / 7, "c/linear": 1 / 7}
SHARED = ("relu", "b/linear", "cat")


def ranges(**own: tuple[float, float]) -> dict[int, Any]:
    """Of all sites -1 to 1 but some, by ``s`` and their index."""
    return {index: seen(own.get(f"s{index}", (-1.0, 1.0))) for index in (0, 2, 4, 5, 6, 8)}


def place(case: Case, index: int) -> Any:
    return case.places[index]


def double(*indices: int) -> dict[int, Substitute]:
    return {index: Substitute(lambda value: 2 * value) for index in indices}


def test_masks_are_one_hypothesis_and_its_edits_free_each_once() -> None:
    case = joined("xnnpack")

    def found(**lows: tuple[float, float]) -> Any:
        return list(sites.masked(with_facts(case, ranges=ranges(**lows))))

    assert found() == found(s2=(-9999.0, 1.0)) == []
    (mask,) = found(s2=(-1e4, 1.0), s4=(-math.inf, 1.0))
    scale = case.pair.sites[2].params.largest_scale
    edit = Edit("float", ("relu", "b/linear", "cat"))  # which frees both
    expected = {
        "cause": "masked-values",
        "name": "relu",
        "others": ("relu", "b/linear"),
        "evidence": f"values down to -1e+04 give a scale of {scale:.4g}, which leaves few integer values for "
        "ordinary scores",
        "remedy": "use a mask value that is only a little below the scores, such as -30, or keep the ops in float "
        f"({edit})",
    }
    cost = pytest.approx(MACS["b/linear"])
    assert said(mask) == {**expected, "cost": cost}
    assert mask.treatment == Treatment(floats=(edit,))
    (both,) = found(s0=(-1e9, 1.0), s8=(-1e9, 1.0))
    assert both.treatment.floats == (Edit("float", ("a/linear",)), Edit("float", ("c/linear",)))
    assert both.remedy.endswith("keep the ops in float (float: a/linear) (float: c/linear)")
    assert both.cost == pytest.approx(MACS["a/linear"] + MACS["c/linear"])
    assert both.name == "x"
    made = with_facts(case, ranges=ranges(s2=(-1e4, 1.0), s4=(-1e4, 1.0)), annotations=None)
    (exact,) = sites.masked(made)
    assert exact.treatment == Treatment(exact=frozenset({place(case, 2), place(case, 4)}))
    assert (exact.cost, exact.remedy[-9:]) == (0.0, " in float")


def test_the_mask_that_is_named_is_no_constant() -> None:
    made = with_facts(joined("xnnpack"), ranges=ranges(s0=(-1e4, 1.0), s6=(-1e4, 1.0)), constants={0: None})
    (mask,) = sites.masked(made)
    assert mask.name == "slice_1"
    made.constants = {0: None, 6: None}  # type: ignore[dict-item]
    (mask,) = sites.masked(made)
    assert mask.name == "x"


def test_a_constant_mask_is_told_with_its_own_value() -> None:
    held: Any = SimpleNamespace(reference=torch.tensor([0.0, -3e4]), quantized=torch.tensor([0.0, -2e4]))
    (mask,) = sites.masked(with_facts(joined("xnnpack"), ranges=ranges(), constants={0: held}))
    assert (mask.name, mask.others) == ("x", ("x",))
    assert mask.evidence.startswith("values down to -3e+04 give a scale of")


@pytest.mark.parametrize("floor", [2.0**-12, torch.finfo(torch.float32).eps])
def test_a_smallest_scale_is_at_fault_where_values_span_less_than_half_of_its_integers(floor: float) -> None:
    case = facts.with_params(joined("xnnpack"), {index: {"scale": floor} for index in (0, 4, 8)})
    half = floor * 255 / 2
    own = ranges(s0=(-0.99 * half, 0.0), s4=(-0.1 * half, 0.91 * half), s8=(0.3 * half, 0.5 * half))
    made = with_facts(case, {0: 0.3, 4: 0.9, 8: 0.2}, ranges=own, fitted=double(0, 4, 8), fitted_weights={})
    (found,) = sites.floored(made)
    text = "int8: x, c/linear"
    assert said(found) == {
        "cause": "observer",
        "name": "x",
        "others": ("x", "c/linear"),
        "evidence": f"the scale of 2 sites is {floor:.4g}, the observer's eps, and the values need a smaller one",
        "remedy": f"configure these observers with a smaller eps, such as observer.with_args(eps=1e-9) ({text})",
        "audited": True,
        "sentence": "the observer's smallest scale, its eps, is too large for the values",
    }
    assert found.treatment == Treatment(edits=(Edit("int8", ("x", "c/linear")),))
    assert found.preview is not None
    assert played(found.preview, torch.ones(1)) == {place(case, 0): [2.0], place(case, 8): [2.0]}
    far = with_facts(case, ranges=ranges(s0=(1.01 * half, 1.02 * half)), fitted=double(0), fitted_weights={})
    assert list(sites.floored(far)) == []  # zero is in every range
    zero = with_facts(case, ranges=ranges(s0=(0.0, 0.0)), fitted=double(0), fitted_weights={})
    assert list(sites.floored(zero)) == []  # all zeros need no scale
    other = with_facts(case, ranges=ranges(s0=(-1e-9, 1e-9)), fitted=double(4), fitted_weights={})
    assert list(sites.floored(other)) == []  # nothing fits it


def test_a_scale_by_channel_is_the_smallest_in_most_channels() -> None:
    floor = 2.0**-12
    for scales, expected in (([floor, floor, 1.0], True), ([floor, 1.0, 1.0], False), ([floor, 1.0], False)):
        assert sites._is_at_floor(torch.tensor(scales)) == expected
    assert sites._is_at_floor(floor * (1 + 9e-7))
    assert not sites._is_at_floor(floor * (1 + 2e-6))
    assert not sites._is_at_floor(floor * (1 - 2e-6))


def test_a_weight_at_the_smallest_scale_is_seen_by_its_values() -> None:
    case = facts.with_params(joined("xnnpack"), {1: {"scale": torch.full((16,), 2.0**-12)}})
    constant = case.constants[1]
    size = 2.0**-12 * 254 / 4  # a weight's range has two sides

    def found(largest: float) -> bool:
        value = constant.reference.detach().clamp(-1e-9, 1e-9)
        value[0, 0] = -largest
        made = with_facts(case, constants={1: Changed(constant, reference=value)})
        return sites.is_floored(made, case.pair.sites[1])

    assert found(0.99 * size)
    assert not found(1.01 * size)
    assert not sites.is_floored(case, joined("x86").pair.sites[1])


@pytest.mark.parametrize(
    ("dtype", "low", "high", "option", "unused"),
    [
        ("int8", -128, 127, None, False),
        ("int8", -127, 127, None, False),  # symmetric
        ("int8", -126, 127, None, True),
        ("uint8", 0, 127, None, True),
        ("uint8", 0, 127, True, False),  # asked for
        ("uint8", 0, 127, False, True),
        ("int32", 0, 127, None, False),
    ],
)
def test_integers_that_a_spec_leaves_out(dtype: str, low: int, high: int, option: Any, unused: bool) -> None:
    params = {"dtype": dtype, "quant_min": low, "quant_max": high}
    case = facts.with_params(joined("xnnpack"), {0: params, 8: params})
    made = with_facts(case, ranges=ranges(), options={} if option is None else {"reduce_range": option})
    assert sites.has_unused_levels(made, made.pair.sites[0]) == unused
    found = list(sites.unused_levels(made))
    assert len(found) == unused
    if unused:
        (found_one,) = found
        assert said(found_one) == {
            "cause": "activation-scheme",
            "name": "x",
            "others": ("x", "c/linear"),
            "evidence": f"2 sites with a reduced integer range; here {dtype} {low}..{high}",
            "remedy": "annotate the full range of the dtype (quant_min, quant_max) (int8: x, c/linear)",
            "audited": True,
        }
        assert found_one.preview is not None
        steps = {where: each.params for where, each in found_one.preview.played}
        for index in (0, 8):
            own = made.pair.sites[index].params
            lowest, highest = limits(own)
            finer = steps[place(made, index)]
            assert finer is not None
            assert finer.quant_max - finer.quant_min == 255
            assert finer.scale == pytest.approx((max(highest, 0) - min(lowest, 0)) / 255, rel=1e-5)


def fitted(case: Case) -> dict[int, Substitute]:
    return {site.index: with_params(site.params) for site in case.static_sites}


def unfit(noise: dict[Any, float], *, at_fault: bool = False, case: Case | None = None, **given: Any) -> list[Any]:
    case = case or joined("xnnpack")
    made = with_facts(case, noise, **{"ranges": ranges(), "seen": {}, "fitted": fitted(case), **given})
    return list(sites.unfit(made, data_at_fault=at_fault))


def without_fit(**by_site: float) -> dict[Any, float]:
    """Noise of which fitted ranges leave a tenth, by site."""
    own = {int(name[1:]): each for name, each in by_site.items()}
    return {**own, **{(index, "fitted"): each / 10 for index, each in own.items()}}


def where(case: Case, index: int, low: float, high: float) -> str:
    return f"(scale {case.pair.sites[index].params.largest_scale:.4g}, values {low:.4g} to {high:.4g})"


def test_a_range_that_does_not_fit_its_values_is_told_with_them() -> None:
    case = joined("xnnpack")
    assert unfit({8: 2.5, (8, "fitted"): 1.0}) == []
    (found,) = unfit({8: 2.51, (8, "fitted"): 1.0, 0: 3.0, (0, "fitted"): 3.0})
    low, high = limits(case.pair.sites[8].params)
    assert said(found) == {
        "cause": "site-range",
        "name": "c/linear",
        "others": ("c/linear",),
        "evidence": f"values exceed the range by {100 * (max(1 - high, 0) + max(low + 1, 0)) / (high - low):.2f} % "
        f"{where(case, 8, -1, 1)}",
        "remedy": "let calibration choose its range, or fix one that covers its values (int8: c/linear)",
        "share": pytest.approx(1.51 / 5.51),
    }
    assert found.treatment == Treatment(edits=(Edit("int8", ("c/linear",)),))


def test_a_range_that_is_used_in_part_says_how_much() -> None:
    case = joined("xnnpack")
    low, high = limits(case.pair.sites[8].params)
    own = {"ranges": ranges(s8=(low / 4, high / 4))}
    found, *_ = unfit(without_fit(s8=1.0), **own)
    assert found.evidence.startswith("25.00 % of the range used (scale ")
    slightly = {"ranges": ranges(s8=(low, high + 0.009 * (high - low)))}
    assert unfit(without_fit(s8=1.0), **slightly)[0].evidence.startswith("100.90 % of the range used (scale ")
    beyond = {"ranges": ranges(s8=(low, high + 0.011 * (high - low)))}
    assert unfit(without_fit(s8=1.0), **beyond)[0].evidence.startswith("values exceed the range by 1.10 % (scale ")


def test_a_scale_that_several_share_is_told_with_them_and_kept_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    case, own = joined("xnnpack"), 0.5
    monkeypatch.setattr(sites, "_removed", lambda case, treatment: 1.0 if treatment.floats else own)
    found, in_float = unfit(without_fit(s4=1.0))
    assert said(found) == {
        "cause": "shared-scale",
        "name": "b/linear",
        "others": ("b/linear",),
        "evidence": found.evidence.partition(", which")[0]
        + f", which it shares with relu, cat {where(case, 4, -1, 1)}",
        "remedy": "annotate it with a scale of its own",
        "share": pytest.approx(0.9),
    }
    assert played(found.treatment, torch.zeros(1)) == {place(case, 4): [0.0]}  # no edit gives it one
    ops = sites.ops_in_float(case, [2, 4, 5])
    assert set(ops) == set(SHARED)
    assert said(in_float) == {
        **said(found),
        "remedy": f"keep all that has this scale in float: {', '.join(ops)}",
        "cost": pytest.approx(MACS["b/linear"]),
    }
    assert in_float.treatment == Treatment(floats=(Edit("float", ops),))
    own = 0.49  # with scales of their own most of the error stays
    assert [each.remedy for each in unfit(without_fit(s4=1.0))] == [found.remedy]


@pytest.mark.parametrize(("times", "cause"), [(1.9, "shared-scale"), (2.1, "site-range")])
def test_a_shared_range_that_fits_no_values_is_wrong_by_itself(times: float, cause: str) -> None:
    """It is exceeded by its own width and more."""
    case = joined("xnnpack")
    low, high = limits(case.pair.sites[4].params)
    found, *_ = unfit(
        without_fit(s4=1.0), ranges=ranges(s4=(times * low, times * high), s5=(0.0, high), s2=(0.0, high))
    )
    assert found.cause == cause


def test_what_a_treatment_removes_is_an_error_of_the_worst_output() -> None:
    case = joined("xnnpack")
    whole = sites._removed(case, Treatment(exact=frozenset(case.places.values())))
    assert whole == pytest.approx(10 ** (-case.now.worst[1] / 20))
    assert sites._removed(case, Treatment()) == 0.0


def test_what_most_sites_have_in_common_is_no_fault_of_one() -> None:
    """Their observer's, or that of data that are not known."""
    case = joined("xnnpack")
    apart = facts.with_params(case, {index: {"scale": 0.01 * (index + 1)} for index in (0, 2, 4, 5, 6, 8)})
    most = without_fit(s0=1.0, s6=1.0, s8=1.0, s4=1.0)
    found = unfit(most, case=apart)
    assert [(each.cause, each.name) for each in found] == [("observer", "x")]
    assert found[0].remedy == (
        "annotate another observer: MinMaxObserver covers all values of the calibration data "
        "(int8: x, b/linear, slice_1, c/linear)"
    ) or found[0].remedy.startswith("annotate another observer")
    assert found[0].share == pytest.approx(0.9)
    assert unfit(most, case=apart, at_fault=True) == []
    three = unfit(without_fit(s0=1.0, s6=1.0, s8=1.0), case=apart)  # half of them
    assert three[0].cause == "site-range"
    assert unfit(without_fit(s0=1.0, s6=1.0, s8=1.0), case=apart, at_fault=True)[0].cause == "site-range"
    foreign = facts.judged_by(apart, pair=Changed(apart.pair, recipe=None))
    low, high = limits(apart.pair.sites[0].params)
    for values, cause in (((low, high), "wide-calibration"), ((low, 2 * high), "narrow-calibration")):
        (found_one,) = unfit(most, case=foreign, ranges=ranges(s0=values))
        assert found_one.cause == cause
        assert found_one.remedy == (
            "calibrate the model as it is now, on data like its inputs in use, with the same preprocessing"
        )


def test_what_calibration_or_a_smallest_scale_explain_is_not_told_again() -> None:
    case = joined("xnnpack")
    low, high = limits(case.pair.sites[8].params)
    noise = without_fit(s8=1.0)
    width = high - low

    def explained(lowest: float, highest: float) -> bool:
        return unfit(noise, seen={8: seen((lowest, highest))}) == []

    assert explained(low, high)
    assert explained(low, high - 0.29 * width)
    assert not explained(low, high - 0.31 * width)
    assert explained(low, high + 0.29 * width)
    assert not explained(low, high + 0.31 * width)
    tiny = facts.with_params(case, {8: {"scale": 2.0**-12}})
    assert unfit(noise, case=tiny, ranges=ranges(s8=(-1e-4, 1e-4))) == []
    assert unfit(noise, case=tiny) != []


def test_a_value_that_is_rounded_twice_shares_no_scale() -> None:
    params = joined("xnnpack").pair.sites[5].params
    own = params.largest_scale
    case = facts.with_params(joined("xnnpack"), {6: {"scale": own, "zero_point": params.zero_point}})
    assert list(sites.twice(with_facts(case))) == []
    other = facts.with_params(case, {6: {"scale": 2 * own}})
    (found,) = sites.twice(with_facts(other, {6: 0.25, 0: 0.75}))
    assert said(found) == {
        "cause": "broken-sharing",
        "name": "slice_1",
        "others": ("slice_1",),
        "evidence": f"scale {own:.4g} at cat, and {2 * own:.4g} here for the same values",
        "remedy": "share the scale: SharedQuantizationSpec of the input, since the op only moves values",
        "share": pytest.approx(0.25),
    }
    assert found.treatment == Treatment(exact=frozenset({place(case, 6)}))
    assert list(sites.twice(with_facts(other, without_fit(s6=0.25)))) == []  # its range is the fault
    for change in ({"zero_point": 77}, {"axis": 1}):
        assert len(list(sites.twice(with_facts(facts.with_params(case, {6: change}))))) == 1


def test_an_outlier_channel_is_told_with_its_reach() -> None:
    case = joined("xnnpack")
    channels = seen((-1.0, 8.0), channels=([-0.5, -9.0, -0.25], [0.25, 1.0, 0.5]))
    noise = {8: 0.2, (8, "by channel"): 0.02, (8, "fitted"): 0.19, 0: 0.8}
    made = with_facts(case, noise, ranges=ranges() | {8: channels})
    made.instead = frozenset({"by channel"})
    (found,) = sites.outliers(made)
    assert said(found) == {
        "cause": "outlier-channel",
        "name": "c/linear",
        "evidence": "channel 1 reaches 9, half of the channels stay below 0.5; a range per channel would leave "
        "10.00 % of the noise (error budget)",
        "remedy": "keep the op in float (float: c/linear), or train without the outlier",
        "cost": pytest.approx(MACS["c/linear"]),
    }
    assert found.treatment == Treatment(floats=(Edit("float", ("c/linear",)),))
    both = sites.evidence_of_outliers(with_facts(case, {**noise, (0, "by channel"): 0.48}, ranges=made.ranges), [8, 0])
    assert both.endswith("would leave 50.00 % of the noise (error budget)")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, [8]),
        ({8: 0.199}, []),
        ({(8, "by channel"): 0.021}, []),
        ({(8, "fitted"): 0.02}, []),  # a range for the tensor does as well
        ({(8, "fitted"): 0.021}, [8]),
        ({0: 0.5, 6: 0.3, (6, "by channel"): 0.0, (6, "fitted"): 0.3}, [6, 8]),
    ],
)
def test_a_site_with_outlier_channels_has_little_noise_with_ranges_by_channel(change: Any, found: list[int]) -> None:
    noise = {8: 0.2, (8, "by channel"): 0.02, (8, "fitted"): 0.19, 0: 0.8, **change}
    made = with_facts(joined("xnnpack"), noise, needless=(2,))
    assert sites.with_outliers(made, 0.2) == []
    made.instead = frozenset({"by channel"})
    assert sites.with_outliers(made, 0.2) == found
    made.needless = (8, 2)
    assert 8 not in sites.with_outliers(made, 0.2)


def test_a_fiftieth_of_all_noise_counts_among_several() -> None:
    noise = {8: 0.02, (8, "by channel"): 0.0, (8, "fitted"): 0.02, 0: 0.98}
    made = with_facts(joined("xnnpack"), noise)
    made.instead = frozenset({"by channel"})
    assert sites.with_outliers(made) == [8]
    made.known_noises = facts.noises({**noise, 8: 0.0199})
    assert sites.with_outliers(made) == []


def test_what_keeps_a_site_in_float() -> None:
    """An edit of its readers, else of its op, else of both, and what that costs."""
    case, plain = joined("xnnpack"), joined("plain")

    def edit(case: Case, index: int) -> tuple[tuple[str, ...], str, float]:
        treatment, text, cost = sites.in_float(case, case.pair.sites[index])
        (only,) = treatment.floats
        assert only.kind == "float"
        assert text == f" ({only})"
        return only.ops, text, cost

    expected = {0: ("a/linear",), 1: ("a/linear",), 2: ("relu", "b/linear", "cat"), 4: ("b/linear", "cat")}
    expected |= {5: ("cat",), 6: ("c/linear",), 7: ("c/linear",), 8: ("c/linear",)}
    for index, ops in expected.items():
        found, _, cost = edit(case, index)
        assert found == ops
        assert cost == pytest.approx(sum(MACS.get(op, 0.0) for op in ops))
    assert edit(plain, 3)[0] == ("a/linear", "relu")
    made = with_facts(case, annotations=None)
    exact = Treatment(exact=frozenset({place(case, 2)}))
    assert sites.in_float(made, case.pair.sites[2]) == (exact, "", 0.0)
    assert sites.ops_in_float(case, [0, 1, 6]) == ("a/linear", "c/linear")


def test_who_shares_a_scale() -> None:
    case = joined("xnnpack")
    found = {index: sites._sharers(case, index) for index in (0, 2, 4, 5, 8)}
    assert found == {0: (), 2: ("b/linear", "cat"), 4: ("relu", "cat"), 5: ("relu", "b/linear"), 8: ()}
    assert sites._sharers(with_facts(case, annotations=None), 2) == ()
    alone = facts.with_params(case, {index: {"scale": 0.01 * (index + 1)} for index in (0, 2, 4, 5, 6, 8)})
    assert sites._sharers(alone, 2) == ()  # annotated so, but each has its own scale


def test_edits_give_scales_of_their_own_unless_that_changes_nothing() -> None:
    case = joined("xnnpack")
    found = sites.Hypothesis("site-range", "x", "", "do it", Treatment(exact=frozenset({place(case, 0)})))
    made = sites.with_own_scales(case, found, [0, 1, 8])
    assert made.remedy == "do it (int8: x, c/linear; int8_weight: a/linear)"
    assert made.treatment == Treatment(edits=(Edit("int8", ("x", "c/linear")), Edit("int8_weight", ("a/linear",))))
    assert made.preview == found.treatment
    assert sites.with_own_scales(case, found, [4], apart=True) is found
    assert sites.with_own_scales(case, found, [4]).treatment == Treatment(edits=(Edit("int8", ("b/linear",)),))
    assert sites.with_own_scales(with_facts(case, annotations=None), found, [0]) is found
