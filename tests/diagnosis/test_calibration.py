"""What calibration data are told from: ranges by batch, sizes of inputs, single samples and batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pt2qa._diagnosis.case import Case
from pt2qa._diagnosis.hypotheses import calibration
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.data import Data
from pt2qa._trials.treatment import Treatment
from tests.diagnosis.facts import case_of, judged_by, said, seen, with_facts
from tests.flows import quantized_pair

REMEDY = "calibrate on data like the model's inputs in use, with the same preprocessing"
CALL = "pt2qa.quantize(capture, 'xnnpack', batches)"


@pytest.fixture(scope="module")
def case() -> Case:
    """Its sites are the input, a relu and the output at 0, 2 and 4, two weights at 1 and 3."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    batches = list(torch.randn(4, 8, 8))
    return case_of(quantized_pair(net, batches[0], batches=[0.1 * batch for batch in batches]), batches)


WIDE, NARROW = seen((-8.0, 8.0), (-6.0, 9.0), (-7.0, 7.0)), seen((-1.0, 1.0), (-1.0, 1.0))


def excess(**by_site: float) -> dict[Any, float]:
    """Noise of sites, none of which is left with fitted ranges."""
    sites = {int(name[1:]): each for name, each in by_site.items()}
    return {**sites, **{(site, "fitted"): 0.0 for site in sites}}


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "by_input", lambda case: None)


@pytest.mark.usefixtures("no_input")
@pytest.mark.parametrize("narrow", [True, False])
def test_calibration_data_are_narrow_or_wide_where_most_of_the_noise_is(case: Case, narrow: bool) -> None:
    noise = excess(s0=0.2, s2=0.75, s4=0.04)  # the last is beyond 90 %
    most, other = (WIDE, NARROW) if narrow else (NARROW, WIDE)
    ranges, shown = {0: other, 2: most, 4: most}, {0: most, 2: other, 4: other}
    made = with_facts(case, noise, ranges=ranges, seen=shown)
    by_observers, by_minmax, *on_both = calibration.ranges_of_calibration(made)
    low, high = limits(case.pair.sites[2].params)
    lowest, highest = most.whole
    beyond = (max(low - lowest, 0) + max(highest - high, 0)) / (high - low)
    used = (highest - lowest) / (high - low)
    what = (
        f"values exceed the calibrated range at 2 sites; here by {100 * beyond:.2f} % of it"
        if narrow
        else f"ranges are wider than the values at 2 sites; here {100 * used:.2f} % is used"
    )
    here, there = ("3 batches", "2 calibration batches") if narrow else ("2 batches", "3 calibration batches")
    fields = {
        "cause": "narrow-calibration" if narrow else "wide-calibration",
        "name": "1/relu",
        "evidence": f"{what} (ranges of {here} and of {there})",
        "others": ("1/relu", "input"),
    }
    assert said(by_observers) == {**fields, "remedy": f"{REMEDY}: {CALL}"}
    assert said(by_minmax) == {**fields, "remedy": f"{REMEDY} and min-max observers: {CALL}"}
    assert by_observers.treatment == Treatment(data=case.data)
    (edit,) = by_minmax.treatment.edits
    assert (edit.kind, edit.observer, by_minmax.treatment.data) == ("observer", "minmax", case.data)
    if not narrow:  # more data make no range narrower
        assert on_both == []
        return
    remedy = REMEDY.replace(", with the same preprocessing", ", too")
    assert [each.remedy for each in on_both] == [
        f"{remedy}{how}: pt2qa.quantize(capture, 'xnnpack', [*calibration, *batches])"
        for how in ("", ", with min-max observers")
    ]
    assert [bool(each.treatment.edits) for each in on_both] == [False, True]
    own = [*(case.calibration or ()), *case.data]
    for each in on_both:
        data = each.treatment.data
        assert data is not None
        for _ in range(2):  # it starts over
            read = list(data)
            assert len(read) == len(own) == 8
            assert all(map(torch.equal, read, own))


@pytest.mark.usefixtures("no_input")
@pytest.mark.parametrize("narrow", [True, False])
def test_an_input_that_differs_as_the_values_made_from_it_is_named(case: Case, narrow: bool) -> None:
    sites, noise = (0, 2, 4), excess(s0=0.2, s2=0.75, s4=0.04)
    ranges, shown = (dict.fromkeys(sites, each) for each in ((WIDE, NARROW) if narrow else (NARROW, WIDE)))
    found = next(calibration.ranges_of_calibration(with_facts(case, noise, ranges=ranges, seen=shown)))
    assert (found.cause, found.name) == ("narrow-calibration" if narrow else "wide-calibration", "input")
    assert found.others == ("1/relu", "input")


@pytest.mark.usefixtures("no_input")
def test_where_ranges_cost_nothing_or_are_of_one_kind_no_data_are_to_blame(case: Case) -> None:
    def found(noise: Any, ranges: Any, shown: Any, **facts: Any) -> int:
        sites = (0, 2, 4)
        given = with_facts(case, noise, ranges=dict.fromkeys(sites, ranges), seen=dict.fromkeys(sites, shown), **facts)
        return len(list(calibration.ranges_of_calibration(given)))

    noise = excess(s0=0.2, s2=0.7, s4=0.1)
    assert found(noise, WIDE, NARROW) == 4
    assert found(noise, WIDE, WIDE) == 0
    assert found({0: 0.2, (0, "fitted"): 0.2}, WIDE, NARROW) == 0
    assert found(noise, WIDE, NARROW, annotations=None) == 2  # no observers to change
    apart = case_of(case.pair, case.data.batches, case.data.batches[:2])
    both = dict.fromkeys((0, 2, 4), WIDE)
    assert len(list(calibration.ranges_of_calibration(with_facts(apart, noise, ranges=both, seen=both)))) == 2
    assert list(calibration.ranges_of_calibration(with_facts(case, noise, ranges=both, seen={}))) == []


def test_data_whose_input_is_in_another_unit_have_one_reason(case: Case) -> None:
    noise, sites = excess(s0=0.2, s2=0.7, s4=0.1), (0, 2, 4)
    made = with_facts(case, noise, ranges=dict.fromkeys(sites, WIDE), seen=dict.fromkeys(sites, NARROW))
    assert list(calibration.ranges_of_calibration(made)) == []
    ratio = 0.1
    found, with_observers = calibration.inputs(made)
    assert said(found) == {
        "cause": "narrow-calibration",
        "name": "input",
        "evidence": "the values of input in the calibration data are 10 x smaller than those in use "
        "(root mean square of the sample in the middle)",
        "remedy": f"{REMEDY}: {CALL}",
        "sentence": "the calibration data have input in another unit than the data in use",
        "audited": True,
    }
    assert with_observers.remedy == f"{REMEDY} and min-max observers: {CALL}"
    assert calibration.by_input(made) == ("input", pytest.approx(ratio))


class Two(nn.Module):
    """A picture of two channels, a sequence of more, and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.table = nn.Conv2d(2, 4, 1), nn.Linear(6, 4), nn.Embedding(5, 4)

    def forward(self, picture: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
        return self.conv(picture).mean((2, 3)) + self.head(tokens).mean(1) + self.table(index)


def batch_of(one: float, two: float, tokens: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values of these sizes with changing signs; as many channels as samples."""
    signs = torch.tensor([1.0, -1.0])
    picture = torch.tensor([one, two])[None, :, None, None] * signs.repeat(1, 2, 2, 1)
    return picture.repeat(2, 1, 1, 1), tokens * signs.repeat(2, 5, 3), torch.tensor([1, 2])


@pytest.fixture(scope="module")
def pictures() -> Case:
    batches = [batch_of(3.0, 1.0, 2.0), batch_of(2.0, 1.0, 2.0), batch_of(9.0, 1.0, 2.0)]
    pair = quantized_pair(Two(), batches[0], batches=[batch_of(2.0, 1.0, 2.0)])
    return case_of(pair, batches)


def test_sizes_are_by_channel_of_pictures_and_in_the_sample_in_the_middle(pictures: Case) -> None:
    sizes = calibration._sizes(pictures, pictures.data)
    assert sizes == pytest.approx({"picture, channel 0": 3.0, "picture, channel 1": 1.0, "tokens": 2.0})


def test_one_sample_does_not_make_a_unit() -> None:
    """A glitch of the sensor in one of four: calibration on it would ruin all others."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    made = case_of(quantized_pair(nn.Linear(8, 4), batch, batches=[batch]), [batch * torch.tensor([[1, 1, 30, 1]]).T])
    assert made.is_calibrated_on_others
    assert calibration._sizes(made, made.data)["input"] < 1.5 * calibration._sizes(made, made.calibration)["input"]
    assert list(calibration.inputs(made)) == []


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ((2.0, 1.0, 2.0), ("picture, channel 0", 2 / 3)),
        ((2.01, 1.0, 2.0), None),  # less than 1.5 times
        ((4.5, 1.0, 2.0), ("picture, channel 0", 1.5)),
        ((4.49, 1.0, 2.0), None),
        ((1.0, 1.0, 10.0), ("tokens", 5.0)),
        ((30.0, 0.0, 2.0), ("picture, channel 1", 0.0)),
    ],
)
def test_the_input_that_is_most_different(pictures: Case, shown: Any, found: Any) -> None:
    recipe = replace(pictures.judge.recipe, data=Data("calibration", [batch_of(*shown)]))  # type: ignore[type-var]
    pair = replace(pictures.pair, recipe=recipe)
    made = judged_by(pictures, pair=pair)
    by_input = calibration.by_input(made)
    assert by_input == (found and (found[0], pytest.approx(found[1])))
    told = [each.evidence.partition(" (root")[0] for each in calibration.inputs(made)]
    if found is None:
        assert told == []
    elif not found[1]:
        assert set(told) == {"the values of picture, channel 1 in the calibration data are all zero"}
    else:
        times = f"{max(found[1], 1 / found[1]):.4g} x {'larger' if found[1] > 1 else 'smaller'} than those in use"
        assert set(told) == {f"the values of {found[0]} in the calibration data are {times}"}
        causes = {each.cause for each in calibration.inputs(made)}
        assert causes == {"wide-calibration" if found[1] > 1 else "narrow-calibration"}
        assert {each.name for each in calibration.inputs(made)} == {found[0].partition(",")[0]}


def test_an_input_that_is_all_zero_in_use_has_no_ratio(pictures: Case) -> None:
    zero = [batch_of(0.0, 1.0, 2.0)]
    recipe = replace(pictures.judge.recipe, data=Data("calibration", [batch_of(9.0, 1.0, 2.0)]))  # type: ignore[type-var]
    made = judged_by(pictures, pair=replace(pictures.pair, recipe=recipe))
    made.data = Data("batches", zero)
    assert calibration.by_input(made) is None


@pytest.mark.parametrize(
    ("found", "beyond"),
    [
        ([(-1.0, 1.51)], False),  # of a range of 3, half a time as wide
        ([(-1.0, 3.49)], True),  # most of the batches, by a tenth
        ([(-1.0, 2.29)], False),
        ([(-1.0, 2.31)], True),
        ([(-1.31, 1.0)], True),
        ([(-1.16, 2.16)], True),  # on both sides together
        ([(-1.0, 2.31), (-1.0, 2.0)], False),  # half of the batches
        ([(-1.0, 2.31), (-1.0, 2.31), (-1.0, 2.0)], True),
        ([(-1.0, 3.49), (-1.0, 2.0)], False),
        ([(-1.0, 3.51), (-1.0, 2.0)], True),  # one batch, by half
        ([(-1.0, 2.07)] * 3, True),  # each one, by a fiftieth
        ([(-1.0, 2.05)] * 3, False),
        ([(-1.0, 2.07)] * 2, False),  # that are too few
        ([(-1.0, 2.07), (-1.0, 2.07), (-1.0, 2.05)], False),
    ],
)
def test_values_beyond_what_calibration_saw(found: list[tuple[float, float]], beyond: bool) -> None:
    assert calibration.goes_beyond(seen(*found), seen((-1.0, 0.5), (-0.5, 2.0))) == beyond


def test_a_range_has_zero_in_it() -> None:
    """What calibration saw from 1 to 2 is rounded in 0 to 2."""
    assert not calibration.goes_beyond(seen((0.5, 2.0)), seen((1.0, 2.0)))
    assert not calibration.goes_beyond(seen(*[(0.0, 0.0)] * 3), seen((0.0, 0.0)))
    assert calibration.goes_beyond(seen((-0.3, 2.0)), seen((1.0, 2.0)))
    assert calibration.goes_beyond(seen((-2.0, 0.3)), seen((-2.0, -1.0)))
    assert not calibration.goes_beyond(seen((-2.0, -0.5)), seen((-2.0, -1.0)))
    assert calibration._stays_within(seen((1.0, 1.19)), seen((1.0, 2.0)))
    assert not calibration._stays_within(seen((1.0, 1.21)), seen((1.0, 2.0)))
    assert [calibration._width(ends) for ends in ((-1.0, 2.0), (1.0, 2.0), (-2.0, -1.0), (math.nan, math.nan))] == [
        *(3.0, 2.0, 2.0, 0.0)
    ]


@pytest.mark.parametrize(("share", "differs"), [(0.51, True), (0.5, False)])
@pytest.mark.parametrize("wider", [True, False])
def test_data_are_of_another_kind_where_most_of_the_noise_is_beyond(
    case: Case, share: float, differs: bool, wider: bool
) -> None:
    one, other = (WIDE, NARROW) if wider else (NARROW, WIDE)
    ranges, shown = {0: one, 2: one, 4: NARROW}, {0: NARROW, 2: other, 4: NARROW}
    shown[0] = ranges[0]
    made = with_facts(case, excess(s0=1 - share, s2=share), ranges=ranges)
    assert calibration.is_of_another_kind(made, shown) == differs


def test_a_batch_that_doubles_the_ranges_is_an_outlier(case: Case) -> None:
    """Its number, where it is widest, and what is left without it; where most of what ranges cost is."""
    even, odd = seen((-1.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)), seen((-1.0, 1.0), (-5.0, 4.0), (-1.0, 2.0))
    own = Data("calibration", case.data.batches[:3])

    def found(noise: Any, ranges: Any) -> list[Any]:
        return list(calibration._outliers(with_facts(case, noise), own, ranges))

    ((number, outlier),) = found(excess(s0=0.2, s2=0.35, s4=0.45), {0: odd, 2: odd, 4: even})
    assert number == 1
    assert said(outlier) == {
        "cause": "calibration-outlier",
        "name": "1/relu",
        "others": ("1/relu", "input"),
        "evidence": "calibration batch 1 more than doubles 2 ranges; here 9 instead of 3",
        "remedy": "drop batch 1 from the calibration data",
    }
    data = outlier.treatment.data
    assert data is not None
    assert data.name == "[batch for number, batch in enumerate(calibration) if number != 1]"
    assert [*map(id, data.batches)] == [id(own.batches[0]), id(own.batches[2])]
    assert [*map(id, data.batches)] == [id(own.batches[0]), id(own.batches[2])]  # it starts over
    assert found(excess(s0=0.2, s2=0.3, s4=0.5), {0: odd, 2: odd, 4: even}) == []  # half is not most
    tiny = seen((-0.01, 0.01), (-0.05, 0.04), (-0.01, 0.02))
    assert [number for number, _ in found(excess(s0=1.0), {0: tiny, 2: even, 4: even})] == [1]
    zero = seen((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))  # all zeros have no range to widen, whatever they cost
    assert [number for number, _ in found(excess(s0=0.2, s4=0.8), {0: odd, 2: odd, 4: zero})] == [1]
    half = seen((-1.0, 1.0), (-2.0, 2.0), (-1.0, 1.0))
    assert found(excess(s0=1.0), {0: half, 2: even, 4: even}) == []  # exactly half is left
    first = seen((-5.0, 4.0), (-1.0, 1.0), (-1.0, 1.0))
    assert [number for number, _ in found(excess(s0=1.0), {0: first, 2: even, 4: even})] == [0]
    one = seen((-5.0, 4.0))
    assert found(excess(s0=1.0), {0: one, 2: one, 4: one}) == []
    assert found({0: 0.0}, {0: odd, 2: odd, 4: odd}) == []


@pytest.mark.usefixtures("no_input")
def test_ranges_are_compared_without_outliers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is dropped explains no ranges that are too wide."""
    outlier = calibration.Hypothesis("calibration-outlier", "", "", "drop it", Treatment())
    monkeypatch.setattr(calibration, "_outliers", lambda *given: iter([(1, outlier)]))
    odd, sites = seen((-1.0, 1.0), (-5.0, 4.0), (-1.0, 1.0)), (0, 2, 4)
    made = with_facts(case, excess(s0=1.0), ranges=dict.fromkeys(sites, NARROW), seen=dict.fromkeys(sites, odd))
    apart = calibration.freaks(made)
    assert list(calibration.ranges_of_calibration(made, apart)) == []
    ((number, (alone, by_extremes)),) = apart.items()
    assert number == 1
    assert alone == outlier
    assert by_extremes.remedy == "drop it, with min-max observers"
    assert {edit.kind for edit in by_extremes.treatment.edits} == {"observer"}
    unknown = with_facts(made, seen={})
    assert calibration.freaks(unknown) == {}


def test_a_bad_sample_tells_its_share(case: Case) -> None:
    worst = replace(case.now, worst_sample=9, worst_sample_share=0.5, worst_sample_sqnr=3.14)
    (found,) = calibration.bad_sample(case, Treatment(data=case.data), worst)
    assert said(found) == {
        "cause": "bad-sample",
        "name": "",
        "evidence": "sample 9 accounts for 50.00 % of the noise of 32 samples, has 3.1 dB, and calibrates the model",
        "remedy": "calibrate without its batch, and check that it was preprocessed like the others: "
        "pt2qa.find_bad_cases(pair, batches) keeps its inputs",
        "unseen": 9,
    }
    assert found.treatment.data is not None
    assert found.treatment.data.name == "calibration without this batch"
    own = [Data("calibration", [case.data.batches[number]]) for number in (1, 0)]
    assert list(calibration.bad_sample(case, Treatment(data=own[0]), worst)) == []  # nothing would be left
    assert list(calibration.bad_sample(case, Treatment(data=own[1]), worst)) == []  # it is not in it
    for sample, batch in ((7, 0), (8, 1), (0, 0), (31, 3)):
        (found,) = calibration.bad_sample(case, Treatment(data=case.data), replace(worst, worst_sample=sample))
        left = [id(each) for number, each in enumerate(case.data.batches) if number != batch]
        assert found.treatment.data is not None
        assert [*map(id, found.treatment.data.batches)] == left
    recipe = replace(case.judge.recipe, data=case.data)  # type: ignore[type-var]
    calibrated = judged_by(case, pair=replace(case.pair, recipe=recipe))
    assert len(list(calibration.bad_sample(calibrated, Treatment(), worst))) == 1
    unknown = judged_by(case, pair=replace(case.pair, recipe=None))
    assert list(calibration.bad_sample(unknown, Treatment(), worst)) == []
    assert (
        list(calibration.bad_sample(case, Treatment(data=case.data), replace(worst, worst_sample_share=math.nan))) == []
    )
